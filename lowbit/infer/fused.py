"""Fewer launches a step: a sampler's modules exchanged for ones that compute the same in fewer kernels, on a GPU.

A decoding step of a small model is bound by the number of its kernels (`kernels/fused.py`), so here

    q, k, v and gate, up     are one product each: their frozen weights lie in one buffer, of which theirs are views
    embedding                is one kernel in place of two, one of which is slow for few tokens
    RMSNorm                  is one kernel in place of three
    the gated MLP            multiplies silu(gate) and up in one
    a block's last sum       is one with the next block's norm
    attention                normalises, turns and stores in one kernel before it attends

which leaves eleven launches a layer of some twenty-four. Only the sampler's own tree of modules is touched, so the
model as written stays the definition; a layer that does not fit a pattern stays what it is.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowbit.infer import kernels
from lowbit.infer.cache import View
from lowbit.infer.packed import PackedLinear
from lowbit.infer.weights import HeldWeights
from lowbit.models.attention import AttentionMask
from lowbit.models.block import KV, Attention, AttentionOutput, Block, Rope
from lowbit.models.layers import Embedding, KVCache, Linear, RMSNorm, project
from lowbit.models.moe import Mlp
from lowbit.models.transformer import Transformer


class FusedNorm(RMSNorm):
    """`RMSNorm` in one kernel, or in none: where the block before it has added and normalised together."""

    given: tuple[Tensor, Tensor] | None = None
    """An input and what comes out for it, from whoever has normalised it with this norm's weight already."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> [..., width]."""
        given, self.given = self.given, None
        if given is not None and given[0] is x:
            return given[1]
        y: Tensor = kernels.rms_norm(x, self.weight, self.eps)
        return y

    def with_sum(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """x + delta, and that normalised."""
        total, normed = kernels.add_norm(x, delta, self.weight, self.eps)
        return total, normed


class FusedEmbedding(Embedding):
    """`Embedding` in the type that the model computes in."""

    dtype = torch.bfloat16

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens int64 [rows, length] -> [rows, length, width]."""
        y: Tensor = kernels.embed(tokens.reshape(-1), self.weight, self.dtype)
        return y.view(*tokens.shape, -1)


class FusedMlp(Mlp):
    """The gated `Mlp` with one kernel between its products."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> [..., width]."""
        assert self.gate is not None
        gate, up = project(x, self.gate, self.up)
        hidden = kernels.silu_mul(gate.flatten(0, -2), up.flatten(0, -2))
        y: Tensor = self.down(hidden.view(*x.shape[:-1], -1))
        return y


class FusedBlock(Block):
    """`Block` whose last sum is one kernel with the norm that comes next."""

    next_norm: FusedNorm
    """Of the next block, or of the model; not a module of this one."""

    def _ending(self, x: Tensor, delta: Tensor) -> Tensor:
        x, normed = self.next_norm.with_sum(x, delta)
        self.next_norm.given = (x, normed)
        return x


class FusedAttention(Attention):
    """`Attention` whose decoding step normalises, turns and stores in one kernel."""

    def forward(
        self,
        x: Tensor,
        mask: AttentionMask,
        rope: Rope,
        borrowed: KV | None = None,
        cache: KVCache | None = None,
        slot: int = 0,
    ) -> AttentionOutput:
        """See `Attention.forward`."""
        if not isinstance(cache, View) or not cache.decodes(x.shape[1]) or self.k is None or self.v is None:
            return super().forward(x, mask, rope, borrowed, cache, slot)
        q, k, v = project(x[:, 0], self.q, self.k, self.v)
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        y = cache.decode(slot, (q, k, v), norms, rope, mask)
        return AttentionOutput(self.out(y.flatten(1))[:, None], None, None, None)


class JoinedLinear(Linear):
    """A `Linear` that multiplies for its siblings, too."""

    joined: "Joined | None" = None

    def project_together(self, x: Tensor, others: Sequence[Linear]) -> tuple[Tensor, ...]:
        """See `Linear.project_together`."""
        if self.joined is None or not self.joined.fits(others):
            return super().project_together(x, others)
        return torch.split(F.linear(x, self.joined.weight), self.joined.sizes, dim=-1)


class Joined:
    """Frozen weights of siblings in one buffer."""

    def __init__(self, held: HeldWeights, names: Sequence[str]) -> None:
        layers = [held.layers[name] for name in names]
        self.others = layers[1:]
        self.sizes = [layer.out_features for layer in layers]
        self.weight = held.join(names, "frozen")

    def fits(self, others: Sequence[nn.Module]) -> bool:
        """Whether these are the siblings."""
        return len(others) == len(self.others) and all(a is b for a, b in zip(others, self.others, strict=True))


class JoinedPacked(PackedLinear):
    """A `PackedLinear` that multiplies for its siblings, too."""

    joined: "PackedBuffers | None" = None

    def project_together(self, x: Tensor, others: Sequence[Linear]) -> tuple[Tensor, ...]:
        """See `Linear.project_together`."""
        if self.joined is None or not self.joined.fits(others):
            return super().project_together(x, others)
        flat = x.reshape(-1, x.shape[-1])
        y = self.multiply(flat, self.joined.weight, self.joined.data, self.joined.scales, self.joined.after)
        return torch.split(y.view(*x.shape[:-1], -1), self.joined.sizes, dim=-1)


class PackedBuffers(Joined):
    """Of packed siblings: codes and scales as well."""

    def __init__(self, held: HeldWeights, names: Sequence[str]) -> None:
        super().__init__(held, names)
        self.data = held.join(names, "frozen_data")
        first = held.layers[names[0]]
        assert isinstance(first, PackedLinear)
        self.scales = None if first.frozen_scales is None else held.join(names, "frozen_scales")
        self.after = None if first.frozen_scale is None else held.join(names, "frozen_scale")


def exchange(model: Transformer) -> None:
    """Exchange the modules of a sampler's model, before its weights are held."""
    for block in model.blocks:
        for norm in ("attention_norm", "mlp_norm"):
            _become(getattr(block, norm), RMSNorm, FusedNorm)
        for module in block.modules():
            if isinstance(module, Mlp) and module.gate is not None:
                _become(module, Mlp, FusedMlp)
                _lead(module.gate, [module.up])
        attention = block.attention
        assert isinstance(attention, Attention)
        if attention.k is None or attention.v is None:
            continue
        _lead(attention.q, [attention.k, attention.v])
        if attention.q_norm is None or attention.q_norm.weight.shape[0] == attention.head_dim:
            _become(attention, Attention, FusedAttention)
    _become(model.final_norm, RMSNorm, FusedNorm)
    _chain(model)
    _become(model.embedding, Embedding, FusedEmbedding)
    if isinstance(model.embedding, FusedEmbedding):
        model.embedding.dtype = model.compute_dtype


def _chain(model: Transformer) -> None:
    """Let each block's last sum be one kernel with the norm behind it."""
    norms = [*(block.attention_norm for block in model.blocks[1:]), model.final_norm]
    for block, norm in zip(model.blocks, norms, strict=True):
        assert isinstance(block, Block)
        if not block.norms_after and type(norm) is FusedNorm:
            _become(block, Block, FusedBlock)
            block.__dict__["next_norm"] = norm


def _become(module: nn.Module, was: type[nn.Module], will: type[nn.Module]) -> None:
    """Another class of the same fields; of exactly that class only."""
    if type(module) is was:
        module.__class__ = will


def _lead(first: Linear, others: Iterable[Linear]) -> None:
    """Make the first of siblings of one kind the one that multiplies."""
    for was, will in ((Linear, JoinedLinear), (PackedLinear, JoinedPacked)):
        if all(type(layer) is was for layer in (first, *others)):
            _become(first, was, will)


def join(model: Transformer, held: HeldWeights) -> None:
    """Put the frozen weights of siblings side by side."""
    names = {id(layer): name for name, layer in held.layers.items()}
    for block in model.blocks:
        for module in block.modules():
            if isinstance(module, Mlp) and module.gate is not None:
                _join(held, names, [module.gate, module.up])
            elif isinstance(module, Attention) and module.k is not None and module.v is not None:
                _join(held, names, [module.q, module.k, module.v])


def _join(held: HeldWeights, names: dict[int, str], layers: list[Linear]) -> None:
    first, found = layers[0], [names[id(layer)] for layer in layers]
    if any(layer.frozen is None or layer.frozen.dtype is not torch.bfloat16 for layer in layers):
        return  # FP32 copies are the masters themselves
    if isinstance(first, JoinedLinear):
        first.joined = Joined(held, found)
    elif isinstance(first, JoinedPacked):
        first.joined = PackedBuffers(held, found)
