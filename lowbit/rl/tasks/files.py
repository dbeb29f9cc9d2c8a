"""Problems from local .jsonl and .parquet files, in the formats that data sets of problems come in.

    verl     {"prompt": [{"role", "content"}, ...], "reward_model": {"ground_truth": ...}}
    GSM8K    {"question", "answer": "... #### 72"}
    MATH     {"problem", "solution": "... \\boxed{...}"} (or with an "answer" beside it)
    plain    {"prompt" or "question" or "problem", "answer"}

Each row is looked at by itself. A row that fits none of them is an error that names file, row and what it has.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

from lowbit.errors import DataError
from lowbit.rl.tasks.answers import final_answer, last_boxed, same_answer
from lowbit.rl.tasks.base import Example, Split, is_held_out


class FileTask:
    """Problems of a file; the order is shuffled anew in every pass."""

    def __init__(self, path: str, held_out_path: str, held_out: float) -> None:
        self._path, self._held_out_path, self._share = path, held_out_path, held_out

    @cached_property
    def _problems(self) -> dict[Split, list[Example]]:
        """Read when a problem is asked for: checks need none."""
        rows = read_problems(Path(self._path).expanduser())
        if self._held_out_path:
            splits = {Split.train: rows, Split.held_out: read_problems(Path(self._held_out_path).expanduser())}
        else:
            held = [is_held_out(row.prompt, self._share) for row in rows]
            splits = {
                Split.train: [row for row, out in zip(rows, held, strict=True) if not out],
                Split.held_out: [row for row, out in zip(rows, held, strict=True) if out],
            }
        for split, found in splits.items():
            if not found:
                raise DataError(
                    f"{self._path}: no problems are left for the {split} split of {len(rows)}: give more, or set "
                    "task.held_out_path"
                )
        return splits

    def size(self, split: Split) -> int | None:
        """See `Task.size`."""
        return len(self._problems[split])

    def example(self, split: Split, seed: int, number: int) -> Example:
        """See `Task.example`."""
        problems = self._problems[split]
        if split is Split.held_out:
            return problems[number % len(problems)]
        epoch, place = divmod(number, len(problems))
        return problems[self._order(seed, epoch)[place]]

    def _order(self, seed: int, epoch: int) -> list[int]:
        if getattr(self, "_shuffled", None) is None or self._shuffled[0] != (seed, epoch):
            order = list(range(len(self._problems[Split.train])))
            Random(f"problems:{seed}:{epoch}").shuffle(order)
            self._shuffled: tuple[tuple[int, int], list[int]] = ((seed, epoch), order)
        return self._shuffled[1]

    def check(self, turns: Sequence[str], example: Example) -> dict[str, float]:
        """See `Task.check`."""
        return {"correct": float(same_answer(turns[-1], str(example.answer)))}

    def reply(self, turns: Sequence[str], example: Example) -> str | None:
        """See `Task.reply`."""
        return None

    def describe(self) -> dict[str, Any]:
        """See `Task.describe`."""
        content = hashlib.sha256()
        for split in Split:
            for row in self._problems[split]:
                content.update(json.dumps([row.prompt, row.answer]).encode())
        return {
            "task": "file",
            "content": content.hexdigest(),
            "problems": len(self._problems[Split.train]),
            "held_out": len(self._problems[Split.held_out]),
        }


def read_problems(path: Path) -> list[Example]:
    """All problems of a file. Raises DataError, naming the row and what it lacks."""
    if not path.is_file():
        raise DataError(f"task.path={path}: no such file")
    found = []
    for number, row in _rows(path):
        try:
            found.append(example_of(row))
        except (KeyError, TypeError, ValueError) as problem:
            has = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
            raise DataError(
                f"{path}: row {number}: {problem.args[0] if problem.args else problem}; it has {has or 'nothing'}"
            ) from None
    if not found:
        raise DataError(f"{path} has no problems")
    return found


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        try:
            yield from enumerate(pq.read_table(path).to_pylist(), start=1)
        except Exception as error:
            raise DataError(f"{path} cannot be read as parquet: {str(error).splitlines()[0]}") from None
        return
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise DataError(f"{path}: row {number} is not JSON ({error})") from None


def example_of(row: dict[str, Any]) -> Example:
    """A row of any of the formats. Raises ValueError for one that fits none."""
    if not isinstance(row, dict):
        raise ValueError("a problem is an object with fields")
    prompt = next((row[key] for key in ("prompt", "question", "problem") if row.get(key)), None)
    if isinstance(prompt, list):
        prompt = "\n\n".join(str(message["content"]) for message in prompt)
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError("a problem needs a prompt, a question or a problem that is not empty")
    answer, solution = row.get("answer"), row.get("solution")
    truth = row.get("reward_model")
    if isinstance(truth, dict) and truth.get("ground_truth") is not None:
        return Example(prompt, str(truth["ground_truth"]).strip())
    if isinstance(answer, str) and "####" in answer:
        return Example(prompt, str(final_answer(answer)), (answer,))
    if answer is not None and str(answer).strip():
        known = (str(solution),) if isinstance(solution, str) and solution else (str(answer).strip(),)
        return Example(prompt, str(answer).strip(), known)
    if isinstance(solution, str):
        boxed = last_boxed(solution)
        if boxed is not None:
            return Example(prompt, boxed.strip(), (solution,))
        raise ValueError("a solution needs its answer in \\boxed{}")
    raise ValueError("a problem needs an answer, a solution, or reward_model.ground_truth")
