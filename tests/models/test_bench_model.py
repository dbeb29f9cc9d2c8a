"""The benchmark runs, and its cases are what their names say."""

from pathlib import Path

import pytest
import torch
from bench_model import attention_cases, experts_cases, main, random_documents, random_trees

from lowbit.models.cost import flops_per_token, parameter_parts


@pytest.mark.parametrize("what", [pytest.param("attention", marks=pytest.mark.exhaustive), "experts"])
def test_it_runs(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = main([what, "--small", "--steps", "1", "--out", str(tmp_path / "out.json")])
    assert (tmp_path / "out.json").is_file() and len(capsys.readouterr().out.splitlines()) == len(rows)
    assert all(row["tokens_per_second"] > 0 and 0 <= row["mask"] < 1 for row in rows)


def test_cases() -> None:
    rule = random_documents(4, 4096, 128)
    rule.validate()
    assert 4096 * 4 / int((rule.position == 0).sum()) == pytest.approx(128, rel=0.2)
    random_trees(2, 4096).validate(tree=True)
    whole = next(case for case in attention_cases(False) if case.name == "whole document")
    assert whole.rule is not None and torch.equal(whole.rule.limit[0], torch.full((32_768,), 32_768, dtype=torch.int32))
    cases = experts_cases(False)
    for moe, dense in zip(cases[::2], cases[1::2], strict=True):
        active, whole_size = parameter_parts(moe.config, 32_768), parameter_parts(dense.config, 32_768)
        assert active.active == pytest.approx(whole_size.total, rel=0.05)
        work = flops_per_token(moe.config, 32_768, 2048) / flops_per_token(dense.config, 32_768, 2048)
        assert work == pytest.approx(1, abs=0.05)
