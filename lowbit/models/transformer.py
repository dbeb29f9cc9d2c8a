"""The decoder: embedding, L blocks, final norm, LM head.

    x = embedding[tokens]
    x = block(x)                                           L times (models/block.py)
    hidden = norm(x)                                       (the head is models/lm_head.py, chunked)

Initialisation: every matrix, the embedding and the head included, is normal with standard deviation `init_std`;
the projections that write into the residual stream, `attention.out` and `mlp.down` (of experts, too), have
init_std / sqrt(2 * layers), so that the stream's variance at the end does not grow with depth (GPT-2); norms are 1, the
router's biases 0. With muP (Tensor Programs V, arXiv 2203.03466) matrices of the blocks get sqrt(base / width) of that,
and the final hidden states are multiplied by base / width, so that logits neither grow nor vanish with the width; heads
are meant to stay as wide while their number grows. The learning rates are the optimizer's part.
Each tensor has a generator of its own, keyed by (seed, name), so it does not depend on device, engine or order.

A block is compiled once for all layers of its kind: nothing in `Block.forward` differs between them but tensors.

What blocks would train for beside the model's own loss (the routers' losses, Z-Reg) waits in `take_auxiliary`; what
they measured adds up in `take_measured`.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.configs.schema import Z_COLUMNS, AttentionKernel, ModelConfig, Recompute
from lowbit.configs.schema_model import head_dim_of
from lowbit.configs.validate_model import check_architecture
from lowbit.errors import ConfigError, DataError
from lowbit.models.attention import prepare_mask
from lowbit.models.block import KV, Block, BlockOutput
from lowbit.models.cost import kv_owners, kv_source, mup_ratio, vocab_rows_of, window_of
from lowbit.models.layers import Embedding, KVCache, Linear, RMSNorm, state_buffers
from lowbit.models.moe import Moe
from lowbit.models.rope import Rope, rope_frequencies, rope_tables
from lowbit.models.varlen import takes
from lowbit.models.visibility import Visibility

SMALL = ("attention.out.weight", "mlp.down.weight", "mlp.experts.down.weight", "mlp.shared.down.weight")
"""The projections that write into the residual stream."""
AUTO = AttentionKernel.flex
"""What `engine.attention=auto` is."""
AS_WRITTEN: dict[str, Any] = {"emulate_precision_casts": True}
"""Compiled code rounds to BF16 where the model as written does, and gives its bits. Left to itself the compiler keeps
FP32 between the operations that it joins: more exact, but another number, which a quantiser behind it turns into
another code now and then, and after a few layers a sampler and a trainer are as far apart as their format is coarse."""


def _check(config: ModelConfig, vocab_size: int) -> None:
    """Raise ConfigError, naming the key, when no model has these settings."""
    check_architecture(config)
    if vocab_size < 1:
        raise ConfigError(f"the vocabulary has {vocab_size} tokens: train or choose a tokenizer that has some")
    if config.vocab_rows is not None and config.vocab_rows < vocab_size:
        raise ConfigError(
            f"model.vocab_rows={config.vocab_rows} is less than the tokenizer's {vocab_size} tokens: use the "
            "tokenizer that the model was trained with, or model.vocab_rows=null"
        )


@dataclass(frozen=True)
class Measured:
    """Measurements of the blocks, added up over several passes."""

    passes: int
    routing: Tensor | None
    """FP32 [routed layers, experts + 3]: sums; see `router.Routing`."""
    z: Tensor | None
    """FP32 [layers, 2]: sum of the mean logsumexp of attention logits, and the greatest."""

    def __add__(self, other: "Measured") -> "Measured":
        routing = self.routing if other.routing is None or self.routing is None else self.routing + other.routing
        z = self.z
        if z is not None and other.z is not None:
            z = torch.stack((z[:, 0] + other.z[:, 0], torch.maximum(z[:, 1], other.z[:, 1])), dim=1)
        return Measured(self.passes + other.passes, routing, z)


class Transformer(nn.Module):
    """A decoder with FP32 parameters; call `init_weights`, or load some, before use."""

    def __init__(self, config: ModelConfig, vocab_size: int, compute_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        _check(config, vocab_size)
        self.config = config
        self.vocab_size = vocab_size
        self.padded_vocab = vocab_rows_of(config, vocab_size)
        self.compute_dtype = compute_dtype
        self.attention_kernel = AttentionKernel.auto
        self.embedding = Embedding(self.padded_vocab, config.width)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.final_norm = RMSNorm(config.width, config.norm_eps)
        self.head = None if config.tied_head else Linear(config.width, self.padded_vocab)
        self._frequencies, self._rope_factor = rope_frequencies(config.rope, head_dim_of(config))
        self._frequency_tensors: dict[torch.device, Tensor] = {}
        self._auxiliary: Tensor | None = None
        self._measured: Measured | None = None
        self._output_scale = mup_ratio(config)
        self._windows = [window_of(config, layer) for layer in range(config.layers)]
        self._sources = [kv_source(config, layer) for layer in range(config.layers)]
        owners = kv_owners(config)
        self._slots = [owners.index(source) for source in self._sources]

    @property
    def head_weight(self) -> nn.Parameter:
        """The LM head's weight [padded_vocab, width]: the embedding's when tied."""
        return self.embedding.weight if self.head is None else self.head.weight

    @property
    def uses_varlen(self) -> bool:
        """Whether attention inside packed documents is the kernel's for sequences of varying length."""
        kernel = AUTO if self.attention_kernel is AttentionKernel.auto else self.attention_kernel
        usable = self._half_heads and not self.needs_flex
        return kernel is AttentionKernel.varlen and usable and self.head_weight.is_cuda

    @property
    def needs_flex(self) -> bool:
        """Whether all attention on a GPU is FlexAttention's: others know no cap, and no z of such heads."""
        z = self.config.attention_z > 0
        return self.config.attention_softcap is not None or (z and not self._half_heads)

    @property
    def _half_heads(self) -> bool:
        """Whether heads are of a type and width that flash attention takes, with what Z-Reg adds."""
        width = head_dim_of(self.config) + (Z_COLUMNS if self.config.attention_z else 0)
        return takes(self.compute_dtype, width)

    def forward(self, tokens: Tensor, visibility: Visibility | None = None, cache: KVCache | None = None) -> Tensor:
        """Hidden states after the final norm.

        Args:
            tokens: int64 [B, T]. visibility: None for plain causal. cache: generation; tokens are then the next T
                of each row, causal, and the caller moves the cache's lengths on afterwards.

        Returns:
            [B, T, width] in `compute_dtype`.

        Raises:
            ConfigError: more tokens than `model.max_sequence`, or than the cache takes.
            DataError: visibility of another shape, or together with a cache.
        """
        batch, length = tokens.shape
        device = tokens.device
        if cache is None and length > self.config.max_sequence:
            raise ConfigError(f"a sequence of {length} tokens exceeds model.max_sequence={self.config.max_sequence}")
        if cache is not None and visibility is not None:
            raise DataError("a KV cache is causal: pass visibility or cache, not both")
        masks: dict[int, Any] = {}
        for window in set(self._windows):
            if cache is not None:
                masks[window] = cache.mask(length, window or None)
            else:
                how = (self.needs_flex, self.uses_varlen)
                masks[window] = prepare_mask(visibility, batch, length, device, window or None, *how)
        if cache is not None:
            rope = cache.rope(length, self.rope)
        else:
            position = torch.arange(length, device=device)[None] if visibility is None else visibility.position
            rope = self.rope(position.to(device, non_blocking=True))
        hidden: Tensor = self.final_norm(self._through_blocks(self.embed(tokens), masks, rope, cache))
        return hidden if self._output_scale == 1 else hidden * self._output_scale

    def _through_blocks(self, x: Tensor, masks: dict[int, Any], rope: Rope, cache: KVCache | None) -> Tensor:
        self._auxiliary = None
        kept: dict[int, KV] = {}  # of the layers that others borrow from
        outputs = []
        for layer, block in enumerate(self.blocks):
            source = self._sources[layer]
            mask = masks[self._windows[layer]]
            if cache is None:
                out = block(x, mask, rope, kept[source] if source != layer else None)
            else:  # generation's shapes change with every token: it runs the block as written, never the compiled one
                out = block.forward(x, mask, rope, None, cache, self._slots[layer])
            x = out.x
            if out.kv is not None:
                kept[layer] = out.kv
            outputs.append(out)
        if cache is None and torch.is_grad_enabled():
            self._measure(outputs)
        return x

    def _measure(self, outputs: list[BlockOutput]) -> None:
        """Keep what the blocks want trained for, and add up what they measured."""
        losses = [out.loss for out in outputs if out.loss is not None]
        self._auxiliary = torch.stack(losses).sum() if losses else None
        routing = [out.routing for out in outputs if out.routing is not None]
        z = [out.z for out in outputs if out.z is not None]
        if routing or z:
            now = Measured(1, torch.stack(routing) if routing else None, torch.stack(z) if z else None)
            self._measured = now if self._measured is None else self._measured + now

    def take_auxiliary(self) -> Tensor | None:
        """What the blocks of the last forward pass add to the loss, FP32 scalar, a mean over tokens; None for none.

        An objective adds it, times the batch's valid tokens, to what is differentiated, and not to what is reported.
        """
        loss, self._auxiliary = self._auxiliary, None
        return loss

    def take_measured(self) -> "Measured | None":
        """What blocks measured in the training passes since the last call; None for nothing."""
        taken, self._measured = self._measured, None
        return taken

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens int64 [B, T] -> the residual stream's start, [B, T, width] in `compute_dtype`."""
        x: Tensor = self.embedding(tokens).to(self.compute_dtype)
        return x

    def rope(self, position: Tensor) -> Rope:
        """Rotary tables of positions [B or 1, T], shared by all layers."""
        frequencies = self._frequency_tensors.get(position.device)
        if frequencies is None:
            frequencies = torch.tensor(self._frequencies, dtype=torch.float32, device=position.device)
            self._frequency_tensors[position.device] = frequencies
        return rope_tables(position, frequencies, self._rope_factor)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Fill every parameter; see the module's docstring for the distribution. State begins with zeros."""
        for buffer in state_buffers(self).values():
            buffer.zero_()
        inside = self.config.init_std * mup_ratio(self.config) ** 0.5
        small = inside / (2 * self.config.layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            wide = inside if name.startswith("blocks.") else self.config.init_std
            std = small if name.endswith(SMALL) else wide
            key = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(key, "little", signed=True))
            parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))

    def compile_blocks(self) -> None:
        """Compile each block in place (one graph serves all of a kind); names of parameters stay as they are.

        A block whose experts are spread over ranks is cut where its tokens travel. Graphs of a model before this one,
        as in a sweep, are let go: they would count against the compiler's limit.
        """
        torch.compiler.reset()
        for block in self.blocks:
            whole = not any(isinstance(module, Moe) and module.spread is not None for module in block.modules())
            block.compile(fullgraph=whole, dynamic=False, options=AS_WRITTEN)

    def set_recompute(self, recompute: Recompute) -> None:
        """What the backward pass recomputes, from now on."""
        for block in self.blocks:
            assert isinstance(block, Block)
            block.recompute = recompute
