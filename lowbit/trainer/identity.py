"""May this checkpoint go on in this run? Tokenizer, data and model must be those it was trained with.

A changed tokenizer makes every embedding mean something else, changed data make the position in them meaningless, and
a changed model may still load (rotary base, soft-cap, norm epsilon) and be quietly wrong. Each difference is shown
with both values, and `resume_allow` accepts a kind of difference knowingly.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from lowbit.configs.schema import ModelConfig, ResumeDifference
from lowbit.configs.stored import flatten
from lowbit.errors import CheckpointError

DISPLAY_ONLY = ("model.name",)
DEFAULTS = flatten(json.loads(json.dumps({"model": asdict(ModelConfig())})))
SHOWN = 6
ABSENT = object()


def check_same(saved: Mapping[str, Any], expected: Mapping[str, Any], allow: Collection[str] = ()) -> None:
    """Compare the identities of a checkpoint and of the run that wants to resume from it.

    Both map the kinds `tokenizer` (its digest), `data` (its description) and `model` (its configuration) to plain
    values or nested dictionaries.

    Raises:
        CheckpointError: they differ in a kind that is not in `allow`; lists the differing fields and the override.
    """
    differences: list[str] = []
    kinds: list[str] = []
    for kind in ResumeDifference:
        if kind in allow:
            continue
        was, now = (flatten(json.loads(json.dumps({kind: side.get(kind)}))) for side in (saved, expected))
        if kind is ResumeDifference.model:  # what a later version of lowbit added was at its default
            was = {key: value for key, value in DEFAULTS.items() if key in now} | was
        fields = [
            field
            for field in sorted(was.keys() | now.keys())
            if field not in DISPLAY_ONLY and was.get(field, ABSENT) != now.get(field, ABSENT)
        ]
        if fields:
            kinds.append(kind)
            differences += [
                f"{field}: {_show(was, field)} in the checkpoint, {_show(now, field)} now" for field in fields
            ]
    if not differences:
        return
    shown = "; ".join(differences[:SHOWN])
    more = f"; and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
    raise CheckpointError(
        f"the checkpoint belongs to another run: {shown}{more}. To go on with the difference: "
        f"'resume_allow=[{','.join([*allow, *kinds])}]'; to start anew: another run_name"
    )


def _show(values: Mapping[str, Any], field: str) -> str:
    text = json.dumps(values[field]) if field in values else "absent"
    return text if len(text) <= 72 else text[:69] + "..."
