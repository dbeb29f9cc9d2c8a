"""muP's coordinate check: sizes of activations after a few steps, against the width. Flat lines are the aim.

    python scripts/mup_check.py [--widths 64 128 256 512] [--steps 5] [--lr 0.01] [--out mup_check.png]

For each width, with and without muP, a fresh model takes AdamW steps on the same random tokens, always of the same
sequences. The table has the root mean square of the logits and of what each block adds to the residual stream. In the
standard parametrisation the changes that Adam makes add up over the width, so these grow with it and the best
learning rate shrinks; with muP they stay.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch

from lowbit.configs.schema import ModelConfig, OptimConfig
from lowbit.models.lm_head import lm_head_logits, lm_head_loss
from lowbit.models.transformer import Transformer
from lowbit.trainer.optim import build_optimizer

BASE = 64
VOCAB = 256


def sizes(width: int, mup: bool, steps: int, lr: float, seed: int = 1, layers: int = 4) -> dict[str, float]:
    """Root mean squares after `steps` steps: of the logits, and of each block's addition to the stream."""
    config = ModelConfig(
        layers=layers,
        width=width,
        heads=width // 32,
        kv_heads=width // 32,
        mlp_width=4 * width,
        max_sequence=64,
        mup_base_width=BASE if mup else None,
    )
    model = Transformer(config, VOCAB)
    model.init_weights(seed)
    optimizer = build_optimizer(model, replace(OptimConfig(), lr=lr, weight_decay=0.0))
    tokens = torch.randint(0, VOCAB, (8, 65), generator=torch.Generator().manual_seed(seed))
    inputs, targets = tokens[:, :-1], tokens[:, 1:].flatten()
    for _ in range(steps):
        hidden = model(inputs).flatten(0, 1)
        weights = torch.ones(len(targets))
        loss = lm_head_loss(hidden, model.head_weight, targets, weights, vocab_size=VOCAB).loss_sum / len(targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    found: dict[str, float] = {}
    hooks = [
        block.register_forward_hook(
            lambda _, inputs, out, name=f"block {i}": found.update({name: _rms(out.x - inputs[0])})
        )
        for i, block in enumerate(model.blocks)
    ]
    with torch.no_grad():
        hidden = model(inputs)
        found["logits"] = _rms(lm_head_logits(hidden, model.head_weight, vocab_size=VOCAB))
    for hook in hooks:
        hook.remove()
    return found


def _rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def draw(results: dict[str, dict[int, dict[str, float]]], out: Path) -> None:
    """Two panels, without and with muP: size against width, a line for each place."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 4), sharey=True)
    for panel, (title, by_width) in zip(axes, results.items(), strict=True):
        widths = sorted(by_width)
        for place in by_width[widths[0]]:
            panel.plot(widths, [by_width[w][place] for w in widths], marker="o", label=place)
        panel.set(title=title, xlabel="width", xscale="log", yscale="log")
        panel.set_xticks(widths, [str(w) for w in widths])
        panel.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    axes[0].set_ylabel("root mean square after training")
    axes[1].legend()
    figure.tight_layout()
    figure.savefig(out, dpi=120)


def main() -> None:
    """Measure, print, draw."""
    parser = argparse.ArgumentParser(description="Sizes of activations against the width, with and without muP.")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--out", type=Path, default=Path("mup_check.png"))
    arguments = parser.parse_args()
    results: dict[str, dict[int, dict[str, float]]] = {"standard": {}, "muP": {}}
    for title, by_width in results.items():
        for width in arguments.widths:
            by_width[width] = sizes(width, title == "muP", arguments.steps, arguments.lr)
            shown = "  ".join(f"{place} {value:8.3f}" for place, value in by_width[width].items())
            print(f"{title:<9} width {width:>5}  {shown}")
    arguments.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    draw(results, arguments.out)
    print(f"picture: {arguments.out}")


if __name__ == "__main__":
    main()
