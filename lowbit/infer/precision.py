"""What a sampler may compute in, and the modules it computes with.

A sampler's activations are quantised token by token: if a scale spanned several rows of the batch, what one sequence
says would depend on who is sampled beside it, and no trainer could compute the same probabilities again. Refused
therefore are, with this reason, a scale of the whole tensor or of a two-dimensional block, a mean over tokens that is
split off, and roundings and rotations drawn anew for each micro-batch: the trainer's clock moves on, so its weights
would be rounded otherwise.

`shadow` makes a second tree of modules over the same parameters, or over copies of them. The trainer's modules, which
may be compiled, watched or in another precision, are never touched.
"""

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lowbit.configs.schema import MatrixBackend
from lowbit.errors import ConfigError
from lowbit.models.adapters import merge
from lowbit.models.layers import GroupedLinear, Linear
from lowbit.models.transformer import Transformer
from lowbit.quant.apply import apply_policy, candidates
from lowbit.quant.backends.choose import Chooser
from lowbit.quant.grouped import LowbitGroupedLinear
from lowbit.quant.linear import LowbitLinear
from lowbit.quant.policy import LinearPolicy, Signs
from lowbit.quant.resolve import PrecisionPolicy, Role
from lowbit.quant.spec import Outer, QuantSpec

M = TypeVar("M", bound=nn.Module)


def check_sampler(policy: PrecisionPolicy) -> None:
    """Raise ConfigError, naming the format, when the sampler's stage makes rows depend on each other."""
    stage = policy.sampler
    for key, linear in (("precision.sampler", stage.default), *((rule.key, rule.policy) for rule in stage.rules)):
        if (why := refusal(linear)) is not None:
            raise ConfigError(f"{key}: {why}")


def refusal(policy: LinearPolicy) -> str | None:
    """Why a layer of this policy cannot sample; None if it can."""
    left, right = policy.fprop.left.spec, policy.fprop.right.spec
    if policy.mean_split:
        return "its mean over tokens spans the batch, so a sequence depends on its batch mates: set mean_split=false"
    if left is not None and _spans_rows(left):
        return (
            f"a scale of {left.name} activations spans the batch, so a sequence depends on its batch mates: "
            "choose a format with scales of rows or of blocks in a row (nvfp4, mxfp8, fp8_row, fp8_block, int8), or "
            "quantise weights only (nvfp4_w4a16)"
        )
    for spec in (left, right):
        if spec is not None and spec.stochastic:
            return f"{spec.name} rounds at random, so the trainer would compute other probabilities: round to nearest"
    if policy.fprop.rotation and policy.fprop.signs is Signs.FRESH:
        return (
            f"fprop's rotation of {policy.fprop.rotation} is drawn anew for every micro-batch, so the trainer would "
            "compute other probabilities: use signs=fixed, or none"
        )
    return None


def _spans_rows(spec: QuantSpec) -> bool:
    """Whether rows share a scale."""
    return spec.after is Outer.TENSOR or spec.block[0] != 1


def shadow(
    model: Transformer,
    policy: PrecisionPolicy | None,
    own: bool,
    native: bool = False,
    device: torch.device | None = None,
) -> Transformer:
    """A second tree of modules with the parameters and state of `model`.

    Args:
        policy: whose sampler stage it computes in; None: as `model` does now. own: with copies of the parameters, the
            sums in place of adapted weights. device: where the copies are; None: where `model` is.
        native: products run on tensor cores where the device has them for the format.

    Raises: ConfigError, as `check_sampler` and `apply_policy`.
    """
    device = model.head_weight.device if device is None else device
    made = _copied(model, {}, device if own else None)
    if own:
        merge(made)
    if policy is not None:
        check_sampler(policy)
        _plain(made)
        backend = MatrixBackend.auto if native else MatrixBackend.emulated
        chooser = Chooser.on(device, model.compute_dtype, backend, check=native)
        apply_policy(made, policy, seed=0, role=Role.sampler, chooser=chooser)
    return made


def _copied(module: M, copies: dict[int, Tensor], device: torch.device | None) -> M:
    """A module with its children; parameters and buffers shared, or copied once each to `device`."""
    made = module.__class__.__new__(module.__class__)
    state: dict[str, Any] = dict(module.__dict__)
    for kind in list(state):
        if kind.endswith("_hooks") or kind.endswith("_hooks_with_kwargs") or kind.endswith("_hooks_always_called"):
            state[kind] = type(state[kind])()
    state.pop("_compiled_call_impl", None)
    state["_modules"] = {name: None if m is None else _copied(m, copies, device) for name, m in module._modules.items()}
    for kind in ("_parameters", "_buffers"):
        state[kind] = {name: _tensor(t, copies, device) for name, t in state[kind].items()}
    if "frozen" in state:
        state["frozen"] = None
    made.__dict__.update(state)
    return made


def _tensor(tensor: Tensor | None, copies: dict[int, Tensor], device: torch.device | None) -> Tensor | None:
    if tensor is None or device is None:
        return tensor
    if id(tensor) not in copies:
        copy = tensor.detach().to(device, copy=True)
        copies[id(tensor)] = nn.Parameter(copy, requires_grad=False) if isinstance(tensor, nn.Parameter) else copy
    return copies[id(tensor)]


def _plain(model: Transformer) -> None:
    """Every low-bit layer becomes the plain layer it was made of."""
    for name, layer in candidates(model).items():
        if not isinstance(layer, LowbitLinear | LowbitGroupedLinear):
            continue
        with torch.device("meta"):  # the parameter comes from the layer
            plain: Linear | GroupedLinear
            if isinstance(layer, LowbitGroupedLinear):
                plain = GroupedLinear(layer.experts, layer.in_features, layer.out_features)
            else:
                plain = Linear(layer.in_features, layer.out_features)
        plain.weight = layer.weight
        if isinstance(plain, Linear) and isinstance(layer, Linear):
            plain.low_rank = layer.low_rank
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, plain)
