"""Fused kernels against the plain PyTorch code that defines them, in FP64."""

import pytest
import torch

from lowbit.models.layers import RMSNorm
from lowbit.models.rope import apply_rope, rope_tables

pytestmark = pytest.mark.gpu

EPS = 1e-6


@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "dim", "tables"),
    [(2, 33, 3, 64, 1), (2, 33, 3, 64, 2), (1, 1, 2, 16, 1), (3, 257, 10, 128, 3), (1, 5, 2, 256, 1)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_head_norm_rope(
    batch: int, tokens: int, heads: int, dim: int, tables: int, dtype: torch.dtype, layout: str
) -> None:
    from lowbit.models.kernels import handles, head_norm_rope

    generator = torch.Generator().manual_seed(1)
    wide = torch.randn(batch, tokens, heads, 2 * dim, generator=generator)
    x = (wide[..., :dim] if layout == "strided" else wide[..., :dim].contiguous()).to("cuda", dtype)
    if layout == "strided":
        x = torch.cat((x, x), -1)[..., :dim]
        assert not x.is_contiguous()
    position = torch.randint(0, 1000, (tables, tokens), generator=generator)
    frequencies = 1e4 ** (-torch.arange(0, dim, 2) / dim)
    cos, sin = (t.cuda() for t in rope_tables(position, frequencies, 1.0))
    norm = RMSNorm(dim, EPS).cuda()
    norm.weight.data = torch.rand(dim, generator=generator).cuda() + 0.5
    dy = torch.randn(batch, heads, tokens, dim, generator=generator).to("cuda", dtype).transpose(1, 2)

    exact_x = x.double().requires_grad_()
    exact_w = norm.weight.double().detach().requires_grad_()
    n = exact_x / (exact_x.square().mean(-1, keepdim=True) + EPS).sqrt() * exact_w
    exact = n * cos.double() + n.roll(dim // 2, -1) * sin.double()
    exact.backward(dy.double())

    leaf = x.detach().requires_grad_()
    assert handles(leaf)
    y = head_norm_rope(leaf, norm.weight, cos, sin, EPS)
    y.backward(dy)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 1e-2, "atol": 2e-2}
    torch.testing.assert_close(y.double(), exact, **tolerance)
    assert leaf.grad is not None and norm.weight.grad is not None and exact_x.grad is not None
    torch.testing.assert_close(leaf.grad.double(), exact_x.grad, **tolerance)
    torch.testing.assert_close(norm.weight.grad.double(), exact_w.grad, rtol=1e-4, atol=1e-3)
    # And its twin, which runs everywhere else.
    torch.testing.assert_close(y, apply_rope(norm(x), cos, sin), rtol=2e-2, atol=2e-2)


def test_head_norm_rope_is_one_graph_under_the_compiler() -> None:
    from lowbit.models.kernels import head_norm_rope

    x = torch.randn(2, 64, 4, 64, device="cuda", dtype=torch.bfloat16)
    weight = torch.rand(64, device="cuda", requires_grad=True)
    cos, sin = rope_tables(torch.arange(64, device="cuda")[None], torch.rand(32, device="cuda"), 1.0)

    def both(function: object) -> list[torch.Tensor]:
        leaf = x.clone().requires_grad_()
        weight.grad = None
        y = function(leaf, weight)  # type: ignore[operator]
        y.square().sum().backward()
        assert leaf.grad is not None and weight.grad is not None
        return [y, leaf.grad, weight.grad]

    def function(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return head_norm_rope(a * 2, w, cos, sin, EPS) + 1

    for eager, compiled in zip(both(function), both(torch.compile(function, fullgraph=True)), strict=True):
        torch.testing.assert_close(eager, compiled, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("rows", "width"), [(1, 16), (3, 1280), (2500, 257), (70, 4096)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    from lowbit.models.kernels import add_norm

    generator = torch.Generator().manual_seed(2)
    x, delta, ds, dy = (torch.randn(rows, width, generator=generator).to("cuda", dtype) for _ in range(4))
    norm = RMSNorm(width, EPS).cuda()
    norm.weight.data = torch.rand(width, generator=generator).cuda() + 0.5
    leaves = [t.clone().requires_grad_() for t in (x, delta)]
    s, y = add_norm(*leaves, norm.weight, EPS)
    torch.autograd.backward([s, y], [ds, dy])

    assert torch.equal(s, x + delta)
    exact_s = s.detach().double().requires_grad_()
    exact_w = norm.weight.double().detach().requires_grad_()
    exact_y = exact_s / (exact_s.square().mean(-1, keepdim=True) + EPS).sqrt() * exact_w
    torch.autograd.backward([exact_s * 1, exact_y], [ds.double(), dy.double()])
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 1e-2, "atol": 2e-2}
    torch.testing.assert_close(y.double(), exact_y, **tolerance)
    assert exact_s.grad is not None and norm.weight.grad is not None
    for leaf in leaves:
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad.double(), exact_s.grad, **tolerance)
    torch.testing.assert_close(norm.weight.grad.double(), exact_w.grad, rtol=1e-3, atol=1e-3 * rows**0.5)
