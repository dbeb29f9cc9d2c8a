"""The collective without processes: the bytes that ranks would exchange, computed by one.

Bit for bit what `TwoHop` gives, on a CPU or a GPU. Quality runs use it with micro-batches for ranks.
"""

import torch
from torch import Tensor

from lowbit.comm.codec import Codec, Fp32Codec
from lowbit.comm.noise import Noise
from lowbit.comm.partition import piece_length, pieces, share


@torch.no_grad()
def simulate(
    tensors: list[Tensor],
    codec: Codec,
    chunk_values: int | None = None,
    factor: float | None = None,
    *,
    node_size: int = 1,
    intra_codec: Codec | None = None,
    noise: Noise | None = None,
) -> Tensor:
    """What `TwoHop.all_reduce_` leaves on every rank.

    Args:
        tensors: [n] for each rank, node by node. Not changed.
        node_size: ranks of a node, which exchange in `intra_codec` (FP32 if None).

    Returns:
        [n] in the tensors' type.
    """
    ranks = len(tensors)
    if ranks % node_size:
        raise ValueError(f"{ranks} ranks cannot be nodes of {node_size}")
    factor = 1 / ranks if factor is None else factor
    out = torch.empty_like(tensors[0])
    if ranks == 1:
        return out.copy_(tensors[0]).mul_(factor)
    nodes = ranks // node_size
    codec = codec if nodes > 1 else Fp32Codec()
    intra = intra_codec or Fp32Codec()
    length = chunk_values or piece_length(ranks, out.is_cuda)
    for k, (a, b) in enumerate(pieces(out.numel(), length)):
        stream = noise.fork(k) if noise else None
        own = b - a if node_size == 1 else share(b - a, node_size, intra.align)
        for place in range(node_size):
            part = out[a + place * own : min(b, a + (place + 1) * own)]
            shards = []
            for node in range(nodes):
                of_node = [t[a:b] for t in tensors[node * node_size : (node + 1) * node_size]]
                shards.append(of_node[0] if node_size == 1 else _node_sum(of_node, place, own, intra))
            first = [node * node_size + place for node in range(nodes)]
            _between(shards, part, codec, factor, stream, first)
    return out


def _node_sum(tensors: list[Tensor], place: int, length: int, codec: Codec) -> Tensor:
    """One rank's share of its node's sum, FP32 [length]."""
    messages = [codec.encode_rows(t, len(tensors), length)[place] for t in tensors]
    return codec.sum_decode(torch.stack(messages), length, 1.0)


def _between(
    shards: list[Tensor], out: Tensor, codec: Codec, factor: float, noise: Noise | None, ranks: list[int]
) -> None:
    """The two hops over the nodes' shards [length] -> out [up to length]."""
    nodes = len(shards)
    per_rank = share(shards[0].numel(), nodes, codec.align)
    sent = torch.stack(
        [
            codec.encode_rows(x, nodes, per_rank, noise.fork(1, rank) if noise else None)
            for x, rank in zip(shards, ranks, strict=True)
        ]
    )  # [from, to, bytes]
    messages = torch.stack(
        [
            codec.sum_encode(sent[:, owner].contiguous(), per_rank, factor, noise.fork(2, rank) if noise else None)
            for owner, rank in enumerate(ranks)
        ]
    )
    if out.numel():
        codec.decode_rows(messages, per_rank, out)
