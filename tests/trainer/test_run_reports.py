"""What a run leaves for reports beside its metrics: what its layers got, over time, and its sample; and the report."""

import json
from dataclasses import replace
from pathlib import Path

from report_runs import Page

from lowbit.configs.schema import PrecisionConfig, RunConfig
from lowbit.configs.schema_precision import PrecisionSwitch, StatisticsConfig
from lowbit.trainer.jsonl import read_rows
from lowbit.trainer.report import full_report, read_runs
from lowbit.trainer.run import pretrain


def test_precision_samples_and_a_report_of_a_real_run(tiny_run: RunConfig, tmp_path: Path) -> None:
    precision = PrecisionConfig(
        name="mxfp8",
        forward="mxfp8",
        switch=[PrecisionSwitch(at=0.5, forward="bf16")],
        statistics=StatisticsConfig(every_steps=2),
    )
    config = replace(tiny_run, precision=precision, max_steps=4)
    result = pretrain(config, tmp_path / "run")
    start, later = json.loads((tmp_path / "run" / "precision.json").read_text())
    assert (start["when"], later["when"], later["change"]) == ("from the start", "at 50% of the run", "forward bf16")
    formats = [{row["format"] for row in got["rows"] if row["product"] == "fprop"} for got in (start, later)]
    assert formats == [{"MXFP8"}, {"FP32"}]
    [sample] = read_rows(tmp_path / "run" / "samples.jsonl")
    assert sample["step"] == 4 and sample["prompt"] + sample["turns"][0] == result.sample
    pretrain(config, tmp_path / "run")  # finished: says so, and samples again
    assert read_rows(tmp_path / "run" / "samples.jsonl") == [sample]
    pretrain(replace(config, max_steps=5), tmp_path / "run")
    assert [row["step"] for row in read_rows(tmp_path / "run" / "samples.jsonl")] == [4, 5]
    [run] = read_runs([tmp_path / "run"])
    assert run.state == "finished" and run.precision[0]["rows"] == start["rows"]
    full_report([tmp_path / "run"], tmp_path / "r")
    words = Page((tmp_path / "r.html").read_text()).words()
    for text in ("MXFP8", "at 50% of the run: forward bf16", sample["turns"][0].strip()[:3], "relative error by layer"):
        assert text in words, text
