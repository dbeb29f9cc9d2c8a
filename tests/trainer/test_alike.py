"""Ranks that would multiply differently are found out before the first step."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lowbit.configs.schema import ComputeDtype, MatrixBackend, PrecisionConfig, PrecisionSwitch, RunConfig
from lowbit.errors import ConfigError
from lowbit.models.transformer import Transformer
from lowbit.quant.apply import report_policy
from lowbit.quant.backends import fp8, selftest
from lowbit.quant.backends.base import Device
from lowbit.quant.backends.choose import Chooser
from lowbit.quant.resolve import resolve
from lowbit.trainer.alike import require_alike
from lowbit.trainer.distributed import Ranks
from lowbit.trainer.run import pretrain_on

H200 = Device("cuda", (9, 0), (13, 0), "NVIDIA H200")
FP8 = PrecisionConfig(compute=ComputeDtype.fp32, forward="fp8_row", backward="fp8_row")


class Two(Ranks):
    """Two ranks, of which this process is the first; the other answers `theirs`."""

    def __init__(self, theirs: Any = None) -> None:
        super().__init__()
        self.theirs, self.asked = theirs, 0

    def gather(self, value: Any) -> list[Any]:
        if not isinstance(value, list):
            return [value]
        self.asked += 1
        return [value, self.theirs(deepcopy(value))]


def reports(config: RunConfig, device: Device, target: torch.device | None = None) -> list[dict[str, Any]]:
    chooser = Chooser(device, torch.bfloat16, MatrixBackend.auto, target)
    with torch.device("meta"):
        model = Transformer(config.model, 60)
    made = report_policy(model, resolve(FP8), dtype="bf16", device=device.name, chooser=chooser)
    return [{"when": "from the start", "change": ""} | made.as_dict()]


def test_a_rank_whose_check_fails_is_an_error_that_says_which_and_why(
    tiny_run: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy = reports(tiny_run, H200)
    require_alike(Two(lambda mine: mine), healthy)

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(fp8.Fp8, "multiply", broken)
    selftest.check.cache_clear()
    ill = reports(tiny_run, H200, torch.device("cpu"))
    selftest.check.cache_clear()
    for mine, theirs in ((healthy, ill), (ill, healthy)):
        with pytest.raises(ConfigError, match=r"rank 1 would compute otherwise than rank 0: blocks\.\{") as caught:
            require_alike(Two(lambda _, theirs=theirs: theirs), mine)
        assert "fprop FP8_ROW" in str(caught.value) and "native by fp8" in str(caught.value)
        assert "failed its start-up check: RuntimeError: no kernel image" in str(caught.value)
        assert "precision.backend=emulated" in str(caught.value) and "\n" not in str(caught.value)


def test_names_of_devices_do_not_matter(tiny_run: RunConfig) -> None:
    require_alike(Two(lambda _: reports(tiny_run, replace(H200, name="NVIDIA H100"))), reports(tiny_run, H200))


@pytest.mark.parametrize("when", [0, 1])
def test_a_run_asks_before_its_first_step(tiny_run: RunConfig, tmp_path: Path, when: int) -> None:
    """About every policy that it will come to."""
    switch = [PrecisionSwitch(at=0.5, forward="mxfp8")]
    config = replace(tiny_run, max_steps=2, precision=replace(FP8, switch=switch))

    def theirs(mine: Any) -> Any:
        mine[when]["rows"][0]["backend"] = "fp8"
        return mine

    ranks = Two(theirs)
    with pytest.raises(ConfigError, match="rank 1 would compute otherwise"):
        pretrain_on(config, tmp_path / "run", ranks, torch.device("cpu"))
    assert ranks.asked == 1 and not (tmp_path / "run/metrics.jsonl").exists()
