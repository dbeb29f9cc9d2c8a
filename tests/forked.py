"""Python processes that begin with the large imports done: each is forked from a server that has made them once.

A fresh `python -m lowbit`, or a rank of it, spends five to nine CPU seconds on importing PyTorch and DeepSpeed, which
is most of what a test of a tiny run costs. The standard library's fork server pays for that once in a session. What
it forks is a process like any other, with its own id, environment, folder, output, signals and exit code; the module
or script then runs in it as `__main__`. Tests of starting itself (signals that come early, imports, `torchrun`) start
their processes afresh.

With a CUDA device processes are started afresh too, because CUDA does not survive a fork.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path

import torch

PRELOADED = [
    "hydra",
    "torch._dynamo",
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # it has the compiler imported
    "lowbit.trainer.run",
    "lowbit.trainer.deepspeed_engine",
]


class Forked:
    """A process of the server, with what the tests need of `subprocess.Popen`."""

    def __init__(
        self,
        arguments: Sequence[str],
        cwd: Path,
        env: Mapping[str, str],
        out: Path,
        err: Path,
        start_new_session: bool = False,
    ) -> None:
        """`python ARGUMENTS`, which begin with a script or with `-m MODULE`; the output goes to two files."""
        context = server()
        given = (list(arguments), str(cwd), dict(env), (str(out), str(err)), start_new_session, _library_paths())
        self._process = context.Process(target=_become, args=given)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it lives; minus the number of the signal that ended it."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)


Process = subprocess.Popen[str] | Forked


def start(
    arguments: Sequence[str],
    cwd: Path,
    env: Mapping[str, str],
    out: Path,
    err: Path,
    *,
    start_new_session: bool = False,
    fresh: bool = False,
) -> Process:
    """`python ARGUMENTS` in `cwd`, forked where that works and not to be `fresh`; the output goes to two files."""
    if not fresh and not torch.cuda.is_available():
        return Forked(arguments, cwd, env, out, err, start_new_session)
    with out.open("w") as stdout, err.open("w") as stderr:
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=cwd,
            env=env,
            stdout=stdout,
            stderr=stderr,
            text=True,
            start_new_session=start_new_session,
        )


def run(
    arguments: Sequence[str],
    cwd: Path,
    more: Mapping[str, str] | None = None,
    *,
    timeout: float = 280,
    fresh: bool = False,
) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS` in `cwd`, as from a terminal: wait for its end, or kill it after `timeout` seconds.

    more: environment variables to add.
    """
    launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    env = {k: v for k, v in os.environ.items() if k not in launched} | {"OMP_NUM_THREADS": "1"} | dict(more or {})
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        process = start(arguments, cwd, env, out, err, fresh=fresh)
        try:
            code = process.wait(timeout)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        return subprocess.CompletedProcess(list(arguments), code, out.read_text(), err.read_text())


def server() -> ForkServerContext:
    """The server of this session, for any thread."""
    with _STARTING:
        return _server()


_STARTING = threading.Lock()


@cache
def _server() -> ForkServerContext:
    """It imports with one thread: a process that has had several must not fork."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    before = dict(os.environ)
    os.environ.update({"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0"})
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


@cache
def _library_paths() -> list[str]:
    """Where Python, freshly started, would find modules, after the script's folder."""
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    code = "import sys; print('\\n'.join(sys.path[1:]))"
    return subprocess.run(
        [sys.executable, "-c", code], env=clean, capture_output=True, text=True, check=True
    ).stdout.split("\n")[:-1]


def _become(
    arguments: list[str],
    cwd: str,
    env: dict[str, str],
    output: tuple[str, str],
    start_new_session: bool,
    library_paths: list[str],
) -> None:
    """In the forked process: take on all that makes a process a different one, then run the module or script."""
    if start_new_session:
        os.setsid()
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    for number, path in enumerate(output, start=1):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC)
        os.dup2(file, number)
        os.close(file)
    first = cwd if arguments[0] == "-m" else str(Path(arguments[0]).parent)
    sys.path[:] = [first, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *library_paths]
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # wait for threads, then what the end of Python does
        atexit._run_exitfuncs()
