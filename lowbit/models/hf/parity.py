"""Does a folder compute what our model computes? Logits and, block by block, hidden states against `transformers`.

A wrong logit says that something is wrong; the first block whose output differs says where.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lowbit.errors import CheckpointError, ConfigError
from lowbit.models.lm_head import lm_head_logits
from lowbit.models.transformer import Transformer


@dataclass(frozen=True)
class Parity:
    """Largest absolute differences between two models on the same tokens."""

    blocks: list[tuple[str, float]]
    """The residual stream after the embedding and each block, by name."""
    logits: float
    scale: float
    """Largest logit."""

    def first_drift(self, tolerance: float) -> str | None:
        """The first place that differs by more than `tolerance`; None when none does."""
        places = [*self.blocks, ("logits", self.logits)]
        return next((name for name, difference in places if not difference <= tolerance), None)

    def require(self, tolerance: float) -> None:
        """Raise CheckpointError naming the first place that differs by more."""
        place = self.first_drift(tolerance)
        if place is not None:
            differences = dict([*self.blocks, ("logits", self.logits)])
            raise CheckpointError(
                f"{place} differs by {differences[place]:.3g} from what transformers computes, more than "
                f"{tolerance:g}; logits differ by {self.logits:.3g} of at most {self.scale:.3g}"
            )


@torch.no_grad()
def compare(model: Transformer, folder: Path, tokens: Tensor) -> Parity:
    """Run `tokens` int64 [B, T] through our model and through the folder's, both in FP32 on the CPU.

    Raises:
        ConfigError: `transformers` is not installed.
    """
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError("comparing with transformers needs it: pip install transformers") from error
    loaded = AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=torch.float32, attn_implementation="eager", trust_remote_code=False, local_files_only=True
    )
    loaded.train(False)
    theirs = loaded(tokens, output_hidden_states=True)
    ours = hidden_states(model, tokens)
    blocks = []
    names = [
        "embedding",
        *(f"blocks.{i}" for i in range(len(model.blocks) - 1)),
        f"blocks.{len(model.blocks) - 1} and norm",
    ]
    for name, here, there in zip(names, ours, theirs.hidden_states, strict=True):
        blocks.append((name, float((here - there).abs().max())))
    logits = lm_head_logits(
        ours[-1], model.head_weight, vocab_size=model.vocab_size, softcap=model.config.logit_softcap
    )
    expected = theirs.logits[..., : model.vocab_size]
    return Parity(blocks, float((logits - expected).abs().max()), float(expected.abs().max()))


def hidden_states(model: Transformer, tokens: Tensor) -> list[Tensor]:
    """The embedding and each block's output but the last, then the final norm's, as transformers counts them."""
    states: list[Tensor] = []

    def keep(module: object, inputs: object, output: object) -> None:
        states.append(output[0] if isinstance(output, tuple) else output)  # type: ignore[arg-type]

    handles = [block.register_forward_hook(keep) for block in model.blocks]
    try:
        final = model(tokens)
    finally:
        for handle in handles:
            handle.remove()
    return [model.embed(tokens), *states[:-1], final]
