"""What may and may not change between a checkpoint and the run that resumes from it."""

from dataclasses import asdict, replace

import pytest

from lowbit.configs.schema import ModelConfig
from lowbit.errors import CheckpointError
from lowbit.trainer.identity import check_same

MODEL = ModelConfig()


def _identity(**changes: object) -> dict[str, object]:
    data = {"sequence_length": 256, "sources": {"web": {"hash": "aa", "weight": 1.0}}}
    return {"tokenizer": "d1", "data": data, "model": asdict(MODEL)} | changes


def test_the_same() -> None:
    check_same(_identity(), _identity())
    check_same(_identity(), _identity(model=asdict(replace(MODEL, name="renamed"))))


def test_no_override_is_offered_that_cannot_work() -> None:
    other = _identity(model=asdict(replace(MODEL, layers=6)))
    with pytest.raises(CheckpointError, match=r"layers: 4 in .*another run_name$") as caught:
        check_same(_identity(), other, loads=False)
    assert "resume_allow" not in str(caught.value)
    check_same(_identity(), other, ["model"], loads=False)


@pytest.mark.parametrize(
    ("kind", "value", "shown"),
    [
        ("tokenizer", "d2", 'tokenizer: "d1" in the checkpoint, "d2" now'),
        ("data", {"sequence_length": 256, "sources": {"web": {"hash": "bb", "weight": 1.0}}}, "data.sources.web.hash"),
        ("data", {"sequence_length": 256, "sources": {}}, "data.sources.web.hash"),
        ("model", asdict(replace(MODEL, layers=6)), "model.layers: 4 in the checkpoint, 6 now"),
        ("model", asdict(replace(MODEL, rope=replace(MODEL.rope, theta=5e5))), "model.rope.theta: 10000.0"),
        ("model", {key: value for key, value in asdict(MODEL).items() if key != "heads"}, "model.heads: 4.*absent now"),
    ],
)
def test_each_difference_is_shown_and_can_be_allowed(kind: str, value: object, shown: str) -> None:
    with pytest.raises(CheckpointError, match=shown) as caught:
        check_same(_identity(), _identity(**{kind: value}))
    assert f"resume_allow=[{kind}]" in str(caught.value)
    assert "\n" not in str(caught.value)
    check_same(_identity(), _identity(**{kind: value}), [kind])
    other = {"tokenizer": "data", "data": "model", "model": "tokenizer"}[kind]
    with pytest.raises(CheckpointError):
        check_same(_identity(), _identity(**{kind: value}), [other])


def test_two_kinds_at_once_name_one_override() -> None:
    changed = _identity(tokenizer="d2", model=asdict(replace(MODEL, heads=2)))
    with pytest.raises(CheckpointError, match=r"resume_allow=\[tokenizer,model\]"):
        check_same(_identity(), changed)
    with pytest.raises(CheckpointError, match=r"resume_allow=\[tokenizer,model\]"):
        check_same(_identity(), changed, ["tokenizer"])


def test_long_lists_are_cut() -> None:
    changed = _identity(model=dict.fromkeys(asdict(MODEL), "x" * 100))
    with pytest.raises(CheckpointError, match=r"and \d+ more"):
        check_same(_identity(), changed)


def test_a_field_that_a_later_version_added_counts_as_its_default() -> None:
    old = {key: value for key, value in asdict(MODEL).items() if key != "moe"}
    check_same(_identity(model=old), _identity(model=asdict(MODEL)))
    with pytest.raises(CheckpointError, match=r"model\.moe\.experts: 0 in the checkpoint, 8 now"):
        check_same(_identity(model=old), _identity(model=asdict(replace(MODEL, moe=replace(MODEL.moe, experts=8)))))
