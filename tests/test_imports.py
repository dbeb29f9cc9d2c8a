"""Imports point one way, and the command line starts without anything heavy.

    cli -> pipeline -> {distill, rl} -> {trainer, infer} -> {quant, comm, data} -> models

`trainer` may import `infer`; `configs.schema*`, `errors` and what says which models can be (`configs.validate_model`)
are leaves that everyone may import; the rest of `configs` (composition, validation, stored files) serves the command
line and the trainer.
"""

import ast
import resource
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "lowbit"

SCHEMA = {f"lowbit.configs.{file.stem}" for file in (PACKAGE / "configs").glob("schema*.py")}
LEAVES = {"lowbit", "lowbit.errors", "lowbit.configs.validate_model", "lowbit.configs.nearest", *SCHEMA}

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "configs": set(),
    "models": set(),
    "quant": {"models"},
    "comm": {"models"},
    "data": {"models"},
    "infer": {"quant", "comm", "data", "models"},
    "trainer": {"infer", "quant", "comm", "data", "models", "configs"},
    "distill": {"trainer", "infer", "quant", "comm", "data", "models", "configs"},
    "rl": {"trainer", "infer", "quant", "comm", "data", "models", "configs"},
    "pipeline": {"distill", "rl", "trainer", "infer", "quant", "comm", "data", "models", "configs"},
    "cli": {"pipeline", "distill", "rl", "trainer", "infer", "quant", "comm", "data", "models", "configs"},
}
"""Rooms whose modules a room may import, besides its own and the leaves."""

HEAVY = (
    "torch",
    "numpy",
    "hydra",
    "omegaconf",
    "datasets",
    "wandb",
    "deepspeed",
    "transformers",
    "pyarrow",
    "matplotlib",
)


def room(module: str) -> str:
    """`lowbit.models.layers` -> `models`."""
    return module.split(".")[1] if "." in module else module


def imported_modules(source: str, module: str) -> set[str]:
    """Every lowbit module that the source of `module` imports, anywhere in the file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*module.split(".")[: -node.level], *([node.module] if node.module else [])])
            found.add(base)
            found |= {f"{base}.{alias.name}" for alias in node.names if is_module(f"{base}.{alias.name}")}
    return {name for name in found if name == "lowbit" or name.startswith("lowbit.")}


def is_module(name: str) -> bool:
    path = PACKAGE.parent.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def violations(source: str, module: str) -> list[str]:
    own = room(module)
    names = {n for n in imported_modules(source, module) if n not in LEAVES}
    names = {n for n in names if not (n == "lowbit.configs" and SCHEMA & imported_modules(source, module))}
    return [f"{module} imports {n}" for n in sorted(names) if room(n) != own and room(n) not in MAY_IMPORT[own]]


def test_imports_point_one_way() -> None:
    found: list[str] = []
    files = [f for f in PACKAGE.rglob("*.py") if f.parent != PACKAGE]
    for file in files:
        module = ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
        found += violations(file.read_text(encoding="utf-8"), module)
    assert len(files) > 20
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("lowbit.models.layers", "from lowbit.quant.policy import X", True),
        ("lowbit.models.layers", "def f():\n    import lowbit.trainer.run", True),
        ("lowbit.data.pack", "from lowbit import trainer", True),
        ("lowbit.data.pack", "from ..trainer import loop", True),
        ("lowbit.data.pack", "from lowbit.configs.compose import compose", True),
        ("lowbit.infer.embedded", "from lowbit.trainer.loop import X", True),
        ("lowbit.data.pack", "from lowbit.configs.schema_less import X", True),
        ("lowbit.configs.compose", "from lowbit.cli.main import main", True),
        ("lowbit.trainer.run", "from lowbit.infer.embedded import EmbeddedSampler", False),
        ("lowbit.models.layers", "from lowbit.configs.schema import X\nfrom lowbit.errors import Y", False),
        ("lowbit.models.layers", "from lowbit.configs import schema", False),
        ("lowbit.models.sparse_head", "from lowbit.configs.schema_distill import X", False),
        ("lowbit.data.loader", "from .batch import Batch", False),
    ],
)
def test_the_rule_finds_each_kind_of_import(module: str, source: str, wrong: bool) -> None:
    assert bool(violations(source, module)) is wrong


def test_the_command_line_imports_nothing_heavy() -> None:
    code = f"import sys, lowbit.cli.main\nprint([m for m in {HEAVY!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_no_command_imports_the_compiler() -> None:
    """torch's compiler takes seconds to import; whoever trains gets it from torch's optimizers, others never need it.

    A CUDA build of torch brings it in where an operator with a Triton kernel is defined.
    """
    modules = ("trainer.run", "distill.run", "rl.run", "infer.embedded")
    code = f"import importlib, sys\nfor m in {modules!r}: importlib.import_module('lowbit.' + m)\n"
    code += "import torch\nprint('torch._dynamo' in sys.modules and torch.version.cuda is None)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def at_import(source: str) -> str:
    """A source without the bodies of its functions and without what is for the type checker alone."""

    class Kept(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
            return ast.Pass()

        def visit_If(self, node: ast.If) -> ast.AST:
            typing_only = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
            return ast.Pass() if typing_only else self.generic_visit(node)

    return ast.unparse(Kept().visit(ast.parse(source)))


def waits_for(module: str, source: str, packages: set[str]) -> set[str]:
    """Modules that must have been imported before the source of `module` has, with those packages whose they are, but
    for its own."""
    found = imported_modules(at_import(source), module)
    parents = {".".join(name.split(".")[:n]) for name in found for n in range(2, name.count(".") + 2)}
    return {name for name in found | (parents & packages) if not f"{module}.".startswith(f"{name}.")}


def cycles(waits: dict[str, set[str]]) -> list[list[str]]:
    """Modules that wait for themselves, each with the way there."""

    def way(start: str) -> list[str]:
        before: dict[str, str] = {}
        todo = [start]
        for here in todo:
            for name in sorted(waits.get(here, set()) - before.keys()):
                before[name] = here
                todo.append(name)
        if start not in before:
            return []
        found = [before[start]]
        while found[0] != start:
            found.insert(0, before[found[0]])
        return found

    return [found for name in sorted(waits) if (found := way(name))]


def test_no_module_waits_for_itself() -> None:
    """As with a GPU, where kernels are imported: a cycle would show only in the order in which a script imports."""
    files = {
        ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): file
        for file in PACKAGE.rglob("*.py")
    }
    packages = {name for name, file in files.items() if file.stem == "__init__"}
    waits = {name: waits_for(name, file.read_text(encoding="utf-8"), packages) for name, file in files.items()}
    assert len(waits) > 200
    assert not cycles(waits)


def test_a_cycle_is_found() -> None:
    arrangement, kernels, lanes = "lowbit.infer.arrangement", "lowbit.infer.kernels", "lowbit.infer.kernels.lanes"
    sources = {
        arrangement: "from lowbit.infer import kernels",
        kernels: f"if TYPE_CHECKING or torch.version.cuda:\n    from {lanes} import mma",
        lanes: "from lowbit.infer.arrangement import SHARED",
        "lowbit.infer.packed": f"if TYPE_CHECKING:\n    import {lanes}\ndef f():\n    import lowbit.infer.packed",
    }
    waits = {name: waits_for(name, source, {kernels}) for name, source in sources.items()}
    assert cycles(waits)[0] == [arrangement, kernels, lanes]
    waits[arrangement] = set()
    assert not cycles(waits)


def test_help_is_quick() -> None:
    """Under half a second of processor time, best of three: the clock on the wall also measures other processes."""
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        out = subprocess.run([sys.executable, "-m", "lowbit", "--help"], capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert "pretrain" in out.stdout
    assert min(seconds) < 0.5, seconds
