"""The benchmark runs, and its cases are what their names say."""

from pathlib import Path

import pytest
import torch
from bench_model import (
    attention_cases,
    document_ends,
    experts_cases,
    main,
    random_documents,
    random_trees,
    varying_lengths,
)
from torch.nn import functional as F

from lowbit.models.attention import dense_mask
from lowbit.models.cost import flops_per_token, parameter_parts


@pytest.mark.parametrize("what", [pytest.param("attention", marks=pytest.mark.exhaustive), "experts"])
def test_it_runs(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = main([what, "--small", "--steps", "1", "--out", str(tmp_path / "out.json")])
    assert (tmp_path / "out.json").is_file() and len(capsys.readouterr().out.splitlines()) == len(rows)
    assert all(row["tokens_per_second"] > 0 and 0 <= row["mask"] < 1 for row in rows)
    assert main([what, "--small", "--length", "7", "--out", str(tmp_path / "none.json")]) == []


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


def test_kernels_run(tmp_path: Path) -> None:
    rows = main(["kernels", "--small", "--steps", "1", "--out", str(tmp_path / "out.json")])
    assert [row["row"] for row in rows] == ["causal", "documents of 512", "documents of 128", "documents of 16"]
    assert all(row["ms"] > 0 and row["over_causal"] > 0 for row in rows) and (tmp_path / "out.json").is_file()


def test_ends_of_documents_and_how_the_kernel_is_called() -> None:
    """Shapes on the meta device; numbers need a GPU."""
    rule = random_documents(3, 256, 40)
    ends, longest = document_ends(rule)
    assert ends[0] == 0 and ends[-1] == 3 * 256 and {256, 512} < set(ends.tolist())
    assert longest == int(rule.position.max()) + 1 and ends.dtype is torch.int32
    q, k, v = (torch.randn(3, h, 256, 64, device="meta", dtype=torch.bfloat16).requires_grad_() for h in (4, 2, 2))
    out = varying_lengths(q, k, v, ends.to("meta"), longest)
    out.float().sum().backward()  # type: ignore[no-untyped-call]
    assert out.shape == q.shape and all(x.grad is not None and x.grad.shape == x.shape for x in (q, k, v))


@pytest.mark.gpu
def test_varying_lengths_on_a_gpu() -> None:
    """Output and gradients against FP64 attention with the rule written out."""
    generator = torch.Generator("cuda").manual_seed(1)
    leaves = [
        torch.randn(3, h, 256, 64, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()
        for h in (4, 2, 2)
    ]
    rule = random_documents(3, 256, 40).to("cuda")
    out = varying_lengths(*leaves, *document_ends(rule))
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    wanted = F.scaled_dot_product_attention(*exact, attn_mask=dense_mask(rule), enable_gqa=True)
    seed = torch.randn_like(out)
    pairs = [(out, wanted)]
    pairs += zip(torch.autograd.grad(out, leaves, seed), torch.autograd.grad(wanted, exact, seed.double()), strict=True)
    for ours, theirs in pairs:
        assert float((ours.double() - theirs).norm() / theirs.norm()) < 0.01
