"""The decoder: embedding, L blocks, final norm, LM head.

    x = embedding[tokens]
    x = block(x)                                           L times (models/block.py)
    hidden = norm(x)                                       (the head is models/lm_head.py, chunked)

Initialisation: every matrix, the embedding and the head included, is normal with standard deviation `init_std`;
the projections that write into the residual stream, `attention.out` and `mlp.down` (of experts, too), have
init_std / sqrt(2 * layers), so that the stream's variance at the end does not grow with depth (GPT-2); norms are 1, the
router's biases 0.
Each tensor has a generator of its own, keyed by (seed, name), so it does not depend on device, engine or order.

A block is compiled once for all layers of its kind: nothing in `Block.forward` differs between them but tensors.

What blocks would train for beside the model's own loss (the router's losses) waits in `take_auxiliary`; what they
measured adds up in `take_statistics`.
"""

import hashlib

import torch
from torch import Tensor, nn

from lowbit.configs.schema import ModelConfig, Recompute
from lowbit.errors import ConfigError, DataError
from lowbit.models.attention import AttentionMask, cached_mask, prepare_mask
from lowbit.models.block import Block, Rope
from lowbit.models.cost import head_dim_of, vocab_rows_of
from lowbit.models.layers import Embedding, KVCache, Linear, RMSNorm, state_buffers
from lowbit.models.rope import check_rope, rope_frequencies, rope_tables
from lowbit.models.router import check_moe
from lowbit.models.visibility import Visibility

__all__ = ["Block", "Transformer", "check_model"]

SMALL = ("attention.out.weight", "mlp.down.weight", "mlp.experts.down.weight", "mlp.shared.down.weight")
"""The projections that write into the residual stream."""


def check_model(config: ModelConfig, vocab_size: int) -> None:
    """Raise ConfigError, naming the key, when no model has these settings."""
    for key in ("layers", "width", "heads", "kv_heads", "mlp_width", "max_sequence", "vocab_multiple"):
        if getattr(config, key) < 1:
            raise ConfigError(f"model.{key}={getattr(config, key)} must be at least 1")
    if vocab_size < 1:
        raise ConfigError(f"the vocabulary has {vocab_size} tokens: train or choose a tokenizer that has some")
    if config.head_dim is None and config.width % config.heads:
        raise ConfigError(
            f"model.heads={config.heads} does not divide model.width={config.width}: "
            "choose a divisor, or set model.head_dim"
        )
    if config.head_dim is not None and config.head_dim < 1:
        raise ConfigError(f"model.head_dim={config.head_dim} must be at least 1")
    if config.heads % config.kv_heads:
        raise ConfigError(f"model.kv_heads={config.kv_heads} does not divide model.heads={config.heads}")
    if config.logit_softcap is not None and not config.logit_softcap > 0:
        raise ConfigError(f"model.logit_softcap={config.logit_softcap} must be positive, or null for none")
    if not config.init_std > 0:
        raise ConfigError(f"model.init_std={config.init_std} must be positive")
    if config.vocab_rows is not None and config.vocab_rows < vocab_size:
        raise ConfigError(
            f"model.vocab_rows={config.vocab_rows} is less than the tokenizer's {vocab_size} tokens: use the "
            "tokenizer that the model was trained with, or model.vocab_rows=null"
        )
    check_rope(config.rope, head_dim_of(config))
    check_moe(config)


class Transformer(nn.Module):
    """A decoder with FP32 parameters; call `init_weights`, or load some, before use."""

    def __init__(self, config: ModelConfig, vocab_size: int, compute_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        check_model(config, vocab_size)
        self.config = config
        self.vocab_size = vocab_size
        self.padded_vocab = vocab_rows_of(config, vocab_size)
        self.compute_dtype = compute_dtype
        self.embedding = Embedding(self.padded_vocab, config.width)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.final_norm = RMSNorm(config.width, config.norm_eps)
        self.head = None if config.tied_head else Linear(config.width, self.padded_vocab)
        self._frequencies, self._rope_factor = rope_frequencies(config.rope, head_dim_of(config))
        self._frequency_tensors: dict[torch.device, Tensor] = {}
        self._auxiliary: Tensor | None = None
        self._statistics: Tensor | None = None
        self._measured = 0

    @property
    def head_weight(self) -> nn.Parameter:
        """The LM head's weight [padded_vocab, width]: the embedding's when tied."""
        return self.embedding.weight if self.head is None else self.head.weight

    def forward(self, tokens: Tensor, visibility: Visibility | None = None, cache: KVCache | None = None) -> Tensor:
        """Hidden states after the final norm.

        Args:
            tokens: int64 [B, T]. visibility: None for plain causal. cache: generation; tokens are then the next T
                of each row, causal, and the caller moves the cache's lengths on afterwards.

        Returns:
            [B, T, width] in `compute_dtype`.

        Raises:
            ConfigError: more tokens than `model.max_sequence`. DataError: visibility of another shape.
        """
        batch, length = tokens.shape
        device = tokens.device
        extent = length if cache is None else cache.extent(length)
        if extent > self.config.max_sequence:
            raise ConfigError(f"a sequence of {extent} tokens exceeds model.max_sequence={self.config.max_sequence}")
        mask: AttentionMask
        if cache is not None:
            if visibility is not None:
                raise DataError("a KV cache is causal: pass visibility or cache, not both")
            mask = cached_mask(cache.lengths, length, extent)
            position = cache.lengths[:, None] + torch.arange(length, device=device)
        else:
            mask = prepare_mask(visibility, batch, length, device)
            position = torch.arange(length, device=device)[None] if visibility is None else visibility.position
        rope = self.rope(position.to(device, non_blocking=True))
        x = self.embed(tokens)
        self._auxiliary = None
        losses, statistics = [], []
        for layer, block in enumerate(self.blocks):
            # Generation's shapes change with every token: it runs the block as written, never the compiled one.
            out = block(x, mask, rope) if cache is None else block.forward(x, mask, rope, cache, layer)
            x = out.x
            if out.loss is not None:
                losses.append(out.loss)
                statistics.append(out.statistics)
        if losses and torch.is_grad_enabled():
            self._auxiliary = torch.stack(losses).sum()
            measured = torch.stack(statistics)
            self._statistics = measured if self._statistics is None else self._statistics + measured
            self._measured += 1
        hidden: Tensor = self.final_norm(x)
        return hidden

    def take_auxiliary(self) -> Tensor | None:
        """What the blocks of the last forward pass add to the loss, FP32 scalar, a mean over tokens; None for none.

        An objective adds it, times the batch's valid tokens, to what is differentiated, and not to what is reported.
        """
        loss, self._auxiliary = self._auxiliary, None
        return loss

    def take_statistics(self) -> tuple[Tensor, int] | None:
        """What the routers measured in training passes since the last call: FP32 [routed layers, experts + 3], the sum
        over the passes, and how many there were; None for none. See `router.Routing`."""
        taken, count = self._statistics, self._measured
        self._statistics, self._measured = None, 0
        return None if taken is None else (taken, count)

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
        small = self.config.init_std / (2 * self.config.layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            std = small if name.endswith(SMALL) else self.config.init_std
            key = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(key, "little", signed=True))
            parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))

    def compile_blocks(self) -> None:
        """Compile each block in place (one graph serves all of them); names of parameters stay as they are."""
        for block in self.blocks:
            block.compile(fullgraph=True, dynamic=False)

    def set_recompute(self, recompute: Recompute) -> None:
        """What the backward pass recomputes, from now on."""
        for block in self.blocks:
            assert isinstance(block, Block)
            block.recompute = recompute
