"""The page: well-formed, of one file, its numbers those of metrics.jsonl, nothing injected, small and quick."""

import itertools
import json
import os
import platform
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
from report_runs import Page, optimised, pretraining, rollouts, write_run

from lowbit.configs.schema_pipeline import Stage
from lowbit.errors import LowbitError
from lowbit.pipeline.manifest import Manifest, Record, State
from lowbit.pipeline.manifest import write as write_manifest
from lowbit.trainer.lock import RunLock
from lowbit.trainer.report import failed_jobs, full_report, read_runs, sweep_report, write_page
from lowbit.trainer.report.chart import HEIGHT, INNER, LEFT, WIDTH

REPORTS = [
    {
        "when": "from the start", "change": "", "dtype": "bf16", "device": "CPU", "remarks": [["blocks.0", "why"]],
        "rows": [{"layers": "blocks.{0..2}", "count": 3, "product": "fprop", "operand": "X", "format": "NVFP4",
                  "bits": 4.75, "runs": "native", "note": "rotation 128", "backend": "te"}],
    }
]  # fmt: skip


def made(paths: list[Path], tmp_path: Path, **options: Any) -> tuple[str, Page]:
    html = write_page(paths, tmp_path / "page", **options).read_text(encoding="utf-8")
    return html, Page(html)


def independent(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]


def points_of(data: str) -> list[tuple[int, int]]:
    """The corners of a path that is one line, in tenths of a unit."""
    start, steps = re.fullmatch(r"M(\S+ \S+)l(.*)", data).groups()  # type: ignore[union-attr]
    points: list[tuple[int, int]] = [tuple(map(int, start.split()))]  # type: ignore[list-item]
    moves = list(map(int, re.findall(r"-?\d+", steps)))
    for dx, dy in zip(moves[::2], moves[1::2], strict=True):
        points.append((points[-1][0] + dx, points[-1][1] + dy))
    return points


def value_at(axis: str | None, place: float) -> float:
    """The value at a place between 0 and 1 of an axis as a chart describes it."""
    low, high, log = map(float, (axis or "").split())
    return low * (high / low) ** place if log else low + (high - low) * place


def in_a_plot(element: tuple[str, dict[str, str | None]]) -> bool:
    return element[0] == "path"


def test_one_file_that_needs_nothing_else(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a", pretraining()), write_run(tmp_path / "b", rollouts(), "rl")]
    html, page = made(runs, tmp_path)
    assert html.startswith("<!DOCTYPE html>") and {"html", "head", "body", "title", "style"} <= {
        n for n, _ in page.elements
    }
    loads = [
        (n, key) for n, attributes in page.elements for key in attributes if key in ("src", "srcset", "data", "action")
    ]
    assert not loads and not {"link", "img", "iframe", "object", "base", "form"} & {n for n, _ in page.elements}
    assert all((attributes["href"] or "").startswith("#") for attributes in page.all("a"))
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids)) and {a["href"] for a in page.all("a")} <= {f"#{name}" for name in ids}
    assert not re.search(r"https?://|@import|url\(", html)
    assert any("default-src 'none'" in (a.get("content") or "") for a in page.all("meta"))
    assert "prefers-color-scheme: dark" in html and "width=device-width" in html


def test_the_tables_numbers_are_those_of_the_file(tmp_path: Path) -> None:
    run = write_run(tmp_path / "only", pretraining(), max_steps=60)
    rows = independent(run)
    _, page = made([run], tmp_path)
    words = page.words().splitlines()
    bpb = [row["val_bpb"] for row in rows if "val_bpb" in row]
    expected = [
        "60", "60,000", f"{rows[-1]['loss']:.4f}", f"{min(bpb):.4f}", f"{bpb[-1]:.4f}",
        f"{statistics.median(row['tokens_per_second'] for row in rows):,.0f}", "finished",
    ]  # fmt: skip
    assert all(number in words for number in expected), expected
    assert f"{60_000 / 150:,.0f}" in words, "tokens over all seconds"
    assert "4 MB" in words and "360 MB" in words, "bytes a step, and of 60 steps"
    errors = [v for k, v in rows[-1].items() if k.endswith("weight/relative_mse")]
    assert f"{statistics.fmean(errors):.5g}" in words


@pytest.mark.parametrize("key", ["loss", "grad_norm"])
def test_a_curve_shows_the_files_values(tmp_path: Path, key: str) -> None:
    """Path data turned back into numbers by the axes that the chart says it has; one of them is logarithmic."""
    run = write_run(tmp_path / "only", pretraining())
    _, page = made([run], tmp_path)
    at = next(i for i, (name, a) in enumerate(page.elements) if name == "path" and a.get("data-label") == key)
    axes = next(a for name, a in reversed(page.elements[:at]) if a.get("class") == "plot")
    found = [
        (value_at(axes["data-x"], x / 10 / INNER[0]), value_at(axes["data-y"], 1 - y / 10 / INNER[1]))
        for x, y in points_of(page.elements[at][1]["d"] or "")
    ]
    rows = independent(run)
    assert (axes["data-y"] or "")[-1] == ("1" if key == "grad_norm" else "0")
    assert [x for x, _ in found] == pytest.approx([row["tokens"] for row in rows], abs=20)
    assert [y for _, y in found] == pytest.approx([row[key] for row in rows], rel=2e-2, abs=2e-3)


def test_all_parts_for_all_kinds(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", pretraining(), optim=optimised(3e-4))
    two = write_run(tmp_path / "two", rollouts(), "rl")
    three = write_run(tmp_path / "three", [row | {"kl": 0.3} for row in pretraining(20)], "distill")
    (one / "precision.json").write_text(json.dumps(REPORTS))
    sample = {"step": 3, "prompt": "1+1=", "turns": ["2", "3"], "answer": "2", "reward": 1.0, "finish": "stop"}
    (two / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    html, page = made([one, two, three], tmp_path)
    titles = {text for tag, text in page.text if tag == "h2"}
    assert titles == {
        "What was learned", "Optimisation", "Speed", "Precision", "Format error", "Sampler against trainer", "Rollouts",
        "Bytes on the wire", "Experts and attention", "Samples", "Settings", "Other metrics",
    }  # fmt: skip
    charts = {text for tag, text in page.text if tag == "b"}
    assert {"loss", "kl", "reward", "entropy", "validation bits per byte", "gradient norm", "learning rate", "my/own",
            "weight: relative error by layer", "load of experts by layer"} <= charts  # fmt: skip
    words = page.words()
    assert "The same all the time: " in words and "how answers end (finish/stop) 1" in words, "no chart of one value"
    for text in (
        "blocks.{0..2}",
        "NVFP4",
        "native (te)",
        "why",
        "1+1=",
        "reward 1, answer 2, finish stop",
        "optim.lr",
        "0.0003",
    ):
        assert text in words, text
    assert not any("k3_kl_se" in (a.get("data-label") or "") for a in page.all("path"))
    assert html.count("<svg") > 30


HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>'
"""Closes an attribute and an element, and would run."""


def test_nothing_can_be_injected(tmp_path: Path) -> None:
    """Names of folders and metrics, samples, settings, reports and outcomes from outside are text."""
    sweep = tmp_path / "sweep"
    rows = [
        row | {HOSTILE: 1.0, f"quant/{HOSTILE.replace('/', '')}/weight/relative_mse": 0.1} for row in pretraining(12)
    ]
    evil = write_run(sweep / HOSTILE.replace("/", ""), rows)
    config = (evil / "config.yaml").read_text().replace("run_name: ", "run_name: 'x</td><script>alert(3)</script>' #")
    (evil / "config.yaml").write_text(config.replace("name: custom", f"name: '{HOSTILE}'"))
    (evil / "samples.jsonl").write_text(
        json.dumps({"step": HOSTILE, "prompt": "</pre>" + HOSTILE, "turns": [HOSTILE, "\x00\ud800"]})
    )
    (evil / "precision.json").write_text(json.dumps(REPORTS).replace("rotation 128", json.dumps(HOSTILE)[1:-1]))
    (evil / "outcome.json").write_text(json.dumps({"job": 0, "settings": [HOSTILE], "exit_code": 1, "error": HOSTILE}))
    write_run(sweep / "1", pretraining(12))
    html, page = made([sweep], tmp_path)
    assert len(page.all("script")) == 1 and not page.all("img")
    assert not [key for _, attributes in page.elements for key in attributes if key.startswith("on")]
    assert html.count("<script") == 1 and "\x00" not in html
    words = page.words()
    assert HOSTILE in words and "</pre>" + HOSTILE in words and "x</td><script>alert(3)</script>" in words
    assert {a.get("data-label") for a in page.all("path")} >= {f"{evil.name}"}
    assert f"Failed: job 0 ({HOSTILE}): {HOSTILE}" in words


def test_a_sweep_a_running_one_and_damage(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    for job in (10, 9, 2):
        write_run(sweep / str(job), pretraining(12), tail='{"step": 13, "loss": 0.0', max_steps=24)
    lock = {"pid": os.getpid(), "host": platform.node(), "started": "now"}
    (sweep / "10" / "lock").write_text(json.dumps(lock))  # left by a killed run, whose number a living process has now
    (sweep / "2" / "config.yaml").write_text("nonsense: [")
    (sweep / "2" / "precision.json").write_text("[1, 2")
    (sweep / "11").mkdir()
    (sweep / "11" / "outcome.json").write_text(
        '{"job": 11, "settings": ["seed=3"], "exit_code": 1, "error": "loss is nan"}'
    )
    runs = read_runs([sweep])
    assert [run.name for run in runs] == ["2", "9", "10"]
    assert [run.last("step") for run in runs] == [12, 12, 12]
    with RunLock(sweep / "9"):
        (sweep / "9" / "lock").write_text(json.dumps(lock | {"pid": 2**22 + 1}))  # the process of another container
        assert [run.state for run in runs] == ["unknown", "running at 50%", "stopped at 50%"]
    assert failed_jobs([sweep]) == ["job 11 (seed=3): loss is nan"]
    lines = sweep_report(sweep, [sweep / "9", sweep / "10", sweep / "11"])
    assert [line.split()[0] for line in lines[0].splitlines()] == ["run", "9", "10"]
    assert lines[1:] == [f"report: {sweep}/report.html", f"curves: {sweep}/report.png"]
    words = Page((sweep / "report.html").read_text()).words()
    assert "Failed: job 11 (seed=3): loss is nan" in words
    _, page = made([sweep], tmp_path)
    assert "is not a YAML file" in page.words(), "what could not be read is said"
    assert sweep_report(sweep, [sweep / "11"]) == []


def test_damage_of_any_kind_does_not_end_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder named by a digit that is no number, remarks that are none; and an error that nobody thought of."""
    for name in ("²", "10", "9"):
        run = write_run(tmp_path / "sweep" / name, pretraining(3))
    assert [run.name for run in read_runs([tmp_path / "sweep"])] == ["9", "10", "²"]
    damaged = [REPORTS[0] | {"remarks": [5, ["blocks.1", "kept"], "no"]}, {"remarks": 5, "rows": 5}]
    (run / "precision.json").write_text(json.dumps(damaged))
    lines = sweep_report(tmp_path / "sweep", [run])
    assert [line.split(":")[0] for line in lines[1:]] == ["report", "curves"]
    assert "blocks.1: kept" in Page((tmp_path / "sweep" / "report.html").read_text()).words()

    def failing(*_: object) -> None:
        raise ZeroDivisionError("of two\nlines")

    monkeypatch.setattr("lowbit.trainer.report.draw_runs", failing)
    lines = sweep_report(tmp_path / "sweep", [run])
    assert lines[0].startswith("run ") and lines[1].startswith("report: "), "what was made is still said"
    assert lines[2:] == ["no report: ZeroDivisionError: of two lines"]


def test_pipelines_and_sweeps_of_them(tmp_path: Path) -> None:
    """The stages that the manifest names, in its order, not what lies beside them; through two levels of folders."""
    for job in ("0", "1"):
        manifest = Manifest()
        for stage, folder in ((Stage.pretrain, "pretrain"), (Stage.distill, "distill_2"), (Stage.rl, "rl")):
            write_run(tmp_path / "sweep" / job / folder, pretraining(3))
            record = Record(folder, State.done, {}, "", {}, "bf16")
            manifest = manifest.with_record(stage, record)
        write_run(tmp_path / "sweep" / job / "distill", pretraining(3))
        write_manifest(tmp_path / "sweep" / job, manifest)
    names = ["pretrain", "distill_2", "rl"]
    assert [run.name for run in read_runs([tmp_path / "sweep" / "0"])] == names
    assert [run.name for run in read_runs([tmp_path / "sweep"])] == [f"{job}/{name}" for job in "01" for name in names]
    (tmp_path / "sweep" / "1" / "pipeline.json").write_text('{"stages": {"rl": {"folder": "../../../etc"}, "x": 1}}')
    assert [run.folder.name for run in read_runs([tmp_path / "sweep"])] == names
    with pytest.raises(LowbitError, match="no such folder"):
        read_runs([tmp_path / "sweep" / "1" / "pretrain" / "none"])


def test_paths_and_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "a", pretraining(12))
    for out, page, picture in (
        ("x.pdf", "x.html", "x.pdf"),
        ("y.html", "y.html", "y.png"),
        ("z", "z.html", "z.png"),
        ("lr-0.5.html", "lr-0.5.html", "lr-0.5.png"),
    ):
        assert full_report([run], tmp_path / out)[1:] == [f"report: {tmp_path}/{page}", f"curves: {tmp_path}/{picture}"]
        assert (tmp_path / page).is_file() and (tmp_path / picture).is_file()
    with pytest.raises(LowbitError, match="no such folder"):
        write_page([tmp_path / "none"], tmp_path / "x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(LowbitError, match="no folder in it has one"):
        read_runs([tmp_path / "empty"])
    with pytest.raises(LowbitError, match="cannot write the report"):
        write_page([run], run / "metrics.jsonl" / "x")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert full_report([run], tmp_path / "w")[2].startswith("no picture: ") and (tmp_path / "w.html").is_file()


def test_other_axes_and_empty_runs(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", pretraining(12))
    for over, label in (("step", "steps"), ("hours", "hours"), (None, "tokens")):
        _, page = made([run], tmp_path, over=over)
        assert label in {text for tag, text in page.text if tag == "text"}
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "metrics.jsonl").write_text("\x00\n[1]\n")
    html, _ = made([bare], tmp_path)
    assert "bare" in html
    made([run, bare, write_run(tmp_path / "c", [{"step": 1, "loss": None}, {"step": 2, "loss": 1.0}])], tmp_path)


def test_size_is_bounded(tmp_path: Path) -> None:
    """Eight runs of fifteen curves of 10,000 points each; spikes of a single step are kept."""
    rows = [
        {"step": s, "tokens": s, "seconds": s, **{f"m{k}": (s * (k + 7919)) % 104729 / 1e4 for k in range(15)}}
        for s in range(10_000)
    ]
    rows[5_432]["m3"] = 1e6
    runs = [write_run(tmp_path / str(i), rows) for i in range(2)]
    html, page = made(runs * 4, tmp_path)
    assert len(html) < 2_000_000, len(html)
    begin = next(
        i for i, (_, a) in enumerate(page.elements) if "data-y" in a and float((a["data-y"] or "").split()[1]) >= 1e6
    )
    axes, lines = page.elements[begin][1], [a for _, a in itertools.takewhile(in_a_plot, page.elements[begin + 1 :])]
    thin = [points_of(a["d"] or "") for a in lines if "data-label" not in a]
    assert len(thin) == 8 == len(lines) - 8, "a pale line for each of the eight, and its means"
    for points in thin:
        x, y = min(points, key=lambda point: point[1])
        assert value_at(axes["data-x"], x / 10 / INNER[0]) == pytest.approx(5_432, abs=20)
        assert value_at(axes["data-y"], 1 - y / 10 / INNER[1]) == pytest.approx(1e6, rel=2e-3)


def test_the_script_knows_the_charts_measures() -> None:
    script = (Path(write_page.__code__.co_filename).parent / "page.js").read_text()
    assert f"LEFT = {LEFT}, WIDTH = {INNER[0]}, TOP = 8, HEIGHT = {INNER[1]}" in script
    assert f"* {WIDTH} - LEFT" in script and INNER[1] == HEIGHT - 8 - 36
