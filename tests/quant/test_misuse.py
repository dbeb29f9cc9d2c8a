"""The layers in the hands of others: wrong widths and types, any strides, autocast, inference mode, copies, files.

Oracles: `nn.Linear`, which refuses what cannot be multiplied and survives copies and files; the layer itself on a plain
contiguous tensor, outside of any mode.
"""

import copy
import io
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from test_linear import KEY, POLICIES
from torch import Tensor, nn

from lowbit.models.layers import GroupedLinear, Linear, frozen_weights, project
from lowbit.quant.formats import INT8
from lowbit.quant.grouped import LowbitGroupedLinear, keys_of
from lowbit.quant.kernels import ops
from lowbit.quant.linear import LowbitLinear
from lowbit.quant.philox import make_clock, make_key
from lowbit.quant.policy import LinearPolicy
from lowbit.quant.spec import FOUR_OVER_SIX, SPECS, QuantSpec, Scale
from lowbit.quant.stabilisers.outcontrol import RetainedChannels

ALL = {**POLICIES, "mean_split": replace(POLICIES["nvfp4"], mean_split=True)}
each_policy = pytest.mark.parametrize("policy", ALL.values(), ids=ALL)
TOKENS, WIDTH, OUT = 5, 72, 64
COUNTS = (0, 1, 31, 33)


def layer(policy: LinearPolicy, width: int = WIDTH) -> LowbitLinear:
    linear = Linear(width, OUT)
    nn.init.normal_(linear.weight)
    return LowbitLinear.of(linear, policy, KEY, make_clock(3))


def experts(policy: LinearPolicy) -> LowbitGroupedLinear:
    linear = GroupedLinear(len(COUNTS), WIDTH, OUT)
    nn.init.normal_(linear.weight)
    return LowbitGroupedLinear.of(linear, policy, keys_of(1, "up", len(COUNTS)), make_clock(3))


def ends(counts: tuple[int, ...] = COUNTS) -> Tensor:
    return torch.tensor(counts).cumsum(0).int()


def passes(run: Callable[[Tensor], Tensor], weight: Tensor, x: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    """(Y, dX, dW)."""
    x, weight.grad = x.detach().requires_grad_(), None
    y = run(x)
    y.backward(dy)
    assert x.grad is not None and weight.grad is not None
    return y.detach(), x.grad, weight.grad


def identical(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


@each_policy
@pytest.mark.parametrize("width", [8, 64, 71, 80, 128])
def test_another_width_is_refused_even_where_padding_would_hide_it(policy: LinearPolicy, width: int) -> None:
    """72 and 80 columns are both padded to 128 by a rotation, to 80 by an FP8 kernel."""
    low, x = layer(policy), torch.randn(TOKENS, width)
    with pytest.raises(ValueError, match=f"an input of {width} features for a layer that reads 72"):
        low(x)
    with pytest.raises(ValueError, match="features"):
        project(torch.randn(TOKENS, WIDTH), low, layer(policy, 80))
    with pytest.raises(ValueError, match="features"):
        experts(policy)(torch.randn(sum(COUNTS), width), ends())
    with torch.no_grad(), frozen_weights(nn.ModuleList([low]), torch.float32), pytest.raises(ValueError, match="feat"):
        low(x)


@each_policy
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int64, torch.bool], ids=str)
def test_other_types_are_refused_and_never_read_as_if_they_were_fp32(policy: LinearPolicy, dtype: torch.dtype) -> None:
    low, x = layer(policy), torch.randn(TOKENS, WIDTH)
    for call in (lambda: low(x.to(dtype)), lambda: experts(policy)(torch.zeros(65, WIDTH, dtype=dtype), ends())):
        with pytest.raises(TypeError, match=f"reads bfloat16 or float32, not {dtype}"):
            call()
    if dtype.is_floating_point and policy.fprop.right.spec is not None:
        with pytest.raises(TypeError, match=f"not {dtype}"):
            low.to(dtype)(x)


@pytest.mark.parametrize("name", [*SPECS, ""])
def test_the_operators_read_nothing_they_do_not_know(name: str) -> None:
    """They hand addresses to C++: a type of another size, or no elements, must not get so far."""

    def factor(x: Tensor, dtype: torch.dtype) -> None:
        text = ops.spec_text(SPECS[name] if name else None)
        ops.factor_op(x, None, make_key(0, "a"), make_clock(), None, None, text, 0x100, dtype, True, False, False)

    factor(torch.zeros(64, 128), torch.float32)
    for bad in (torch.float16, torch.float64, torch.int16):
        with pytest.raises(TypeError, match="bfloat16 or float32"):
            factor(torch.zeros(64, 128, dtype=bad), torch.float32)
        with pytest.raises(TypeError, match="bfloat16 or float32"):
            factor(torch.zeros(64, 128), bad)
    for shape in ((0, 64), (64, 0), (0, 0)):
        with pytest.raises(ValueError, match="no elements"):
            factor(torch.zeros(shape), torch.float32)


@pytest.mark.parametrize(
    "bad", [(0, 1, 32, 60), (0, 1, 32, 70), (5, 1, 32, 65), (-1, 1, 32, 65), (0, 1, 65), (65,) * 5]
)
@pytest.mark.parametrize("name", ["nvfp4", "fp8_tensor", "weights_only"])
def test_offsets_that_do_not_share_the_rows_out_are_refused(name: str, bad: tuple[int, ...]) -> None:
    """Rows that are nobody's would be uninitialised memory."""
    low, x = experts(POLICIES[name]), torch.randn(65, WIDTH)
    with pytest.raises(ValueError, match="do not share 65 rows out among 4 experts"):
        low(x.requires_grad_(), torch.tensor(bad, dtype=torch.int32))
    frozen = frozen_weights(nn.ModuleList([low]), torch.float32)
    with torch.no_grad(), frozen, pytest.raises(ValueError, match="do not share 65 rows"):
        low(x, torch.tensor(bad, dtype=torch.int32))


def layouts(x: Tensor) -> list[Tensor]:
    """x [rows, columns] as views of other memory."""
    rows, columns = x.shape
    wide = torch.zeros(rows + 2, columns + 27, dtype=x.dtype)
    wide[1:-1, 13 : 13 + columns] = x
    every_other = torch.zeros(rows, 2 * columns, dtype=x.dtype)
    every_other[:, ::2] = x
    return [x.t().contiguous().t(), wide[1:-1, 13 : 13 + columns], every_other[:, ::2]]


@each_policy
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strides_of_inputs_gradients_and_weights_change_no_bit(policy: LinearPolicy, dtype: torch.dtype) -> None:
    low, x, dy = layer(policy), torch.randn(TOKENS, WIDTH).to(dtype), torch.randn(TOKENS, OUT).to(dtype)
    want = passes(low, low.weight, x, dy)
    for view in layouts(x):
        assert identical(passes(low, low.weight, view, dy), want)
    for view in layouts(dy):
        assert identical(passes(low, low.weight, x, view), want)
    for rows in (x[:1].expand(TOKENS, WIDTH), x[0].expand(TOKENS, WIDTH)):
        assert identical(passes(low, low.weight, rows, dy), passes(low, low.weight, rows.contiguous(), dy))
    same = dy[0].expand(TOKENS, OUT)  # what sum() sends back
    assert identical(passes(low, low.weight, x, same), passes(low, low.weight, x, same.contiguous()))
    if policy.mean_split:  # the mean times W^T is an ordinary product: W's strides may choose its order of sums
        return
    for view in layouts(low.weight.data):
        low.weight.data = view
        assert identical(passes(low, low.weight, x, dy), want)


@each_policy
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_changes_no_bit(policy: LinearPolicy, dtype: torch.dtype) -> None:
    """It would multiply FP32 factors in BF16, and round weight gradients on their way out."""
    low, group = layer(policy), experts(policy)
    x, dy = torch.randn(sum(COUNTS), WIDTH).to(dtype), torch.randn(sum(COUNTS), OUT).to(dtype)
    calls = [(low, low.weight), (lambda x: group(x, ends()), group.weight)]
    want = [passes(run, weight, x, dy) for run, weight in calls]
    with torch.autocast("cpu", torch.bfloat16):
        assert all(identical(passes(*call, x, dy), w) for call, w in zip(calls, want, strict=True))
        with torch.no_grad(), frozen_weights(nn.ModuleList([low, group]), dtype):
            assert torch.equal(low(x), want[0][0]) and torch.equal(group(x, ends()), want[1][0])
        assert low(x[:0]).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_changes_no_bit_of_retained_channels(dtype: torch.dtype) -> None:
    low, x, dy = layer(ALL["nvfp4"]), torch.randn(TOKENS, WIDTH).to(dtype), torch.randn(TOKENS, OUT).to(dtype)
    low.retained = RetainedChannels(torch.randperm(WIDTH), 7)
    want = passes(low, low.weight, x, dy)
    with torch.autocast("cpu", torch.bfloat16):
        assert identical(passes(low, low.weight, x, dy), want)
        assert low(x[:0]).dtype == dtype


@each_policy
def test_inference_mode_changes_no_bit(policy: LinearPolicy) -> None:
    low, x = layer(policy), torch.randn(TOKENS, WIDTH)
    want = low(x)
    with torch.inference_mode():
        assert torch.equal(low(x), want)


@each_policy
def test_a_second_derivative_is_an_error(policy: LinearPolicy) -> None:
    for low in (layer(policy), lambda x: experts(policy)(x, ends())):
        x = torch.randn(sum(COUNTS), WIDTH, requires_grad=True)
        (dx,) = torch.autograd.grad(low(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            dx.sum().backward()


def through_a_file(module: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    made: nn.Module = torch.load(buffer, weights_only=False)
    return made


@each_policy
@pytest.mark.parametrize("copied", [copy.deepcopy, through_a_file], ids=["deepcopy", "torch.save"])
def test_copies_compute_the_same_and_share_one_clock(policy: LinearPolicy, copied: Callable[..., nn.Module]) -> None:
    clock, x, dy = make_clock(3), torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, OUT)
    model = nn.ModuleDict({n: LowbitLinear.of(layer(policy), policy, make_key(1, n), clock) for n in ("q", "k")})
    other = copied(model)
    assert other["q"].clock is other["k"].clock and other["q"].clock is not clock
    assert other["q"].weight is not model["q"].weight
    for clock_now in (make_clock(3), make_clock(4)):
        for m in (model, other):
            m["q"].clock.copy_(clock_now)
        for n in ("q", "k"):
            assert identical(passes(model[n], model[n].weight, x, dy), passes(other[n], other[n].weight, x, dy))


@each_policy
def test_state_goes_to_and_from_a_plain_linear(policy: LinearPolicy) -> None:
    low, plain, x = layer(policy), Linear(WIDTH, OUT), torch.randn(TOKENS, WIDTH)
    plain.load_state_dict(low.state_dict())
    other = layer(policy)
    other.load_state_dict(plain.state_dict(), assign=True)
    assert torch.equal(other(x), low(x))


@each_policy
def test_a_bf16_master_weight_is_the_rounded_one(policy: LinearPolicy) -> None:
    low, x, dy = layer(policy), torch.randn(TOKENS, WIDTH).bfloat16(), torch.randn(TOKENS, OUT).bfloat16()
    y, dx, dw = passes(low, low.weight, x, dy)
    half = copy.deepcopy(low).to(torch.bfloat16)
    assert half.key.dtype is half.clock.dtype is torch.int64
    assert identical(passes(half, half.weight, x, dy), (y, dx, dw.bfloat16()))


@each_policy
def test_a_static_range_is_for_int8_alone(policy: LinearPolicy) -> None:
    """A switch may put a layer whose range is fixed into any other format, frozen or not."""
    low, x = layer(policy), torch.randn(TOKENS, WIDTH)
    layers = nn.ModuleList([low])
    with torch.no_grad(), frozen_weights(layers, torch.float32):
        frozen = low(x)
    want = low(x)
    low.fix_input_amax(torch.tensor(30.0))
    applies = policy.fprop.left.spec is not None and policy.fprop.left.spec.element is INT8
    assert torch.equal(low(x), want) != applies
    with torch.no_grad(), frozen_weights(layers, torch.float32):
        assert torch.equal(low(x), frozen) != applies


@pytest.mark.parametrize("spec", [s for s in SPECS.values() if s.scale is not Scale.FP32], ids=lambda s: s.name)
def test_a_static_range_of_a_format_without_one_is_an_error(spec: QuantSpec) -> None:
    rest = ops.spec_text(spec), 0, torch.bfloat16, True, True, False
    with pytest.raises(ValueError, match=f"{spec.name} has no static scale"):
        ops.factor_op(torch.randn(8, 256), None, KEY, make_clock(3), None, torch.tensor(1.0), *rest)


@pytest.mark.parametrize("spec", [s for s in SPECS.values() if s.rounding in FOUR_OVER_SIX], ids=lambda s: s.name)
@pytest.mark.parametrize("shape", [(40, 13), (41, 32), (40,), (0, 0)], ids=str)
def test_choices_of_other_blocks_are_refused_and_never_read(spec: QuantSpec, shape: tuple[int, ...]) -> None:
    rest = ops.spec_text(spec), 0, torch.bfloat16, True, True, False
    choice = torch.zeros(shape, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"a choice .* of 4 or 6 for \[\d+, 16\] blocks"):
        ops.factor_op(torch.randn(40, 256), None, KEY, make_clock(3), choice, None, *rest)


def test_a_static_range_survives_a_change_of_type() -> None:
    """`.to(bfloat16)` makes BF16 of every FP32 buffer: of that of the range, too."""
    low, x = layer(POLICIES["int8"]), torch.randn(TOKENS, WIDTH).bfloat16()
    low.fix_input_amax(torch.tensor(2.5))
    want = low(x)
    half = low.to(torch.bfloat16)
    assert half.input_amax is not None and half.input_amax.dtype is torch.bfloat16
    assert torch.equal(half(x), want)


@each_policy
def test_on_the_meta_device_shapes_come_out(policy: LinearPolicy) -> None:
    low = layer(policy).to("meta")
    assert low(torch.zeros(2, TOKENS, WIDTH, device="meta")).shape == (2, TOKENS, OUT)
