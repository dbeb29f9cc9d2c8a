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
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowbit.infer import kernels
from lowbit.infer.cache import View
from lowbit.infer.native import NativeLinear
from lowbit.infer.packed import Forms, PackedLinear, finish
from lowbit.infer.unfinished import Unfinished
from lowbit.infer.weights import HeldWeights
from lowbit.models.attention import AttentionMask
from lowbit.models.block import KV, Attention, AttentionOutput, Block, BlockOutput
from lowbit.models.layers import Embedding, KVCache, Linear, RMSNorm, project
from lowbit.models.moe import Mlp
from lowbit.models.rope import Rope
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
        return self.with_product(x, Unfinished.of(delta.flatten(0, -2)))

    def with_product(self, x: Tensor, delta: Unfinished) -> tuple[Tensor, Tensor]:
        """The same with a delta of as many rows as x has."""
        total, normed = kernels.add_norm(x, delta, self.weight, self.eps)
        return total, normed


class FusedEmbedding(Embedding):
    """`Embedding` in the type that the model computes in."""

    dtype = torch.bfloat16

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens int64 [rows, length] -> [rows, length, width]."""
        y: Tensor = kernels.embed(tokens.reshape(-1), self.weight, self.dtype)
        return y.view(*tokens.shape, -1)


def begin(x: Tensor, first: Linear, *others: Linear) -> tuple[Unfinished, ...]:
    """The products of layers that read the same x [rows, in], as far as they go before who reads them."""
    if isinstance(first, PackedLinear):
        return first.begin(x, others)
    return tuple(map(Unfinished.of, project(x, first, *others)))


class FusedMlp(Mlp):
    """The gated `Mlp` with one kernel between its products."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> [..., width]."""
        return finish(self.begin(x.flatten(0, -2))).view(x.shape)

    def begin(self, x: Tensor) -> Unfinished:
        """x [rows, width] -> the same."""
        assert self.gate is not None
        gate, up = begin(x, self.gate, self.up)
        [y] = begin(kernels.silu_mul(gate, up), self.down)
        return y


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
        if not isinstance(cache, View) or not cache.decodes(x.shape[1]):
            return super().forward(x, mask, rope, borrowed, cache, slot)
        return AttentionOutput(finish(self.begin(x[:, 0], mask, rope, cache, slot))[:, None], None, None, None)

    def begin(self, x: Tensor, mask: AttentionMask, rope: Rope, cache: View, slot: int) -> Unfinished:
        """A decoding step's x [rows, width] -> the same."""
        assert self.k is not None and self.v is not None
        q, k, v = begin(x, self.q, self.k, self.v)
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        [y] = begin(cache.decode(slot, (q, k, v), norms, rope, mask).flatten(1), self.out)
        return y


class FusedBlock(Block):
    """`Block` whose sums are one kernel with the norms that come next, and finish the products that they add."""

    next_norm: FusedNorm
    """Of the next block, or of the model; not a module of this one."""

    def _forward(
        self,
        x: Tensor,
        mask: AttentionMask,
        rope: Rope,
        borrowed: KV | None = None,
        cache: KVCache | None = None,
        slot: int = 0,
    ) -> BlockOutput:
        attention, norm, mlp = self.attention, self.mlp_norm, self.mlp
        decodes = isinstance(cache, View) and cache.decodes(x.shape[1])
        if not (decodes and type(attention) is FusedAttention and type(norm) is FusedNorm and type(mlp) is FusedMlp):
            return super()._forward(x, mask, rope, borrowed, cache, slot)
        assert isinstance(cache, View)
        h = self.attention_norm(x)
        x, h = norm.with_product(x, attention.begin(h[:, 0], mask, rope, cache, slot))
        x, normed = self.next_norm.with_product(x, mlp.begin(h[:, 0]))
        self.next_norm.given = (x, normed)
        return BlockOutput(x, None)

    def _ending(self, x: Tensor, delta: Tensor) -> Tensor:
        x, normed = self.next_norm.with_sum(x, delta)
        self.next_norm.given = (x, normed)
        return x


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

    def begin(self, x: Tensor, others: Sequence[Linear]) -> tuple[Unfinished, ...]:
        """See `PackedLinear.begin`."""
        if self.joined is None or not self.joined.fits(others):
            return super().begin(x, others)
        return self.joined.form.begin(x).split(self.joined.sizes)


class PackedBuffers(Joined):
    """Of packed siblings: codes and scales as well."""

    def __init__(self, held: HeldWeights, names: Sequence[str]) -> None:
        super().__init__(held, names)
        first = held.layers[names[0]]
        assert isinstance(first, PackedLinear)
        data = held.join(names, "frozen_data")
        scales = None if first.frozen_scales is None else held.join(names, "frozen_scales")
        self.form = Forms(
            self.weight, data, scales, None if first.frozen_scale is None else held.join(names, "frozen_scale")
        )


class JoinedNative(NativeLinear):
    """A `NativeLinear` that multiplies for its siblings, too."""

    joined: "NativeBuffers | None" = None

    def project_together(self, x: Tensor, others: Sequence[Linear]) -> tuple[Tensor, ...]:
        """See `Linear.project_together`."""
        if self.joined is None or not self.joined.fits(others):
            return super().project_together(x, others)
        [y] = self.multiply(x, [self.joined.native])
        return torch.split(y, self.joined.sizes, dim=-1)


class NativeBuffers(Joined):
    """Of siblings that hold codes, with a scale a row."""

    def __init__(self, held: HeldWeights, names: Sequence[str]) -> None:
        super().__init__(held, names)
        scales = held.join(names, "frozen_scale")
        first = held.layers[names[0]]
        assert isinstance(first, NativeLinear)
        one = first.native()
        self.native = replace(one, codes=self.weight, scales=scales, shape=(len(self.weight), one.shape[1]))


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
    for was, will in ((Linear, JoinedLinear), (PackedLinear, JoinedPacked), (NativeLinear, JoinedNative)):
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
    if isinstance(first, JoinedNative):
        if _each_row_has_a_scale(layers):
            first.joined = NativeBuffers(held, found)
        return
    if any(layer.frozen is None or layer.frozen.dtype is not torch.bfloat16 for layer in layers):
        return  # FP32 copies are the masters themselves
    if isinstance(first, JoinedLinear):
        first.joined = Joined(held, found)
    elif isinstance(first, JoinedPacked):
        first.joined = PackedBuffers(held, found)


def _each_row_has_a_scale(layers: Sequence[Linear]) -> bool:
    """Whether native layers of one policy can be rows of one weight."""
    first = layers[0]
    if not isinstance(first, NativeLinear):
        return False
    alike = all(isinstance(layer, NativeLinear) and first.computes_as(layer) for layer in layers)
    shapes = [(layer.out_features, 1) for layer in layers]
    return alike and [layer.native().scales.shape for layer in layers if isinstance(layer, NativeLinear)] == shapes
