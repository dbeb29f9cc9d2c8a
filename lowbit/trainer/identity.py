"""May this checkpoint go on in this run? Tokenizer, data and model must be those it was trained with.

A changed tokenizer makes every embedding mean something else, changed data make the position in them meaningless, and
a changed model may still load (rotary base, soft-cap, norm epsilon) and be quietly wrong. Each difference is shown
with both values, and `resume_allow` accepts a kind of difference knowingly.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lowbit.configs.schema import ModelConfig, ResumeDifference
from lowbit.configs.stored import flatten
from lowbit.errors import CheckpointError

DISPLAY_ONLY = ("model.name",)
DEFAULTS = flatten(json.loads(json.dumps({"model": asdict(ModelConfig())})))
SHOWN = 6
ABSENT = object()


def check_same(
    saved: Mapping[str, Any], expected: Mapping[str, Any], allow: Collection[str] = (), loads: bool = True
) -> None:
    """Compare the identities of a checkpoint and of the run that wants to resume from it.

    Both map the kinds `tokenizer` (its digest), `data` (its description) and `model` (its configuration) to plain
    values or nested dictionaries. `loads`: the checkpoint's weights have the run's names and shapes; where they have
    not, no override helps and none is offered.

    Raises:
        CheckpointError: they differ in a kind that is not in `allow`; lists the differing fields and the override.
    """
    found = {kind: differences(kind, saved.get(kind), expected.get(kind)) for kind in ResumeDifference}
    refuse(found, allow, loads)


def refuse(found: Mapping[ResumeDifference, Sequence[str]], allow: Collection[str], loads: bool) -> None:
    """Raise CheckpointError for differences, by kind, that `allow` does not accept; see `check_same`."""
    kinds = [kind for kind, fields in found.items() if fields and kind not in allow]
    if not kinds:
        return
    lines = list(dict.fromkeys(line for kind in kinds for line in found[kind]))
    what = f"the checkpoint belongs to another run: {shorten(lines)}"
    if not loads:
        raise CheckpointError(f"{what}. Its weights have other shapes: start anew, under another run_name")
    raise CheckpointError(
        f"{what}. To go on with the difference: 'resume_allow=[{','.join([*allow, *kinds])}]'; to start anew: another "
        "run_name"
    )


def differences(kind: str, saved: Any, expected: Any) -> list[str]:
    """Where two identities of a kind differ: a line a field, with both values."""
    was, now = (flatten(_as_written(kind, side)) for side in (saved, expected))
    if kind == ResumeDifference.model:  # what a later version of lowbit added was at its default
        was = {key: value for key, value in DEFAULTS.items() if key in now} | was
    return [
        f"{field}: {_show(was, field)} in the checkpoint, {_show(now, field)} now"
        for field in sorted(was.keys() | now.keys())
        if field not in DISPLAY_ONLY and was.get(field, ABSENT) != now.get(field, ABSENT)
    ]


def _as_written(kind: str, side: Any) -> dict[str, Any]:
    """As JSON has it; of a model's settings that can be written in two ways, the shorter."""
    written: dict[str, Any] = json.loads(json.dumps({kind: side}))
    if kind == ResumeDifference.model and isinstance(side, Mapping):
        model = written[kind]
        width, heads, head = (model.get(key) for key in ("width", "heads", "head_dim"))
        if all(isinstance(size, int) for size in (width, heads, head)) and head * heads == width:
            model["head_dim"] = None
        if not any(model.get("windows") or []):  # 0 is no window
            model["windows"] = []
        if model.get("kv_from") == list(range(len(model.get("kv_from") or []))):  # each layer has its own
            model["kv_from"] = []
    return written


def shorten(lines: Sequence[str]) -> str:
    """The first few of many differences, and how many more there are."""
    more = f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return "; ".join(lines[:SHOWN]) + more


def _show(values: Mapping[str, Any], field: str) -> str:
    text = json.dumps(values[field]) if field in values else "absent"
    return text if len(text) <= 72 else text[:69] + "..."
