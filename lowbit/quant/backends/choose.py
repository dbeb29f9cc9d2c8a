"""Which backend multiplies each product of each layer: decided once, when a policy meets a model on a device.

`auto` takes, product by product, the first backend that has hardware for the formats, that this device does not make
refuse, and that passes its start-up check; where there is none, the emulation. A layer whose products FP8 would slow
down (`measured`) stays in BF16. A backend that the configuration names takes every quantised product of every layer,
and what it cannot take is an error: nothing is then emulated in silence. Transformer Engine takes whole layers and only
if it is named.

The choice is written into the policy (`Operand.backend`), which compiled code is specialised on; the reasons go into
the report.
"""

import logging
from dataclasses import dataclass
from functools import cache

import torch

from lowbit.configs.schema import MatrixBackend
from lowbit.errors import ConfigError
from lowbit.quant.backends import NATIVE, fp8_codes, fp8_grouped, te
from lowbit.quant.backends.base import UNKNOWN, Backend, Device, Sizes, bind, describe_device
from lowbit.quant.backends.measured import TABLE, Measured, loses
from lowbit.quant.backends.selftest import Trial, check
from lowbit.quant.policy import EMULATED, LinearPolicy, ProductPolicy

logger = logging.getLogger("lowbit")

PRODUCTS = ("fprop", "dgrad", "wgrad")


@dataclass(frozen=True)
class Bound:
    """A layer's policy with its backends."""

    policy: LinearPolicy
    remarks: tuple[str, ...] = ()
    """What a reader of the report should know: why something is emulated, or in BF16."""


@dataclass(frozen=True)
class Chooser:
    """Decides for the layers of one model. Pure, but for start-up checks where `target` is given."""

    device: Device = UNKNOWN
    dtype: torch.dtype = torch.bfloat16
    """Of activations."""
    wanted: MatrixBackend = MatrixBackend.emulated
    target: torch.device | None = None
    """Where backends are checked; None: they are not."""
    table: tuple[Measured, ...] = TABLE

    @classmethod
    def on(cls, device: torch.device | None, dtype: torch.dtype, wanted: MatrixBackend, check: bool) -> "Chooser":
        """For a device (None: some device that is not known); `check`: run the start-up checks on it."""
        target = device if check and device is not None and device.type == "cuda" else None
        return cls(describe_device(device), dtype, wanted, target)

    def bind(self, name: str, policy: LinearPolicy, sizes: Sizes) -> Bound:
        """The policy of the layer `name` with its backends.

        Raises: ConfigError: the backend that the configuration names cannot take this layer.
        """
        if self.wanted is MatrixBackend.emulated or not policy.quantised:
            return Bound(policy)
        if self.wanted is MatrixBackend.te:
            return self._bind_te(name, policy, sizes)
        found = {product: self._choose(product, getattr(policy, product), sizes) for product in PRODUCTS}
        whys: dict[str, list[str]] = {}
        for product, (backend, why) in found.items():
            if why is not None and self.wanted is not MatrixBackend.auto:
                raise ConfigError(
                    f"precision.backend={self.wanted}: {name}: {product}: {why}; "
                    "precision.backend=auto would emulate it"
                )
            if why is not None and backend is None and self.device.kind == "cuda":
                whys.setdefault(why, []).append(product)
        remarks = [f"{', '.join(products)} emulated: {why}" for why, products in whys.items()]
        chosen = {backend.name: backend for backend, _ in found.values() if backend is not None}
        slow = self._slow(policy, sizes, found)
        if slow is not None:
            shape = f"{slow.in_features} x {slow.out_features}, {slow.tokens} tokens"
            return Bound(
                LinearPolicy(), (f"BF16 in place of FP8, which is slower here ({slow.speedup:.2f}x at {shape})",)
            )
        passed = "" if self.target is None else "; it passed its start-up check here"
        remarks += [f"{backend.name}: {backend.note}{passed}" for backend in chosen.values() if backend.note]
        padded = _padded(found, sizes)
        remarks += [f"padded to a multiple of 16 for fp8: {padded}"] if padded else []
        names = [EMULATED if backend is None else backend.name for backend, _ in found.values()]
        return Bound(bind(policy, *names), tuple(remarks))

    def bind_experts(self, name: str, policy: LinearPolicy, sizes: Sizes) -> Bound:
        """The policy of the experts `name`: fprop and dgrad may have a backend, wgrad is emulated.

        Raises: ConfigError: the configuration names a backend, which would have to take all three.
        """
        if not policy.quantised or self.wanted is MatrixBackend.emulated:
            return Bound(policy)
        if self.wanted is not MatrixBackend.auto:
            raise ConfigError(
                f"precision.backend={self.wanted}: {name}: no backend multiplies all three products of experts, wgrad "
                "is always emulated; precision.backend=auto would take what there is, and a rule could leave them in "
                "BF16"
            )
        why = fp8_grouped.refuses(policy, sizes, self.device, self.dtype)
        if why is None and self.target is not None:
            why = fp8_grouped.check(self.target)
            if why is not None:
                _warn(f"experts are emulated: fp8 failed its start-up check: {why}")
        if why is None:
            remark = "wgrad emulated: no FP8 product sums over the rows of each expert"
            return Bound(bind(policy, "fp8", "fp8", EMULATED), (remark,))
        return Bound(policy, (f"experts emulated: {why}",) if self.device.kind == "cuda" else ())

    def _choose(self, product: str, policy: ProductPolicy, sizes: Sizes) -> tuple[Backend | None, str | None]:
        """The backend of a product, or why there is none."""
        if not policy.quantised:
            return None, None
        why = f"no tensor core multiplies {policy.left.name} x {policy.right.name}"
        for backend in NATIVE.values():
            if self.wanted not in (MatrixBackend.auto, backend.name):
                continue
            if not backend.takes(policy.left.spec, policy.right.spec):
                why = why if self.wanted is MatrixBackend.auto else f"it does not take {policy.summary}"
                continue
            refusal = backend.refuses(policy, product, sizes, self.device) or self._check(backend, product, policy)
            if refusal is None:
                return backend, None
            why = refusal
        return None, why

    def _check(self, backend: Backend, product: str, policy: ProductPolicy) -> str | None:
        left, right = policy.left.spec, policy.right.spec
        if self.target is None or left is None or right is None:
            return None
        trial = Trial(left, right, torch.float32 if product == "wgrad" else self.dtype, product == "fprop")
        wrong = check(backend, trial, self.target)
        if wrong is not None:
            wrong = f"{backend.name} failed its start-up check: {wrong}"
            if self.wanted is MatrixBackend.auto:
                _warn(f"{left.name} x {right.name} is emulated: {wrong}")
        return wrong

    def _slow(
        self, policy: LinearPolicy, sizes: Sizes, found: dict[str, tuple[Backend | None, str | None]]
    ) -> Measured | None:
        """The measurement that speaks against FP8 in this layer, if all of it would be FP8."""
        names = {None if backend is None else backend.name for backend, _ in found.values()}
        if self.wanted is not MatrixBackend.auto or names != {"fp8"}:
            return None
        return loses(self.device, str(fp8_codes.kind_of(policy.fprop.left.spec)), sizes, self.table)

    def _bind_te(self, name: str, policy: LinearPolicy, sizes: Sizes) -> Bound:
        why = te.refuses(policy, sizes, self.device)
        if why is None and self.target is not None:
            why = te.check(policy, self.target)
        if why is not None:
            raise ConfigError(
                f"precision.backend=te: {name}: {why}; precision.backend=auto needs no Transformer Engine"
            )
        bound = bind(policy, te.NAME, te.NAME, te.NAME)
        return Bound(bound, (f"Transformer Engine's {te.recipe_of(policy)}",))


def _padded(found: dict[str, tuple[Backend | None, str | None]], sizes: Sizes) -> str:
    """Feature sizes that FP8 products pad, in words; empty if there are none."""
    if not any(backend is not None and backend.name == "fp8" for backend, _ in found.values()):
        return ""
    names = {"in": sizes.in_features, "out": sizes.out_features}
    return ", ".join(f"{side}={size}" for side, size in names.items() if size % fp8_codes.MULTIPLE)


@cache
def _warn(text: str) -> None:
    """Once a process."""
    logger.warning("%s", text)
