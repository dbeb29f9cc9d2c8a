"""Folders as runs leave them, made without training, for tests of reports; and a strict reader of pages."""

import json
import math
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from lowbit.configs.schema import OptimConfig, RunConfig
from lowbit.configs.schema_distill import DistillConfig
from lowbit.configs.schema_rl import RlConfig
from lowbit.configs.stored import save_config

VOID = {"meta", "line", "path"}


def write_run(folder: Path, rows: list[dict[str, Any]], kind: str = "pretrain", tail: str = "", **changed: Any) -> Path:
    folder.mkdir(parents=True)
    configs = {"pretrain": ("config", RunConfig), "rl": ("rl", RlConfig), "distill": ("distill", DistillConfig)}
    name, cls = configs[kind]
    save_config(replace(cls(), run_name=folder.name, **changed), folder / f"{name}.yaml")
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text + tail, encoding="utf-8")
    return folder


def pretraining(count: int = 60, lr: float = 1e-3) -> list[dict[str, Any]]:
    """Rows of a run with statistics, experts and bytes on the wire."""
    rows: list[dict[str, Any]] = []
    for step in range(1, count + 1):
        row = {
            "step": step, "tokens": 1000 * step, "seconds": 2.5 * step, "loss": 2 + 3 / step, "lr": lr / step,
            "grad_norm": 30 ** math.sin(step), "tokens_per_second": 400.0 + step, "mfu": None, "memory_gib": 0.5,
            "time/data": 0.1, "time/eval": 0.05, "time/checkpoint": 0.01, "comm/gradient_bytes": 4e6,
            "comm/weight_bytes": 2e6,
        }  # fmt: skip
        if step % 10 == 0:
            row |= {"val_bpb": 1 + 1 / step, "val_bpb_bf16": 0.99 + 1 / step}
            for block in range(3):
                for operand, error in (("weight", 0.007), ("input", 0.009), ("gradient", 0.01)):
                    key = f"quant/blocks.{block}.mlp.up/{operand}"
                    row |= {f"{key}/relative_mse": error + block / 1e4, f"{key}/amax": 3.0 + block}
                row[f"experts/load/blocks.{block}"] = [0.5, 1.5]
        rows.append(row)
    return rows


def rollouts(count: int = 30) -> list[dict[str, Any]]:
    """Rows of a run of `lowbit rl`."""
    return [
        {
            "step": step, "tokens": 300 * step, "seconds": 1.0 * step, "loss": 0.5, "reward": step / count,
            "mismatch/k3_kl": 1e-4 * step, "mismatch/k3_kl_se": 1e-5, "mismatch/mult_prob_error": 1.01,
            "mismatch/abs_max": 0.2, "entropy": 0.7, "share/rollout": 0.5, "share/train": 0.4,
            "tokens_per_second": 900.0, "finish/stop": 1.0, "my/own": 3.0 + step,
        }
        for step in range(1, count + 1)
    ]  # fmt: skip


def optimised(lr: float) -> OptimConfig:
    return replace(OptimConfig(), lr=lr)


class Page(HTMLParser):
    """Elements of a page; fails where they are not closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[tuple[str, str]] = []
        """Pieces of text with the element that they are in."""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID, tag
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open.pop() == tag, (tag, self._open[-3:])

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.text.append((self._open[-1] if self._open else "", data))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def words(self) -> str:
        return "\n".join(text for tag, text in self.text if tag not in ("style", "script"))
