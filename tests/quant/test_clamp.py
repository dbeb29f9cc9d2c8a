"""Dynamic clamping against the formulas in FP64, and the collapse that it is there to prevent."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lowbit.configs.schema import ClampConfig
from lowbit.errors import ConfigError
from lowbit.models.layers import Linear
from lowbit.quant import spec as S
from lowbit.quant.linear import LowbitLinear
from lowbit.quant.philox import make_clock, make_key
from lowbit.quant.policy import HIGH, LinearPolicy, Operand, ProductPolicy
from lowbit.quant.presets import PRESETS
from lowbit.quant.quantise import quantise
from lowbit.quant.stabilisers.clamp import Clamp, ClampedSquare, Site, activation_deviation, install

INT8 = LinearPolicy(ProductPolicy(Operand(S.INT8_ROW), Operand(S.INT8_ROW)))


def formula(up: np.ndarray, c: float) -> tuple[np.ndarray, np.ndarray]:
    """(a, da/dup), one element after the other."""
    a, slope = np.zeros(up.size), np.zeros(up.size)
    for i, u in enumerate(up.ravel().astype(np.float64)):
        h = min(max(u, 0.0), c)
        h = round(h * 127 / c) * c / 127
        a[i] = min(127, round(h * h * 127 / c**2)) * c**2 / 127
        slope[i] = 2 * h if u <= c else 0.0
    return a.reshape(up.shape), slope.reshape(up.shape)


def layer_of(policy: LinearPolicy, width: int, out: int, name: str) -> LowbitLinear:
    layer = LowbitLinear(width, out, policy, make_key(1, name), make_clock())
    with torch.no_grad():
        layer.weight.normal_(0, 0.1)
    return layer


def square(bound: float) -> ClampedSquare:
    module = ClampedSquare(layer_of(INT8, 8, 8, "down"))
    module.bound.fill_(bound)
    return module


@pytest.mark.parametrize("bound", [1.0, 0.3125, 5.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_the_formulas(bound: float, dtype: torch.dtype) -> None:
    up = (bound * torch.cat([torch.randn(4000) * 0.4, torch.tensor([0.0, -0.0, 1.0, 2.0, -1.0])])).to(dtype)
    c = float(torch.tensor(bound))
    x = up.clone().requires_grad_()
    y = square(bound)(x)
    seed = torch.randn(up.shape).to(dtype)
    y.backward(seed)
    a, slope = formula(up.float().numpy(), c)
    ulp = 2**-8 if dtype == torch.bfloat16 else 1e-6
    assert y.dtype == dtype and x.grad is not None and x.grad.dtype == dtype
    np.testing.assert_allclose(y.detach().float().numpy(), a, rtol=ulp, atol=1e-7)
    np.testing.assert_allclose(x.grad.float().numpy(), seed.float().numpy() * slope, rtol=ulp, atol=1e-7)
    assert 0 < float((up.float() > c).float().mean()) < 0.1


def test_every_level_of_the_square() -> None:
    """128 codes in, integers out; nothing between two of them equally far."""
    c = 127.0
    codes = torch.arange(128.0)
    got = square(c)(codes) / c
    want = [min(127, round(n * n / 127)) for n in range(128)]
    assert got.tolist() == want
    assert all(2 * n * n % 254 != 127 for n in range(128))


def test_one_byte_is_kept() -> None:
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        square(1.0)(torch.randn(64, 64).bfloat16().requires_grad_())
    assert sorted(t.numel() * t.element_size() for t in kept) == [4, 4096]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    y = square(1.0)(torch.tensor([0.5, bad]))
    assert y[0] > 0 and y[1].isnan()


def test_a_layer_whose_weights_are_all_zero_gives_zeros() -> None:
    """Its bound is 0, and so is all that reaches it."""
    site = network()
    with torch.no_grad():
        site.up.weight.zero_()
    Clamp(ClampConfig(enabled=True), [site]).update()
    x = torch.randn(40, 64).requires_grad_()
    y = site.down(site.square(site.up(x)))
    y.sum().backward()
    assert float(site.square.bound) == 0.0 and not y.any() and not x.grad.any()
    assert not site.up.weight.grad.any() and not site.down.weight.grad.any()


# The bound ---------------------------------------------------------------------------------------------------------


def test_deviation_is_that_of_the_activations() -> None:
    weight, gain = torch.randn(96, 160) * torch.linspace(0.1, 3, 160), torch.rand(160) + 0.5
    exact = np.sqrt(((weight.double().numpy() * gain.double().numpy()) ** 2).sum() / 96)
    assert float(activation_deviation(weight, gain)) == pytest.approx(exact, rel=1e-6)
    x = torch.randn(20_000, 160)
    assert float((x * gain @ weight.T).std()) == pytest.approx(exact, rel=0.03)
    ones = torch.ones(160)
    rms = float(weight.double().square().mean().sqrt())
    assert float(activation_deviation(weight, ones)) == pytest.approx(rms * 160**0.5, rel=1e-6)


def relative_mse(got: Tensor, want: Tensor) -> float:
    return float(((got.double() - want.double()) ** 2).sum() / (want.double() ** 2).sum())


def test_four_deviations_are_best_on_gaussian_activations() -> None:
    """The measured table: .0062 at 3, .0013 at 3.5, .00056 at 4, .00066 at 4.5, .0020 at 6, and a fifth more."""
    h = torch.randn(2_000_000).clamp(min=0)
    errors = {k: relative_mse(square(k)(h), h.square()) for k in (3.0, 3.5, 4.0, 4.5, 5.0, 6.0)}
    assert min(errors, key=lambda k: errors[k]) == 4.0
    for k, alone in ((3.0, 0.0062), (3.5, 0.0013), (4.0, 0.00056), (6.0, 0.0020)):
        assert alone * 0.95 < errors[k] < alone * 1.35, (k, errors[k])


@pytest.mark.parametrize("scale", [1.0, 0.5, 0.25, 0.125, 0.0625])
def test_a_fixed_bound_collapses_where_a_dynamic_one_does_not(scale: float) -> None:
    """The zeros among positive activations: 20 % at every scale with the dynamic bound; all of them with one made for
    sixteen times the scale."""
    h = scale * torch.randn(200_000).clamp(min=0)

    def zeros(bound: float) -> float:
        return float((square(bound)(h[h > 0]) == 0).float().mean())

    fixed = {1.0: 0.2, 0.5: 0.38, 0.25: 0.69, 0.125: 0.96, 0.0625: 1.0}[scale]
    assert zeros(4.0) == pytest.approx(fixed, abs=0.05)
    assert zeros(4.0 * scale) == pytest.approx(0.2, abs=0.05)
    assert relative_mse(square(4.0 * scale)(h), h.square()) < 0.001


# In a network ------------------------------------------------------------------------------------------------------


def network(policy: LinearPolicy = INT8, width: int = 64, hidden: int = 128) -> Site:
    up, down = layer_of(policy, width, hidden, "up"), layer_of(policy, hidden, width, "down")
    return install("blocks.0.mlp", up, torch.rand(width) + 0.5, down)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_down_multiplies_the_very_integers(dtype: torch.dtype) -> None:
    """Its operand is n2 with the scale c^2 / 127: no token's amax, no second rounding."""
    site = network()
    Clamp(ClampConfig(enabled=True), [site]).update()
    c = 4 * activation_deviation(site.up.weight.detach(), site.gain).double()
    assert float(site.square.bound) == pytest.approx(float(c), rel=1e-6)
    x = torch.randn(40, 64).to(dtype)
    with torch.no_grad():
        up = site.up(x)
        y = site.down(site.square(up))
    n2 = torch.from_numpy(formula(up.float().numpy(), float(site.square.bound))[0]) * 127 / c**2
    q = quantise(site.down.weight.detach(), S.INT8_ROW)
    weight = q.codes.double() * q.scales.double()
    exact = n2.round() @ weight.T * c**2 / 127
    assert float((y.double() - exact).norm() / exact.norm()) < (1e-5 if dtype == torch.float32 else 4e-3)
    site.down.fix_input_amax(None)
    with torch.no_grad():
        free = site.down(site.square(up))
    assert float((free.double() - exact).norm() / exact.norm()) > (1e-4 if dtype == torch.float32 else 4e-3)


def test_gradients_are_straight_through() -> None:
    """Against FP64 autograd with every rounding detached."""
    site = network()
    Clamp(ClampConfig(enabled=True, deviations=2.0), [site]).update()
    x = torch.randn(40, 64).bfloat16().float()
    site.down(site.square(site.up(x))).square().sum().backward()
    c = site.square.bound.double()

    def through(value: Tensor, rounded: Tensor) -> Tensor:
        return value + (rounded - value).detach()

    def weight_of(layer: LowbitLinear) -> tuple[Tensor, Tensor]:
        w = layer.weight.detach().double().requires_grad_()
        b = w.bfloat16().double()
        row = b.abs().amax(1, keepdim=True) / 127
        return w, through(w, (b / row).round() * row)

    (w1, q1), (w2, q2) = weight_of(site.up), weight_of(site.down)
    xd = x.double()
    row = xd.abs().amax(1, keepdim=True) / 127
    up = ((xd / row).round() * row) @ q1.T
    h = up.clamp(min=0).minimum(c)
    h = through(h, (h * 127 / c).round() * c / 127)
    a = through(h * h, (h * h * 127 / c**2).round() * c**2 / 127)
    (a @ q2.T).square().sum().backward()
    for layer, want in ((site.up, w1.grad), (site.down, w2.grad)):
        assert layer.weight.grad is not None and want is not None
        assert float((layer.weight.grad.double() - want).norm() / want.norm()) < 5e-3
    assert site.square.bound.grad is None and float((up > c).double().mean()) > 0.005


def test_the_bound_follows_the_weights_only_when_updated() -> None:
    site = network()
    clamp = Clamp(ClampConfig(enabled=True), [site])
    clamp.update()
    before = site.square.bound.clone()
    with torch.no_grad():
        site.up.weight.mul_(0.5)
    assert torch.equal(site.square.bound, before)
    clamp.update()
    assert torch.equal(site.square.bound, before / 2)
    assert torch.equal(site.down.input_amax, site.square.bound**2)


def test_the_bound_is_frozen_into_what_is_saved() -> None:
    """Saved and read again, the network gives the same bits though its weights were rounded on the way."""
    site = network()
    clamp = Clamp(ClampConfig(enabled=True), [site])
    clamp.update()
    state = {name: t.clone() for name, t in clamp.state_tensors().items()}
    other = network()
    with torch.no_grad():
        for source, target in ((site.up, other.up), (site.down, other.down)):
            target.weight.copy_(source.weight.bfloat16())
    again = Clamp(ClampConfig(enabled=True), [other])
    again.update()
    assert not torch.equal(other.square.bound, site.square.bound)
    again.load_state_tensors(state)
    x = torch.randn(8, 64)
    with torch.no_grad():
        assert torch.equal(other.down(other.square(other.up(x))), site.down(site.square(site.up(x))))


def test_in_high_precision_it_is_a_plain_squared_relu() -> None:
    """While a switch or an evaluation has put `down` into BF16."""
    site, x = network(), torch.randn(8, 128)
    Clamp(ClampConfig(enabled=True, deviations=0.5), [site]).update()
    assert not torch.equal(site.square(x), x.clamp(min=0).square())
    for policy in (LinearPolicy(), *(PRESETS[name] for name in ("nvfp4", "nvfp4_nvidia", "fp8_row", "mxfp8"))):
        site.down.policy = policy
        assert torch.equal(site.square(x), x.clamp(min=0).square())
        found, plain = (site.down(site.square(x)), x.clamp(min=0).square() @ site.down.weight.t())
        assert float((found - plain).norm() / plain.norm()) < 0.25, policy.fprop.summary


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="no squared-ReLU network"):
        Clamp(ClampConfig(enabled=True), [])
    with pytest.raises(ConfigError, match=r"blocks\.0\.mlp\.down multiplies BF16.*precision=int8"):
        network(LinearPolicy(HIGH))
    with pytest.raises(ConfigError, match="down multiplies BF16"):
        install("blocks.0.mlp", Linear(8, 8), torch.ones(8), Linear(8, 8))
    site = network()
    site.up.weight = nn.Parameter(torch.zeros(10))
    with pytest.raises(ConfigError, match="whole weight"):
        Clamp(ClampConfig(enabled=True), [site]).update()
