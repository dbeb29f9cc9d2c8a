"""`engine.processes=N`: the command starts its ranks itself, with torchrun on this machine.

A run, or each job of a sweep, is then a child: `torchrun --nproc-per-node=N -m lowbit COMMAND SETTINGS`. The parent
only waits, passes on a signal that asks it to end, and says how the child ended. It looks for no GPU.
"""

import os
import subprocess
import sys
from collections.abc import Sequence

from lowbit.configs.schema import RunConfig
from lowbit.errors import ConfigError, Interrupted, LowbitError


def world() -> int:
    """How many processes a launcher started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def ranks_of(config: RunConfig) -> int:
    """How many processes will train. Raises ConfigError where a launcher has started others than were asked for."""
    asked, started = config.engine.processes, world()
    if "WORLD_SIZE" in os.environ and asked not in (1, started):
        raise ConfigError(
            f"engine.processes={asked} under a launcher that has started {started}: leave engine.processes out"
        )
    return max(asked, started)


def starts_ranks(config: RunConfig) -> bool:
    """Whether this process is to start them."""
    return config.engine.processes > 1 and "WORLD_SIZE" not in os.environ


def run_ranks(config: RunConfig, words: Sequence[str], settings: Sequence[str]) -> None:
    """`lowbit WORDS SETTINGS` on as many processes as the configuration says.

    Raises: Interrupted when a signal came; LowbitError when the run failed, which has said why.
    """
    count = config.engine.processes
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    # A session of its own: Ctrl-C in a terminal reaches the ranks once, through their launcher.
    child = subprocess.Popen([*launcher, "-m", "lowbit", *words, *settings], start_new_session=True)
    interrupted = False
    while True:
        try:
            code = child.wait()
            break
        except KeyboardInterrupt:
            interrupted = True
            child.terminate()
    if interrupted:
        raise Interrupted(f"interrupted, like its {count} ranks; the same command goes on from the newest checkpoint")
    if code:
        raise LowbitError(f"the run on {count} ranks failed: its own message stands above, and in its folder's run.log")
