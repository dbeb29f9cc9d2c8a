"""What the benchmarks share: how a time is taken, how rows are printed, and what a file says beside its figures.

A figure counts only with its hardware, versions and commit (docs/RESULTS.md), so `write` puts them into every file.
"""

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lowbit.errors import LowbitError

Row = dict[str, Any]


def wall_seconds(work: Callable[[], object], device: torch.device, repeats: int = 5, warm_up: int = 2) -> float:
    """Median time of a call by the clock on the wall, the device's work included."""
    times = []
    for turn in range(warm_up + repeats):
        _wait(device)
        start = time.perf_counter()
        kept = work()  # until the clock is read: freeing a result is not part of the call
        _wait(device)
        if turn >= warm_up:
            times.append(time.perf_counter() - start)
        del kept
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def gpu_seconds(work: Callable[[], object], repeats: int = 20, warm_up: int = 3) -> float:
    """Median time of a call on the GPU, between two events; caches are cold for anything larger than they are."""
    for _ in range(warm_up):
        work()
    times: list[float] = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return statistics.median(times)


def show_kernels(run: Callable[[], object], count: int) -> None:
    """Print the kernels of a call that take longest on the GPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    for event in events[:count]:
        print(f"  {event.self_device_time_total / 1e3:8.2f} ms {event.count:5d} times  {event.key[:90]}")


def told(main: Callable[[], object]) -> None:
    """Run a script; an error that names what to do is one line."""
    try:
        main()
    except LowbitError as error:
        raise SystemExit(f"{Path(sys.argv[0]).stem}: {error}") from None


def print_table(rows: list[Row]) -> None:
    """Rows as aligned text, numbers to the right; a new heading where the columns change."""
    heading: list[str] = []
    for row in rows:
        if list(row) != heading:
            heading = list(row)
            same = [r for r in rows if list(r) == heading]
            widths = [max(len(key), *(len(_text(r[key])) for r in same)) for key in heading]
            print("\n" + "  ".join(_cell(key, row[key], w) for key, w in zip(heading, widths, strict=True)).rstrip())
        cells = (_cell(_text(row[key]), row[key], w) for key, w in zip(heading, widths, strict=True))
        print("  ".join(cells).rstrip())


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cell(text: str, value: object, width: int) -> str:
    return text.rjust(width) if isinstance(value, (int, float)) else text.ljust(width)


def where() -> dict[str, str]:
    """Commit, versions and hardware that figures belong to; a commit with changes on top of it ends in `+`."""
    root = Path(__file__).parent
    commit = _git(root, "rev-parse", "--short", "HEAD")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {"commit": f"{commit}+" if changed else commit, "torch": torch.__version__, "device": device}


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True).stdout.strip()


def write(path: Path, found: dict[str, Any]) -> None:
    """Figures as JSON, with where they were measured."""
    path.write_text(json.dumps(where() | found, indent=1) + "\n", encoding="utf-8")
