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
    assert all(row["ratio"] == 1 or row["over"] != row["row"] for row in rows)
    assert main([what, "--small", "--length", "7", "--out", str(tmp_path / "none.json")]) == []


def test_cases() -> None:
    rule = random_documents(4, 4096, 128)
    rule.validate()
    assert 4096 * 4 / int((rule.position == 0).sum()) == pytest.approx(128, rel=0.2)
    random_trees(2, 4096).validate(tree=True)
    whole = next(case for case in attention_cases(False) if case.name == "whole document")
    assert whole.rule is not None and torch.equal(whole.rule.limit[0], torch.full((32_768,), 32_768, dtype=torch.int32))
    by_length = [case for case in attention_cases(False) if case.name.endswith("varlen")]
    assert len(by_length) == 8 and all(case.rule is not None and case.rule.sizes is not None for case in by_length)
    cases = experts_cases(False)
    fine = cases[1].config
    assert (fine.moe.experts, fine.moe.top_k, fine.width) == (64, 8, 2048)
    for dense, moe in zip(cases[::2], cases[1::2], strict=True):
        assert moe.over == dense.name
        active, whole_size = parameter_parts(moe.config, 32_768), parameter_parts(dense.config, 32_768)
        assert active.active == pytest.approx(whole_size.total, rel=0.05)
        work = flops_per_token(moe.config, 32_768, 2048) / flops_per_token(dense.config, 32_768, 2048)
        assert work == pytest.approx(1, abs=0.05)


def test_kernels_run(tmp_path: Path) -> None:
    rows = main(["kernels", "--small", "--steps", "1", "--out", str(tmp_path / "out.json")])
    assert [row["row"] for row in rows] == ["causal", "documents of 512", "documents of 128", "documents of 16"]
    assert all(row["ms"] > 0 and row["over_causal"] > 0 for row in rows) and (tmp_path / "out.json").is_file()
