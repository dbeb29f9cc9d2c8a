"""A run's files have their names from one place."""

import ast
from pathlib import Path

import lowbit
from lowbit.trainer import files

ROOT = Path(lowbit.__file__).parent
NAMES = {value for key, value in vars(files).items() if key.isupper()}


def _written(path: Path) -> set[str]:
    """Names of a run's files that a module spells out in its code; docstrings and messages may."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and node.value in NAMES}


def test_no_other_module_writes_a_name_down() -> None:
    assert len(NAMES) == 7 and _written(Path(files.__file__)) == NAMES
    modules = [*(ROOT / "trainer").rglob("*.py"), ROOT / "rl" / "run.py", *(ROOT / "cli").glob("*.py")]
    found = {str(path): _written(path) for path in modules if path != Path(files.__file__)}
    assert len(found) > 40 and not {name: names for name, names in found.items() if names}
