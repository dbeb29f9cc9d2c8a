"""A run's precision over time: applied to the model when it is built, then moved along with the steps.

Before each step `begin_step` puts the policy in force that the switches have reached, a pure function of where the run
is, so that a resumed run needs nothing more. Before each micro-batch `begin_micro_batch` moves the clock that the
layers' noise is keyed by. Before the first step every policy that is still to come is rehearsed on a micro-batch, its
gradients thrown away: it is compiled, and found to fit into memory, while the run is young. Ranks rehearse alike, each
on its own micro-batch; where ZeRO shards the weights (stage 3) they do without.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lowbit.configs.schema import CompileMode, ComputeDtype, MatrixBackend, PrecisionConfig, RunConfig
from lowbit.errors import ConfigError
from lowbit.models.layers import GroupedLinear
from lowbit.models.transformer import Transformer
from lowbit.quant.apply import (
    Candidate,
    apply_policy,
    assign,
    bound,
    candidates,
    clocks,
    high_precision,
    lowbit_layers,
    report_policy,
    set_clock,
    set_stage,
)
from lowbit.quant.backends.base import Sizes
from lowbit.quant.backends.choose import Chooser
from lowbit.quant.kernels import ops
from lowbit.quant.policy import LinearPolicy
from lowbit.quant.presets import PRESETS
from lowbit.quant.report import EMULATED, NATIVE, PolicyReport, report
from lowbit.quant.resolve import PrecisionPolicy, Role, StagePolicy, describe, resolve
from lowbit.quant.spec import FOUR_OVER_SIX
from lowbit.quant.stabilisers.masters import block_counts
from lowbit.trainer.hardware import compute_dtype, device_name, fast_bf16
from lowbit.trainer.schedule import decaying
from lowbit.trainer.stabilise import Stabilisers

logger = logging.getLogger("lowbit")


def check_precision(config: RunConfig) -> None:
    """Raise ConfigError for names and formats that do not exist, rules and shapes that do not fit the model, and
    stabilisers that would find nothing to do in any phase of the run, or could not do it in one."""
    policy = resolve(config.precision)
    if config.precision.backend is MatrixBackend.te and config.engine.compile is not CompileMode.off:
        raise ConfigError("precision.backend=te: Transformer Engine's layers run uncompiled: set engine.compile=off")
    model = on_meta(config, torch.float32)
    layers = candidates(model)
    for role in Role:
        phases = [assign(phase, layers) for phase in policy.phases(role)]
        if role is Role.training:
            _check_stabilisers(config.precision, layers, phases)
    apply_policy(model, policy, seed=0)
    Stabilisers(config.precision, model)


def _check_stabilisers(
    precision: PrecisionConfig, layers: Mapping[str, Candidate], phases: Sequence[Mapping[str, LinearPolicy]]
) -> None:
    """Raise ConfigError for stabilisers that would silently do nothing, or that no switch may change beneath."""
    key, wanted = "precision.stabilisers", precision.stabilisers
    if precision.backend is MatrixBackend.te and wanted.outcontrol.enabled:
        raise ConfigError(
            f"{key}.outcontrol.enabled=true: Transformer Engine's layers quantise all channels alike: "
            "precision.backend=auto would work"
        )
    if not (wanted.oscireset.enabled and wanted.oscireset.hysteresis > 0):
        return
    if precision.backend is MatrixBackend.te:
        raise ConfigError(
            f"{key}.oscireset.hysteresis={wanted.oscireset.hysteresis:g}: Transformer Engine chooses by itself: "
            f"{key}.oscireset.hysteresis=0 would work"
        )
    for name, layer in layers.items():
        specs = [phase[name].fprop.right.spec for phase in phases]
        counts = {
            spec.name: block_counts(layer.out_features, layer.in_features, spec)
            for spec in specs
            if spec is not None and spec.rounding in FOUR_OVER_SIX
        }
        if len(set(counts.values())) > 1 and not isinstance(layer, GroupedLinear):
            words = " and ".join(f"{count[1]} blocks a row in {format}" for format, count in counts.items())
            raise ConfigError(
                f"{key}.oscireset.hysteresis={wanted.oscireset.hysteresis:g}: {name}: a switch changes what its "
                f"choices of 4 or 6 are of, {words}: {key}.oscireset.hysteresis=0 would work"
            )


def plan_precision(config: RunConfig, device: torch.device | None = None) -> list[str]:
    """The lines that `lowbit plan` prints: what each layer would get. `device` None: some GPU with fast BF16.

    Raises ConfigError as `check_precision`.
    """
    policy = resolve(config.precision)
    dtype = _planned_dtype(config, device)
    name = "a GPU" if device is None else device_name(device)
    chooser = Chooser.on(device, dtype, config.precision.backend, check=False)
    plain = _plain(dtype, device)
    model = on_meta(config, dtype)
    made = report_policy(model, policy, dtype=_word(dtype), device=name, chooser=chooser, plain=plain)
    slow = None if device is None else ops.missing(device)
    return describe_precision(config, policy, made, _later(policy, made, model, chooser, plain), slow)


def native_precisions(device: torch.device) -> dict[str, str]:
    """Of each preset whether this device multiplies all of its formats natively, or what is emulated of it."""
    chooser = Chooser.on(device, torch.bfloat16, MatrixBackend.auto, check=False)
    plain, large = _plain(torch.bfloat16, device), Sizes(4096, 4096)
    return {
        name: report({name: chooser.bind(name, policy, large).policy}, "bf16", "", plain).runs
        for name, policy in PRESETS.items()
    }


def on_meta(config: RunConfig, dtype: torch.dtype) -> Transformer:
    """The model without memory; its vocabulary does not matter here."""
    with torch.device("meta"):
        return Transformer(config.model, 1, dtype)


def _later(
    policy: PrecisionPolicy, first: PolicyReport, model: Transformer, chooser: Chooser, plain: str
) -> list[PolicyReport]:
    """The report after each switch, one after the other as they are listed."""
    count = len(policy.switches)
    stages = [policy.training([i <= last for i in range(count)]) for last in range(count)]
    return [_report_of(stage, first, model, chooser, plain) for stage in stages]


def _report_of(
    stage: StagePolicy, first: PolicyReport, model: Transformer, chooser: Chooser, plain: str
) -> PolicyReport:
    policies, remarks = bound(stage, candidates(model), chooser)
    return report(policies, first.dtype, first.device, plain, remarks)


def describe_precision(
    config: RunConfig,
    policy: PrecisionPolicy,
    report: PolicyReport,
    later: Sequence[PolicyReport],
    slow: str | None = None,
) -> list[str]:
    """Table, switches, and the policies of the RL stages, line by line; one line where nothing is quantised.

    slow: why the quantisers have no kernels on this device, if they have none.
    """
    head = f"precision {config.precision.name} on {report.device}"
    if not any(phase.quantised for role in Role for phase in policy.phases(role)):
        return [f"{head}: {report.dtype.upper()} in every layer, {report.runs}"]
    lines = [f"{head}, quantised products {report.runs}:" if report.quantised else f"{head}:"]
    lines += [f"  {line}" for line in report.table().splitlines()]
    for switch, then in zip(policy.switches, later, strict=True):
        how = f", quantised products {then.runs}" if then.quantised else ""
        lines.append(f"{switch.when}: {switch.label}{how}:")
        lines += [f"  {line}" for line in then.table().splitlines()[:-1]]
    if slow is not None:
        lines.append(f"no kernels quantise here, but PyTorch's operators, some thirty times slower: {slow}")
    if not any(policy.phases(role)[0].quantised for role in (Role.sampler, Role.trainer)):
        return lines
    for role in (Role.sampler, Role.trainer):
        words = describe(policy.phases(role)[0].default)
        parts = ("fprop",) if role is Role.sampler else ("fprop", "dgrad", "wgrad")
        lines.append(f"RL {role}: " + ", ".join(f"{part} {words[part]}" for part in parts))
    return lines


class RunPrecision:
    """The precision of one run and its model."""

    def __init__(self, config: RunConfig, model: Transformer) -> None:
        """Apply the policy to `model`, which is on its device. Raises ConfigError as `apply_policy`."""
        device = model.head_weight.device
        dtype = model.compute_dtype
        self.config = config
        self.model = model
        self.policy = resolve(config.precision)
        self.chooser = Chooser.on(device, dtype, config.precision.backend, check=True)
        self._plain = _plain(dtype, device)
        self.report = apply_policy(
            model,
            self.policy,
            seed=config.seed,
            dtype=_word(dtype),
            device=device_name(device),
            chooser=self.chooser,
            plain=self._plain,
        )
        self.active = (False,) * len(self.policy.switches)
        self._clocks = clocks(model)
        self._allow_graphs()
        self._rehearsed = False
        self._done = 0  # steps when the present one is over

    @property
    def quantised(self) -> bool:
        """Whether the forward in force quantises anything in any layer."""
        stage = self.policy.training(self.active)
        policies, _ = bound(stage, candidates(self.model), self.chooser)
        return any(policy.fprop.quantised for policy in policies.values())

    def lines(self) -> list[str]:
        """What the run's start prints."""
        later = _later(self.policy, self.report, self.model, self.chooser, self._plain)
        slow = ops.missing(self.model.head_weight.device)
        return describe_precision(self.config, self.policy, self.report, later, slow)

    def reports(self, sampler: bool = False) -> list[dict[str, Any]]:
        """For `precision.json`: what layers get from the start and after each switch, as plain values, each with
        `when` and `change`; with `sampler` also the forward that is sampled from."""
        later = _later(self.policy, self.report, self.model, self.chooser, self._plain)
        found = [{"when": "from the start", "change": ""} | self.report.as_dict()]
        for switch, then in zip(self.policy.switches, later, strict=True):
            found.append({"when": switch.when, "change": switch.label} | then.as_dict())
        if sampler:
            stage = self.policy.phases(Role.sampler)[0]
            got = _report_of(stage, self.report, self.model, self.chooser, self._plain).as_dict()
            rows = [row | {"runs": "", "backend": ""} for row in got["rows"] if row["product"] == "fprop"]
            found.append({"when": "the sampler", "change": ""} | got | {"rows": rows, "remarks": []})
        return found

    def _allow_graphs(self) -> None:
        """Let the compiler make what the run needs of one block's code. With `fullgraph` it fails at its limit, 8."""
        layers = candidates(self.model)
        kinds: set[tuple[LinearPolicy, ...]] = set()
        for phase in self.policy.phases():
            blocks: dict[str, list[LinearPolicy]] = {}
            for name, policy in assign(phase, layers).items():
                blocks.setdefault(name.split(".")[1], []).append(policy)
            kinds |= {tuple(policies) for policies in blocks.values()}
        # With and without a gradient, with a mask and purely causal, whole batches and a last one that is shorter;
        # before and after OutControl has its channels; and the same without quantisation.
        times = 2 if self.config.precision.stabilisers.outcontrol.enabled else 1
        limit = 8 * (times * len(kinds) + 1)
        torch._dynamo.config.recompile_limit = max(limit, torch._dynamo.config.recompile_limit)

    # In time --------------------------------------------------------------------------------------------------

    def begin_step(self, step: int, progress: float, rehearse: Callable[[], None] | None = None) -> None:
        """Put the policy in force that the step after `step` steps, at `progress` of the run, computes in.

        `rehearse` runs a micro-batch forward and backward without any effect; it is called for each policy that may
        still come, before the first step.
        """
        if not self._rehearsed and rehearse is not None:
            self._rehearse(rehearse)
        self._done = step + 1
        falling = decaying(self.config.optim.schedule, progress)
        self.set_active([switch.due(step, progress, falling) for switch in self.policy.switches], step)

    def set_active(self, active: Sequence[bool], step: int | None = None) -> None:
        """Put the policy in force that these switches make; with `step`, say what changed."""
        if self.active == tuple(active):
            return
        for switch, was, now in zip(self.policy.switches, self.active, active, strict=True):
            if step is not None and was != now:
                verb = "from here on" if now else "no longer"
                logger.info("precision after step %d: %s %s (%s)", step, verb, switch.label, switch.when)
        self.active = tuple(active)
        set_stage(self.model, self.policy.training(self.active), self.chooser)

    def begin_micro_batch(self, step: int, micro_batch: int, rank: int) -> None:
        """Move the clock. step: steps done; micro_batch: index in the step over all ranks."""
        for clock in self._clocks:
            set_clock(clock, step, micro_batch, rank)

    def begin_evaluation(self) -> None:
        """Set the clock as in a process that has just opened the checkpoint: a stochastic forward then gives the same.

        Gradients are all in; the next micro-batch sets its own time.
        """
        self.begin_micro_batch(self._done, 0, 0)

    def _rehearse(self, rehearse: Callable[[], None]) -> None:
        self._rehearsed = True
        now = self.policy.training(self.active)
        coming = [phase for phase in self.policy.phases(active=self.active) if phase != now]
        try:
            for phase in coming:
                set_stage(self.model, phase, self.chooser)
                rehearse()
        finally:
            set_stage(self.model, now, self.chooser)
        if coming:
            logger.info("precision: %d that may follow rehearsed on a micro-batch", len(coming))

    # Evaluation -----------------------------------------------------------------------------------------------

    @contextmanager
    def high(self) -> Iterator[None]:
        """The forward without any quantisation."""
        with high_precision(self.model):
            yield

    # Checkpoints ----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """For a checkpoint's meta: the policy, which switches were due in the last step, and what layers then got."""
        stage = self.policy.training(self.active)
        got = _report_of(stage, self.report, self.model, self.chooser, self._plain)
        return {"policy": self.policy.as_dict(), "active": list(self.active), "layers": got.as_dict()}

    def resume(self, saved: dict[str, Any] | None, step: int) -> None:
        """Go back to where a checkpoint was, and say if it was trained in another precision.

        The clock is that of `step`, so that a forward whose noise it keys is the same in every process.
        """
        found = {} if saved is None else self.policy.differences(saved["policy"])
        if found:
            pairs = [f"{key}: {was or 'nothing'} so far, {now or 'nothing'} now" for key, (was, now) in found.items()]
            logger.warning("the precision of this run changes after step %d: %s", step, "; ".join(pairs))
        same_numbers = not found.keys() - {"backend"}
        if saved is not None and same_numbers and len(saved["active"]) == len(self.active):
            self.set_active(saved["active"])
        self._done = step
        self.begin_evaluation()


def forward_in_words(model: Transformer) -> str:
    """What the forward of a model computes in: `fp32`, or `NVFP4_POW2_46 x NVFP4_POW2_46 and fp32`."""
    products = dict.fromkeys(layer.policy.fprop.summary for layer in lowbit_layers(model).values())
    return " and ".join([*(text for text in products if text != "BF16"), _word(model.compute_dtype)])


def rehearsal(loss: Callable[[], torch.Tensor], model: Transformer) -> Callable[[], None]:
    """A `rehearse` for `RunPrecision.begin_step`: the whole forward and backward, with no gradient left behind."""

    def run() -> None:
        torch.autograd.grad(loss(), [model.embedding.weight])

    return run


def _plain(dtype: torch.dtype, device: torch.device | None) -> str:
    """How a device runs a product that is not quantised."""
    return NATIVE if dtype is torch.float32 or device is None or fast_bf16(device) else EMULATED


def _planned_dtype(config: RunConfig, device: torch.device | None) -> torch.dtype:
    if device is not None:
        return compute_dtype(config.precision, device)
    return torch.float32 if config.precision.compute is ComputeDtype.fp32 else torch.bfloat16


def _word(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
