"""The benchmark of two precisions or two devices runs, and its tables say what the runs' own rows say."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import rl_reward
import rl_sides
from bench_rl import main
from rl_reward import smooth, table

from lowbit.configs.compose import compose_for
from lowbit.configs.overrides import RL
from lowbit.configs.schema_rl import RlConfig
from lowbit.errors import ConfigError
from lowbit.rl.precision import trainer_precision

QUICK = ["rl=quick", "device=cpu", "precision.compute=fp32", "task.examine=16"]


def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["bench_rl.py", arguments[0], str(tmp_path), *QUICK, *arguments[1:]])
    main()
    path = tmp_path / f"{arguments[0]}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """In place of training, what it leaves in a folder; the names of the folders in which something was trained."""
    names: list[str] = []

    def leave(folder: Path, rows: list[dict[str, Any]]) -> None:
        if not folder.is_dir():
            names.append(folder.name)
            (folder / "checkpoints" / "step_1").mkdir(parents=True)
            (folder / "checkpoints" / "step_1" / "model.safetensors").write_bytes(folder.name.encode())
            (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def train(config: RlConfig, folder: Path) -> None:
        bits = 16 if config.precision.sampler == "bf16" else 4
        reward = 0.01 * bits + 0.1 * config.seed
        steps = [{"step": i, "seconds": 2.0 * i, "reward": reward, "mismatch/k3_kl": 0.0} for i in range(1, 11)]
        leave(folder, [{"step": 0, "val_accuracy": 0.25}, *steps, {"step": 10, "val_accuracy": 0.5} | steps[-1]])

    monkeypatch.setattr(rl_reward, "train", train)
    monkeypatch.setattr(rl_sides, "execute", lambda _, folder, __: leave(folder, [{"step": 7}]))
    monkeypatch.setattr(rl_reward, "picture", lambda *_: None)
    monkeypatch.setattr("measure.where", dict)
    return names


@pytest.mark.slow
def test_two_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At staleness 0 a copy on another device changes no number; ahead, rollouts are a step old and do not match."""
    rows = bench(monkeypatch, tmp_path, "overlap", "max_steps=6", "--other", "cpu")["rows"]
    assert [(row["sampler"], row["staleness"]) for row in rows] == [
        ("trainer's", 0), ("cpu", 0), ("trainer's", 1), ("cpu", 1)
    ]  # fmt: skip
    assert rows[0]["k3"] == rows[1]["k3"] and rows[0]["reward"] == rows[1]["reward"]
    assert float(rows[0]["k3"]) < 1e-10 < float(rows[2]["k3"])
    assert [row["age"] for row in rows] == [0, 0, 1, 1]
    assert all(0 < row["seconds/step"] < 60 and row["drawn tokens/s"] > 0 for row in rows)


@pytest.mark.slow
def test_the_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampler agrees with its own trainer in FP32, and four bits with eight or sixteen do not."""
    cells = bench(monkeypatch, tmp_path, "mismatch", "--prompts", "2")["cells"]
    k3 = {(cell["sampler"], cell["trainer"]): cell["k3_kl"] for cell in cells}
    assert len(k3) == 25
    assert all(k3[name, name] < 1e-9 for name, _ in k3)
    assert min(k3["nvfp4", "bf16"], k3["bf16", "nvfp4"]) > 1e-4 > k3["nvfp4", "nvfp4"]
    assert (tmp_path / "mismatch.png").stat().st_size > 10_000


def test_curves_are_means_of_what_came_before() -> None:
    assert smooth([0.0, 1.0, 2.0, 3.0], 2) == [0.0, 0.5, 1.5, 2.5]


def test_calls_fill_one_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A call makes what the file lacks and nothing else; the table is of all, whichever call made it."""
    bench(monkeypatch, tmp_path, "start")
    assert made == ["start"]
    first = ("reward", "--pairs", "bf16/bf16", "--seeds", "1", "--corrections", "tis")
    assert len(bench(monkeypatch, tmp_path, *first)["runs"]) == 1
    assert made == ["start", "bf16-bf16-tis-1"]
    bench(monkeypatch, tmp_path, *first)
    more = ("reward", "--pairs", "bf16/bf16", "nvfp4/nvfp4", "--seeds", "1", "2", "--corrections", "tis")
    bench(monkeypatch, tmp_path, *more)
    assert made[2:] == ["nvfp4-nvfp4-tis-1", "bf16-bf16-tis-2", "nvfp4-nvfp4-tis-2"]
    capsys.readouterr()
    runs = bench(monkeypatch, tmp_path, "reward", "--table")["runs"]
    assert len(made) == 5 and len(runs) == 4 and len({run["start"] for run in runs}) == 1
    assert all(run["start_steps"] == 7 and run["seconds"] == 18 for run in runs)
    printed = capsys.readouterr().out
    assert "0.310 +- 0.071" in printed and "-0.120 +- 0.000" in printed and "cannot be compared" not in printed


def test_a_file_of_other_settings_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: list[str]) -> None:
    one = ("--pairs", "bf16/bf16", "--seeds", "1", "--corrections", "tis")
    bench(monkeypatch, tmp_path, "reward", *one)
    with pytest.raises(ConfigError, match=r"reward\.json has runs with .*precision\.compute=fp32"):
        bench(monkeypatch, tmp_path, "reward", "max_steps=3", *one)
    with pytest.raises(ConfigError, match="has runs with"):
        bench(monkeypatch, tmp_path, "reward", "--own-start", *one)


def test_starts_of_their_own_are_a_seed_s_and_a_precision_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: list[str]
) -> None:
    pairs = ("--pairs", "bf16/bf16", "nvfp4_w4a16", "--corrections", "tis")
    bench(monkeypatch, tmp_path, "reward", "--own-start", "--seeds", "2", "3", *pairs)
    assert [name for name in made if name.startswith("start")] == [
        "start-bf16-2", "start-nvfp4_w4a16-2", "start-bf16-3", "start-nvfp4_w4a16-3"
    ]  # fmt: skip


def test_starts_that_differ_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A start that was made anew, on another machine for example, is not the one that earlier runs had."""
    one = ("reward", "--pairs", "bf16/bf16", "--corrections", "tis")
    bench(monkeypatch, tmp_path, *one, "--seeds", "1")
    (tmp_path / "start" / "checkpoints" / "step_1" / "model.safetensors").write_bytes(b"another")
    bench(monkeypatch, tmp_path, *one, "--seeds", "2")
    assert "cannot be compared: they begin with 2 different starts" in capsys.readouterr().out


def test_differences_are_from_runs_with_the_same_seeds() -> None:
    def run(pair: str, seed: int, reward: float) -> dict[str, Any]:
        shared = {"correction": "tis", "k3_kl": 0.0, "steps": 5 * seed, "seconds": 1.0, "first_accuracy": 0.5}
        return shared | {"pair": pair, "seed": seed, "reward": reward, "accuracy": reward}

    rows = table([run("a/a", 1, 0.5), run("a/a", 2, 0.7), run("b/a", 2, 0.6), run("b/a", 3, 0.1)])
    assert [row["reward - first"] for row in rows] == ["0.000 +- 0.000", "-0.100 +- 0.000"]
    assert [row["steps"] for row in rows] == ["5 to 10", "10 to 15"]


def test_both_sides_keep_rules() -> None:
    """Of the settings as of a preset: a pair's name says which numbers, not which layers."""
    overrides = ["rl=quick", "precision.compute=fp32", "precision.rules=[{match: '.*up', policy: bf16}]"]
    config = rl_sides.with_sides(compose_for(RL, overrides), overrides, "nvfp4/bf16")
    assert (config.precision.sampler, config.precision.trainer) == ("nvfp4", "trainer_side")
    assert [rule.match for rule in trainer_precision(config.precision).rules] == [".*up"]
    preset = rl_sides.with_sides(compose_for(RL, overrides), overrides[:2], "nvfp4_w4a16")
    assert preset.precision.compute == config.precision.compute
    assert trainer_precision(preset.precision).forward == "nvfp4_w4a16"


@pytest.mark.slow
def test_rewards_of_two_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of few steps from one start, which every pair reads in its own precision; then nothing is left to do."""
    wanted = ("max_steps=3", "--pairs", "bf16/bf16", "nvfp4", "--seeds", "1")
    runs = bench(monkeypatch, tmp_path, "reward", *wanted, "--corrections", "tis")["runs"]
    assert [(run["pair"], run["steps"]) for run in runs] == [("bf16/bf16", 3), ("nvfp4", 3)]
    assert len({run["start"] for run in runs}) == 1 and all(run["start_steps"] == 40 for run in runs)
    assert all(run["k3_kl"] < 1e-6 and 0 <= run["reward"] <= 1 for run in runs)
    assert (tmp_path / "reward.png").stat().st_size > 10_000
    again = bench(monkeypatch, tmp_path, "reward", *wanted, "--corrections", "tis")["runs"]
    assert again == runs


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("--staleness", "-1"), "rollout.staleness=-1"),
        (("deterministic=true",), "deterministic=true"),
        (("--other", "cuda:99"), "--other=cuda:99"),
        (("max_steps=3",), "max_steps=3"),
    ],
)
def test_overlap_checks_all_of_its_runs_before_the_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, made: list[str], given: tuple[str, ...], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        bench(monkeypatch, tmp_path, "overlap", *(given if "--other" in given else ("--other", "cpu", *given)))
    assert made == [] and list(tmp_path.iterdir()) == []


def test_overlap_does_not_pass_off_runs_that_are_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, made: list[str]
) -> None:
    (tmp_path / "same-0").mkdir()
    with pytest.raises(ConfigError, match=r"same-0 is there already.*give another OUT"):
        bench(monkeypatch, tmp_path, "overlap", "max_steps=8", "--other", "cpu")
    assert made == []
