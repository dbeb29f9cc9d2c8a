"""The command line with a trainer that does nothing but end as its seed says, to test everything around the trainer.

Run as a script by tests/cli/test_jobs.py.
"""

import sys
import types
from pathlib import Path

from lowbit.cli.main import main
from lowbit.configs.schema import RunConfig
from lowbit.configs.stored import save_config
from lowbit.errors import Interrupted, NonFiniteError


def pretrain(config: RunConfig, run_dir: Path) -> types.SimpleNamespace:
    import logging

    logging.getLogger("lowbit").info("training with seed %d", config.seed)
    logging.getLogger("other.library").warning("chatter")
    save_config(config, run_dir / "config.yaml")
    if config.seed == 13:
        raise NonFiniteError("step 7: loss is nan")
    if config.seed == 14:
        raise ZeroDivisionError("a bug")
    if config.seed == 15:
        raise Interrupted("SIGTERM: saved at step 3")
    if config.seed == 16:
        raise KeyboardInterrupt
    return types.SimpleNamespace(asked_to_end="SIGINT" if config.seed == 17 else "")


def sweep_report(sweep_dir: Path, run_dirs: list[Path]) -> list[str]:
    return ["table: " + " ".join(d.name for d in run_dirs)] if run_dirs else []


for name, function in (("lowbit.trainer.run", pretrain), ("lowbit.trainer.report", sweep_report)):
    module = types.ModuleType(name)
    setattr(module, function.__name__, function)
    sys.modules[name] = module

main()
