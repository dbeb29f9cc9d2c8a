"""OsciReset: weights that flip between two grid values are put back on the nearest one.

Late in training a master weight w barely moves, but one that lies near the edge between two grid values makes its
quantised value Q(w) jump to and fro by a whole step. Every jump is noise in the forward pass that no optimizer asked
for. TetraJet-v2 (arXiv 2510.27527, code thu-ml/TetraJet-v2-NVFP4Training) finds such weights by comparing how far Q(w)
travelled with how far w did, and puts them in the middle of their bin, where Q(w) stays. After optimizer step t, with
phase p = t mod period, once the run has passed the start:

    p = 0            w' = w;  dQ = dW = 0                              a window opens
    1 <= p <= L      dQ += |Q(w) - Q(w')|;  dW += |w - w'|;  w' = w
    p = L + 1        w = Q(w) where dW > 0 and dQ >= threshold * dW    the window closes

Q is the layer's forward quantiser, four over six and all; the FP32 master changes in place, the optimizer's state does
not. Weights that OutControl keeps in MXFP8 are left alone, and so are those of experts.

**Efficient detector.** A window watches only the `tracked` share of each tensor that lies nearest to a bin's edge when
it opens: the largest |w/s - q| / width(q), with q the grid value, s its scale and width(q) the width of its bin (see
`grid.off_centre`). The published code forgets the start gate in this variant; here both obey it.

**Four over six.** When a weight block's choice between 4 and 6 flips, sixteen quantised values jump at once, another
way to oscillate. With `hysteresis` m > 0 each block keeps its choice until the other one's error is below (1 - m) of
the present one's. The choice then belongs to the layer (`LowbitLinear.choice`), is renewed after each optimizer step,
and is what the forward pass takes. Flips inside windows are counted either way.

**Switches.** A window is of one format: where a switch changes Q, every weight's quantised value jumps once, which is
no oscillation, and the window is dropped.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.configs.schema import OsciDetector, OsciResetConfig
from lowbit.errors import ConfigError
from lowbit.quant.philox import Product, Side, Stream
from lowbit.quant.policy import Operand
from lowbit.quant.product import factor
from lowbit.quant.quantise import Memory, quantise_remembering, quantise_values
from lowbit.quant.spec import FOUR_OVER_SIX, QuantSpec
from lowbit.quant.stabilisers.grid import forward_value, off_centre
from lowbit.quant.stabilisers.masters import (
    Master,
    block_counts,
    put_rows,
    quantised_rows,
    rows_of,
    weight_spec,
    whole_rows,
)
from lowbit.quant.stabilisers.outcontrol import gains

KEY = "precision.stabilisers.oscireset"
SHARD_SLOTS = ("weight", "value", "moved", "jumped")
Sum = Callable[[Tensor], Tensor]
"""A tensor's sum over the ranks, on every rank."""


@dataclass
class Window:
    """What one weight did since its window opened: of all elements [rows, columns], or of those watched [n]."""

    weight: Tensor
    """w', FP32."""
    value: Tensor
    """Q(w'), BF16 where that is exact, else FP32."""
    moved: Tensor
    """dW, FP32."""
    jumped: Tensor
    """dQ, FP32."""
    index: Tensor | None = None
    """int64 [n]: the watched elements of the flattened weight; None: all."""
    choice: Tensor | None = None
    """int8: each block's 4 or 6 at the last step; None without four over six."""
    flips: Tensor | None = None
    """int64 [2]: how often a block's choice changed, and steps times blocks in which it could have."""

    def see(self, weight: Tensor, value: Tensor, choice: Tensor | None) -> None:
        """One more step of w and Q(w) [rows, columns]."""
        if self.index is not None:
            weight, value = weight.reshape(-1)[self.index], value.reshape(-1)[self.index]
        self.jumped += (value.float() - self.value.float()).abs()
        self.moved += (weight - self.weight).abs()
        self.weight.copy_(weight)
        self.value.copy_(value)
        if choice is not None and self.choice is not None and self.flips is not None:
            self.flips[0] += (choice != self.choice).sum()
            self.flips[1] += choice.numel()
            self.choice.copy_(choice)

    def oscillating(self, threshold: float) -> Tensor:
        """bool, of the shape of `moved`: whose quantised value went so many times as far as the weight."""
        return torch.where(self.moved > 0, self.jumped / self.moved, 0.0) >= threshold

    def tensors(self) -> dict[str, Tensor]:
        """What is there, by field."""
        return {f.name: tensor for f in fields(self) if (tensor := getattr(self, f.name)) is not None}


class OsciReset:
    """Looks at the masters after every optimizer step, and resets those that oscillate."""

    def __init__(
        self,
        config: OsciResetConfig,
        masters: Callable[[], Iterable[Master]],
        sum_over_ranks: Sum = lambda tensor: tensor,
        retaining: bool = False,
    ) -> None:
        """`masters` gives the weights as the engine holds them, anew at each call. `retaining`: OutControl will come.

        Raises ConfigError when the settings, or a weight that would have to be watched in some phase of the run, do
        not allow it.
        """
        if not 0 < config.window < config.period - 1:
            raise ConfigError(
                f"{KEY}.window={config.window} {KEY}.period={config.period}: a window opens, watches and closes within "
                f"a period; {KEY}.window={max(1, config.period - 2)} would work"
            )
        self.config = config
        self._masters = masters
        self._sum = sum_over_ranks
        self._windows: dict[str, Window] = {}
        self._formats: dict[str, str] = {}
        """Of each weight, what its window watches it in."""
        self._started = False
        for master in masters():
            for policy in master.layer.phases:
                if (spec := weight_spec(master, policy)) is not None:
                    (whole_rows if retaining and gains(policy) else rows_of)(master, spec)
                    if config.hysteresis > 0 and spec.rounding in FOUR_OVER_SIX and master.layer.choice is None:
                        _remember_choice(master, spec)

    @torch.no_grad()
    def after_step(self, step: int, progress: float) -> dict[str, float]:
        """Optimizer step `step` (from 1) has just been taken and `progress` of the run is done; metrics, if any.

        When a window closes: `quant/reset_share` of all weights watched over, and for each layer
        `quant/<layer>/weight/reset_share` and, with four over six, `.../flip_share` (of its blocks, a step).
        """
        gate = self.config.start_step
        self._started = self._started or (progress >= self.config.start if gate is None else step >= gate)
        if not self._started:
            return {}
        phase = step % self.config.period
        counts: dict[str, Tensor] = {}
        for master in self._masters():
            spec = weight_spec(master)
            if self._formats.get(master.name) != (None if spec is None else spec.text):  # a switch
                self._formats.pop(master.name, None)
                self._windows.pop(master.name, None)
            if spec is not None and (phase <= self.config.window + 1 or master.layer.choice is not None):
                self._visit(master, spec, phase, counts)
        return self._report(counts)

    def _visit(self, master: Master, spec: QuantSpec, phase: int, counts: dict[str, Tensor]) -> None:
        """One weight after one step; a window that closes adds to `counts`."""
        if phase == self.config.window + 1:
            counts[master.layer_name] = torch.zeros(4, dtype=torch.int64, device=master.tensor.device)
            self._formats.pop(master.name, None)
        elif phase == 0:
            self._formats[master.name] = spec.text
        if master.tensor.numel() == 0:
            return
        weight = quantised_rows(master, spec)
        value, choice = self._quantise(master, spec, weight)
        if phase == 0:
            self._windows[master.name] = self._open(weight, spec, value, choice)
            return
        window = self._windows.get(master.name)
        if window is None or phase > self.config.window + 1:
            return
        if window.weight.numel() != self._watched(weight.numel()):  # OutControl has taken columns out since
            del self._windows[master.name]
        elif phase <= self.config.window:
            window.see(weight, value, choice)
        else:
            counts[master.layer_name] = self._close(master, spec, weight, value)

    def _quantise(self, master: Master, spec: QuantSpec, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the forward pass makes of the weight from now on, and each block's 4 or 6 where there is a choice."""
        layer = master.layer
        if layer.choice is not None and spec.rounding in FOUR_OVER_SIX:
            rows, columns = block_counts(weight.shape[0], weight.shape[1], spec)
            held = layer.choice[:rows, :columns]
            values, choice = quantise_remembering(weight, spec, Memory(held, self.config.hysteresis))
            held.copy_(choice)
            return forward_value(values), choice
        stream = Stream(layer.key, layer.clock, Product.FPROP, Side.RIGHT)  # nothing is drawn from it

        def made(memory: Memory | None) -> Tensor:
            return forward_value(factor(weight, Operand(spec), stream, None, torch.bfloat16, memory))

        value = made(None)
        return value, free_choice(value, made, spec) if spec.rounding in FOUR_OVER_SIX else None

    def _watched(self, size: int) -> int:
        """How many of `size` weights a window watches."""
        if self.config.detector is OsciDetector.full:
            return size
        return min(size, max(1, math.ceil(size * self.config.tracked)))

    def _open(self, weight: Tensor, spec: QuantSpec, value: Tensor, choice: Tensor | None) -> Window:
        index = None
        flips = None if choice is None else torch.zeros(2, dtype=torch.int64, device=weight.device)
        if self.config.detector is OsciDetector.efficient:
            values = quantise_values(weight, spec, memory=None if choice is None else Memory(choice, 1.0))
            score = off_centre(weight, values).reshape(-1)
            index = score.topk(self._watched(score.numel()), sorted=False).indices.sort().values
            weight, value = weight.reshape(-1)[index], value.reshape(-1)[index]
        zeros = torch.zeros_like(weight)
        return Window(weight.clone(), value.clone(), zeros, zeros.clone(), index, choice, flips)

    def _close(self, master: Master, spec: QuantSpec, weight: Tensor, value: Tensor) -> Tensor:
        """Reset; int64 [4]: weights reset, all weights, flips of blocks, steps times blocks."""
        window = self._windows.pop(master.name)
        found = window.oscillating(self.config.threshold)
        if window.index is not None:
            everywhere = torch.zeros(weight.numel(), dtype=torch.bool, device=weight.device)
            found = everywhere.index_copy_(0, window.index, found).reshape(weight.shape)
        put_rows(master, spec, torch.where(found, value.float(), weight))
        count = found.sum()
        flips = torch.zeros_like(count).expand(2) if window.flips is None else window.flips
        return torch.stack([count, torch.full_like(count, weight.numel()), *flips])

    def _report(self, counts: dict[str, Tensor]) -> dict[str, float]:
        """Shares from the counts, with one look at the device."""
        if not counts:
            return {}
        table: list[list[int]] = self._sum(torch.stack(list(counts.values()))).tolist()
        rows = {"": [sum(column) for column in zip(*table, strict=True)]}
        rows |= {f"{name}/weight/": row for name, row in zip(counts, table, strict=True)}
        report = {}
        for name, (reset, weights, flips, blocks) in rows.items():
            if weights:
                report[f"quant/{name}reset_share"] = reset / weights
            if blocks:
                report[f"quant/{name}flip_share"] = flips / blocks
        return report

    # State ------------------------------------------------------------------------------------------------------

    def shard_slots(self) -> dict[str, dict[str, Tensor]]:
        """Open windows in the layout of the shards: slot -> weight -> this process's part, flat FP32.

        Every weight is there, with an empty tensor where this process holds nothing of it. Nothing at all where a
        window does not have that layout: the efficient detector's, and those without OutControl's channels.
        """
        slots: dict[str, dict[str, Tensor]] = {slot: {} for slot in SHARD_SLOTS}
        for master in self._masters():
            window = self._windows.get(master.name)
            if window is not None and (window.index is not None or window.weight.numel() != master.tensor.numel()):
                return {}
            for slot, parts in slots.items():
                part = master.tensor[:0] if window is None else getattr(window, slot)
                parts[master.name] = part.float().reshape(-1)
        return slots

    def load_shard_slots(self, slots: Mapping[str, Mapping[str, Tensor]]) -> None:
        """The inverse; flips are counted from here on."""
        for master in self._masters():
            spec = weight_spec(master)
            if spec is None or master.tensor.numel() == 0:
                continue
            weight = quantised_rows(master, spec)
            value, choice = self._quantise(master, spec, weight)
            window = self._open(weight, spec, value, choice)
            for slot in SHARD_SLOTS:
                getattr(window, slot).copy_(slots[slot][master.name].view(weight.shape))
            self._windows[master.name] = window

    def state_tensors(self, windows: bool = True) -> dict[str, Tensor]:
        """Everything that goes on after a resume, by name: open windows, choices, whether it has started."""
        state = {"started": torch.tensor(self._started)}
        for name, window in self._windows.items() if windows else ():
            state |= {f"{name}.{slot}": tensor for slot, tensor in window.tensors().items()}
        for name, text in self._formats.items():
            state[f"{name}.format"] = torch.tensor(list(text.encode()), dtype=torch.uint8)
        for master in self._masters():
            if master.layer.choice is not None:
                state[f"{master.name}.held"] = master.layer.choice
        return state

    def load_state_tensors(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a saved state."""
        self._started = bool(state["started"])
        self._windows, self._formats = {}, {}
        for master in self._masters():
            device = master.tensor.device
            if (text := state.get(f"{master.name}.format")) is not None:
                self._formats[master.name] = bytes(text.tolist()).decode()
            slots = {
                f.name: tensor.to(device, copy=True)
                for f in fields(Window)
                if (tensor := state.get(f"{master.name}.{f.name}")) is not None
            }
            if slots:
                self._windows[master.name] = Window(**slots)
            if master.layer.choice is not None and (held := state.get(f"{master.name}.held")) is not None:
                master.layer.choice.copy_(held)


def free_choice(value: Tensor, made: Callable[[Memory], Tensor], spec: QuantSpec) -> Tensor:
    """Which blocks of a weight took four, int8: those whose values are not what six alone, `made` anew, would give."""
    rows, columns = block_counts(value.shape[0], value.shape[1], spec)
    six = torch.full((rows, columns), 6, dtype=torch.int8, device=value.device)
    differs = F.pad(value != made(Memory(six, 1.0)), (0, columns * spec.block[1] - value.shape[1]))
    differs = F.pad(differs, (0, 0, 0, rows * spec.block[0] - value.shape[0]))
    return torch.where(differs.view(rows, spec.block[0], columns, spec.block[1]).any(3).any(1), 4, six)


def _remember_choice(master: Master, spec: QuantSpec) -> None:
    """Give the layer the memory of its blocks' choices."""
    if master.tensor.numel() != master.layer.weight.numel():
        raise ConfigError(
            f"{master.name}: hysteresis keeps a choice for every block of the layer, and this process holds a shard: "
            f"{KEY}.hysteresis=0 would work"
        )
    master.layer.remember_choice(*block_counts(master.layer.out_features, master.layer.in_features, spec))
