"""The command line with stages that do nothing but end as their seed says: 13 fails, others leave metrics.

Run as a script by tests/cli/test_stage_sweeps.py.
"""

import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

from lowbit.cli.main import main
from lowbit.configs.stored import save_config
from lowbit.errors import NonFiniteError


def stage(config: Any, run_dir: Path, perform: Any = None) -> None:
    save_config(config, run_dir / "whole.yaml")
    if config.seed == 13:
        raise NonFiniteError("step 7: loss is nan")
    folders = [run_dir]
    if hasattr(config, "stages"):
        folders = [run_dir / name for name in config.stages]
        records = {name: {"folder": name} for name in config.stages}
        (run_dir / "pipeline.json").write_text(json.dumps({"stages": records}))
    for number, folder in enumerate(folders):
        folder.mkdir(exist_ok=True)
        (folder / "metrics.jsonl").write_text(f'{{"step": {number + 1}, "tokens": 10, "loss": 2.5}}\n')


for name, function in (("distill.run", "everything"), ("rl.run", "train"), ("pipeline.run", "run")):
    module = types.ModuleType(f"lowbit.{name}")
    setattr(module, function, stage)
    sys.modules[f"lowbit.{name}"] = module
    room = name.partition(".")[0]
    importlib.import_module(f"lowbit.{room}").run = module

main()
