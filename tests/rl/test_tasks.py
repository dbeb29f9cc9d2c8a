"""Tasks: problems are addressed, splits never meet, checks decide as a person would; files of every format."""

import json
import sys
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

from lowbit.configs.schema_rl import TaskConfig, TaskKind
from lowbit.errors import ConfigError, DataError
from lowbit.rl.tasks import Example, Split, fingerprint, make_task
from lowbit.rl.tasks.answers import final_answer, last_boxed, number, same_answer
from lowbit.rl.tasks.arithmetic import ArithmeticMistake, evaluate
from lowbit.rl.tasks.base import is_held_out

GENERATED = [TaskKind.add, TaskKind.sort, TaskKind.reverse, TaskKind.countdown, TaskKind.calculator]


@pytest.mark.parametrize("kind", GENERATED)
def test_solutions_are_right_and_problems_are_addressed(kind: TaskKind) -> None:
    task = make_task(TaskConfig(kind=kind, size=3))
    for n in range(30):
        example = task.example(Split.train, 7, n)
        assert example == task.example(Split.train, 7, n), "the same number is the same problem"
        assert sum(task.check(example.solution, example).values()) == 1.0
        assert sum(task.check(["0?"], example).values()) < 1.0
        assert Example.of(json.loads(json.dumps(example.as_dict()))) == example
    assert task.example(Split.train, 7, 0) != task.example(Split.train, 8, 0), "the seed changes the problems"
    assert task.size(Split.train) is None
    assert fingerprint(task) != fingerprint(make_task(TaskConfig(kind=kind, size=4)))


@pytest.mark.parametrize("kind", GENERATED)
def test_no_held_out_problem_is_ever_trained_on(kind: TaskKind) -> None:
    task = make_task(TaskConfig(kind=kind, size=2, held_out=0.2))
    trained = {task.example(Split.train, seed, n).prompt for seed in (1, 2) for n in range(200)}
    held = {task.example(Split.held_out, 1, n).prompt for n in range(200)}
    assert not trained & held
    assert all(is_held_out(prompt, 0.2) for prompt in held)


def test_a_task_too_small_for_two_splits() -> None:
    with pytest.raises(ConfigError, match=r"task.size=1 .*too few problems"):
        make_task(TaskConfig(kind=TaskKind.sort, size=1, held_out=1e-6)).example(Split.held_out, 1, 0)


def test_add() -> None:
    task = make_task(TaskConfig(size=2))
    example = Example("07+45=", "052", ("052",))
    assert task.check(["052"], example) == {"correct": 1.0} and task.check(["52"], example) == {"correct": 0.0}
    assert task.check([" 052 "], example) == {"correct": 1.0}
    assert task.reply(["052"], example) is None


def test_countdown() -> None:
    task = make_task(TaskConfig(kind=TaskKind.countdown, size=3))
    example = Example("", {"target": 28, "numbers": [3, 7, 7]})
    for text, reward in (
        ("7*(7-3)", 1.0),
        ("7 * ( 7 - 3 ) = 28", 1.0),
        ("7*3+7", 1.0),
        ("7+7+3", 0.1),
        ("7*4", 0.0),
        ("28", 0.0),
        ("__import__('os')", 0.0),
        ("7**7", 0.0),
        ("", 0.0),
    ):
        assert sum(task.check([text], example).values()) == pytest.approx(reward), text


def test_calculator() -> None:
    task = make_task(TaskConfig(kind=TaskKind.calculator, size=2, turns=2))
    example = task.example(Split.train, 1, 0)
    asked, answer = example.solution
    assert task.reply([asked], example) == f"{answer};"
    assert task.reply([asked, answer], example) is None
    assert task.reply(["?3/0"], example) == "division by zero;"
    assert task.check([asked, answer], example) == {"correct": 1.0}


def test_arithmetic_against_python() -> None:
    """Random expressions, with integers as Python computes them; the eval is of this test's own text."""
    random = Random(5)

    def expression(depth: int) -> str:
        if depth == 0 or random.random() < 0.3:
            return str(random.randint(0, 99))
        inner = f"{expression(depth - 1)}{random.choice('+-*')}{expression(depth - 1)}"
        return random.choice([f"({inner})", inner, f"-({inner})"])

    for _ in range(300):
        text = expression(3)
        assert evaluate(text)[0] == eval(text)
    assert evaluate("7/2/2")[0] * 4 == 7 and evaluate("2*(3 + 4)")[1] == [2, 3, 4]


@pytest.mark.parametrize(
    "text", ["", "1+", "(1", "1)", "2**9", "a", "1/0", "1/(2-2)", "9" * 300, "(" * 40 + "1" + ")" * 40, "1e9", "9" * 40]
)
def test_arithmetic_refuses(text: str) -> None:
    with pytest.raises(ArithmeticMistake):
        evaluate(text)


def test_answers() -> None:
    assert last_boxed(r"so \boxed{1} or \boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert last_boxed(r"\boxed{1") is None
    assert final_answer("It is 3, then 4.") == "4" and final_answer("none") is None
    for text, gold, same in (
        ("#### 1,234", "1234", True),
        ("the answer is -1,234", "-1,234", True),
        ("1234", "-1234", False),
        ("$72.00", "72", True),
        (r"\boxed{\frac{3}{4}}", "0.75", True),
        (r"\boxed{\$5}", "5", True),
        ("no idea", "5", False),
        (r"\boxed{x+1}", "x+1", True),
    ):
        assert same_answer(text, gold) is same, text
    assert number("1/0") is None and number("1.5") is not None and number("x") is None


def test_formulas_by_math_verify() -> None:
    pytest.importorskip("math_verify")
    assert same_answer(r"\boxed{1+x}", "x+1") and not same_answer(r"\boxed{2+x}", "x+1")


ROWS = {
    "gsm8k": {"question": "How many?", "answer": "Count.\n#### 1,072"},
    "math": {"problem": "Half?", "solution": r"It is $\boxed{\frac{1}{2}}$.", "level": "1"},
    "verl": {"prompt": [{"role": "user", "content": "Sum?"}], "reward_model": {"style": "rule", "ground_truth": "7"}},
    "plain": {"prompt": "2+2", "answer": 4},
}


def test_every_format(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS.values()) * 1 + "\n\n")
    (tmp_path / "held.jsonl").write_text(json.dumps(ROWS["plain"]))
    task = make_task(TaskConfig(kind=TaskKind.file, path=str(path), held_out_path=str(tmp_path / "held.jsonl")))
    assert task.size(Split.train) == 4 and task.size(Split.held_out) == 1
    found = {e.prompt: e for e in (task.example(Split.train, 1, n) for n in range(4))}
    assert {p: e.answer for p, e in found.items()} == {
        "How many?": "1,072", "Half?": r"\frac{1}{2}", "Sum?": "7", "2+2": "4",
    }  # fmt: skip
    for example in found.values():
        assert task.check([rf"\boxed{{{example.answer}}}"], example) == {"correct": 1.0}
    first, again = ([task.example(Split.train, 1, n).prompt for n in range(k, k + 4)] for k in (0, 4))
    assert sorted(first) == sorted(again), "every pass has all problems"


def test_parquet(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    rows = [
        {"prompt": [{"role": "user", "content": f"q{i}"}], "reward_model": {"ground_truth": str(i)}} for i in range(40)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    task = make_task(TaskConfig(kind=TaskKind.file, path=str(tmp_path / "p.parquet"), held_out=0.2))
    sizes = task.size(Split.train), task.size(Split.held_out)
    assert sum(size or 0 for size in sizes) == 40 and all(sizes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"question": "a", "answer": "1"}\n{"question": "a"}', "row 2: a problem needs an answer.*it has question"),
        ('{"answer": "1"}', "row 1: a problem needs a prompt"),
        ('{"prompt": "", "answer": "1"}', "a problem needs a prompt"),
        ('{"problem": "a", "solution": "no box"}', r"needs its answer in .boxed"),
        ("nonsense", "row 1 is not JSON"),
        ("", "has no problems"),
        ('{"prompt": [{"role": "user"}], "answer": "1"}', "row 1: content"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "p.jsonl").write_text(text)
    task = make_task(TaskConfig(kind=TaskKind.file, path=str(tmp_path / "p.jsonl")))
    with pytest.raises(DataError, match=message):
        task.example(Split.train, 1, 0)


@pytest.mark.parametrize("dataset", ["chain_sum", "spell_backward", "gcd", "number_sorting"])
def test_reasoning_gym(dataset: str) -> None:
    pytest.importorskip("reasoning_gym")
    config = TaskConfig(kind=TaskKind.reasoning_gym, dataset=dataset)
    task, again = make_task(config), make_task(config)
    example = task.example(Split.train, 1, 3)
    assert again.example(Split.train, 1, 3) == example != again.example(Split.train, 1, 4)
    assert task.check(list(example.solution), example) == {"score": 1.0}
    assert again.check(["no idea"], example)["score"] < 0.5
    with pytest.raises(ConfigError, match=r"task.dataset=nope"):
        make_task(TaskConfig(kind=TaskKind.reasoning_gym, dataset="nope"))


class FewProblems:
    """What reasoning-gym gives: sums of two digits, again and again."""

    def __getitem__(self, number: int) -> dict[str, str]:
        a, b = number // 10 % 10, number % 10
        return {"question": f"{a}+{b}=", "answer": str(a + b)}

    def score_answer(self, answer: str, entry: dict[str, str]) -> float:
        return float(answer == entry["answer"])


def test_no_problem_of_a_small_generator_is_in_both_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package in place of reasoning-gym, which need not be there: a hundred problems under a million numbers."""
    made = SimpleNamespace(create_dataset=lambda name, size, seed: FewProblems())
    monkeypatch.setitem(sys.modules, "reasoning_gym", made)
    task = make_task(TaskConfig(kind=TaskKind.reasoning_gym, dataset="sums", held_out=0.2))
    seen = {
        split: {task.example(split, seed, number).prompt for seed in (1, 2) for number in range(300)} for split in Split
    }
    assert not seen[Split.train] & seen[Split.held_out]
    assert len(seen[Split.train] | seen[Split.held_out]) == 100 and len(seen[Split.held_out]) >= 10
    example = task.example(Split.held_out, 1, 0)
    assert task.check([f" {example.solution[0]}\n"], example) == {"score": 1.0}
    assert task.check(["no"], example) == {"score": 0.0}
    config = TaskConfig(kind=TaskKind.reasoning_gym, dataset="sums", held_out=1e-9)
    with pytest.raises(ConfigError, match="none for a held_out split"):
        make_task(config).example(Split.held_out, 1, 0)
