"""Write docs/configuration.md from the schema's own docstrings and the presets' first comments.

    python scripts/config_reference.py            # write
    python scripts/config_reference.py --check    # exit 1 if the file is not current

Attribute docstrings are not kept at run time, so they are read from the source with `ast`; types and defaults come
from the classes themselves.
"""

import ast
import dataclasses
import inspect
import sys
import typing
from enum import EnumType
from pathlib import Path

from lowbit.configs import schema
from lowbit.configs.overrides import groups
from lowbit.configs.schema import ModelConfig, PrecisionConfig, RunConfig
from lowbit.configs.schema_distill import DistillConfig
from lowbit.configs.schema_pipeline import PipelineConfig
from lowbit.configs.schema_rl import RlConfig
from lowbit.configs.stored import plain
from lowbit.configs.strict import accepted, fields_of, show, unwrap_optional

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "configuration.md"

ELSEWHERE: dict[type, str] = {ModelConfig: "model", PrecisionConfig: "precision"}
"""Sections that stand in several places, and the one where they are described."""

INTRODUCTION = """\
# Configuration

This page is written by `scripts/config_reference.py` from `lowbit/configs/schema*.py`; edit those files instead.

Settings follow the command: `lowbit pretrain preset=gpu model=30m optim.lr=1e-3`.

- `key=value` sets a key. Text with spaces, letters beyond ASCII or any of `{}[](),=:` needs quotes of its own:
  `run_name="'a, b'"`.
- `group=choice` takes a preset (below). `preset=` chooses several at once; what you write always wins over it.
- `optim.lr=1e-3,3e-4 -m` runs every combination (a sweep) and compares the runs at the end.
- Lists and mappings: `batch.warmup=[{until_tokens: 1000000, sequences: 8}]`.
- `data.sources.NAME.KEY=value` adds a source of that name to the mixture; `~data.sources.NAME` removes one.
- `--cfg resolved` prints the whole configuration, checked, and stops. `hydra.*` keys configure Hydra itself.

An unknown key, a wrong type or a combination that cannot work ends the command at once with exit code 2 and one line
that names the key and the nearest valid one. The resolved configuration is saved as `config.yaml` in the run's folder.
"""


def docstrings() -> dict[str, dict[str, str]]:
    """Docstring of each attribute of each class of the schema, and of the class itself under ""."""
    found: dict[str, dict[str, str]] = {}
    files = sorted(Path(schema.__file__).parent.glob("schema*.py"))
    nodes = [node for file in files for node in ast.parse(file.read_text(encoding="utf-8")).body]
    for node in nodes:
        if not isinstance(node, ast.ClassDef):
            continue
        texts = {"": ast.get_docstring(node) or ""}
        for before, after in zip(node.body, node.body[1:], strict=False):
            name = _assigned(before)
            if name and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                texts[name] = inspect.cleandoc(str(after.value.value))
        found[node.name] = texts
    return found


def _assigned(node: ast.stmt) -> str:
    target = (
        node.target if isinstance(node, ast.AnnAssign) else node.targets[0] if isinstance(node, ast.Assign) else None
    )
    return target.id if isinstance(target, ast.Name) else ""


def sections(cls: type, key: str, texts: dict[str, dict[str, str]]) -> list[str]:
    """The page's part about one dataclass, then those of the dataclasses inside it."""
    title = f"## `{key}`" if key else "## Top level"
    lines = [title, "", texts[cls.__name__][""], "", "| key | takes | default | meaning |", "|---|---|---|---|"]
    inside: list[str] = []
    example = cls()
    for name, hint in fields_of(cls).items():
        inner, _ = unwrap_optional(hint)
        path = f"{key}.{name}" if key else name
        if typing.get_origin(inner) is dict:
            path, inner = f"{path}.NAME", typing.get_args(inner)[1]
        elif typing.get_origin(inner) is list and dataclasses.is_dataclass(typing.get_args(inner)[0]):
            inside += sections(typing.get_args(inner)[0], f"{path}.N", texts)
        elsewhere = ELSEWHERE.get(inner) if isinstance(inner, type) else None
        if elsewhere not in (None, path):
            why = " ".join(texts[cls.__name__].get(name, "").split())
            lines.append(f"| `{path}.KEY` | the keys of `{elsewhere}` | as there | {why} |")
            continue
        if dataclasses.is_dataclass(inner):
            inside += sections(typing.cast(type, inner), path, texts)
            continue
        meaning = [texts[cls.__name__].get(name, "")]
        if isinstance(inner, EnumType) and inner.__name__ in texts:  # its own words
            choices = texts[inner.__name__]
            meaning.append(choices[""])
            members: list[str] = list(inner)
            meaning += [f"`{choice}`: {choices[choice]}" for choice in members if choice in choices]
        default = show(plain(getattr(example, name)))
        cells = [f"`{path}`", accepted(hint), f"`{default}`" if default else "empty", " ".join(filter(None, meaning))]
        lines.append("| " + " | ".join(" ".join(c.split()).replace("|", "\\|") for c in cells) + " |")
    return [*lines, "", *inside]


def presets() -> list[str]:
    """The page's part about groups and their choices."""
    lines = ["## Presets", "", "| group | choice | what it is |", "|---|---|---|"]
    for group, choices in groups(None).items():
        for choice in choices:
            text = (ROOT / "lowbit" / "configs" / group / f"{choice}.yaml").read_text(encoding="utf-8")
            comments = [
                line.lstrip("# ") for line in text.splitlines() if line.startswith("# ") and "@package" not in line
            ]
            lines.append(f"| `{group}` | `{choice}` | {comments[0] if comments else ''} |")
    return [*lines, ""]


def stage(command: str, config: type, texts: dict[str, dict[str, str]]) -> list[str]:
    """The page's part about what another command takes besides a run's keys."""
    lines = [f"## `lowbit {command}`", "", f"{texts[config.__name__]['']} Its presets are `{command}=CHOICE`.", ""]
    common: type = RunConfig
    for name, hint in fields_of(config).items():
        if name not in fields_of(common):
            lines += sections(hint, name, texts)
    return lines


def pipeline(texts: dict[str, dict[str, str]]) -> list[str]:
    """The page's part about `lowbit pipeline`: its own keys, and whose keys its sections have."""
    own = texts[PipelineConfig.__name__]
    lines = ["## `lowbit pipeline`", "", f"{own['']} Its presets are `pipeline=CHOICE`.", ""]
    lines += ["| key | takes | default | meaning |", "|---|---|---|---|"]
    places = {"teacher": "model", "student": "model"}
    for name, hint in fields_of(PipelineConfig).items():
        meaning = " ".join(own.get(name, "").split())
        if name in ("pretrain", "distill", "rl"):
            lines.append(
                f"| `{name}.KEY` | the keys of `lowbit {name}`, but for what the pipeline decides | | {meaning} |"
            )
        elif dataclasses.is_dataclass(hint):
            where = places.get(name, name)
            lines.append(f"| `{name}.KEY` | the keys of `{where}` | as there | {meaning or 'Of every stage.'} |")
        else:
            inner = typing.get_args(hint)[0] if typing.get_origin(hint) is list else hint
            if inner.__name__ in texts:
                choices = texts[inner.__name__]
                meaning += f" {choices['']} " + " ".join(f"`{c}`: {choices[c]}" for c in inner if c in choices)
            default = show(plain(getattr(PipelineConfig(), name)))
            cells = [f"`{name}`", accepted(hint), f"`{default}`", meaning]
            lines.append("| " + " | ".join(" ".join(cell.split()) for cell in cells) + " |")
    return [*lines, ""]


def render() -> str:
    """The whole page."""
    texts = docstrings()
    stages = [*stage("distill", DistillConfig, texts), *stage("rl", RlConfig, texts), *pipeline(texts)]
    parts = [INTRODUCTION, *presets(), *sections(RunConfig, "", texts), *stages]
    return "\n".join(parts).rstrip() + "\n"


def main() -> int:
    page = render()
    if "--check" in sys.argv[1:]:
        return 0 if TARGET.is_file() and TARGET.read_text(encoding="utf-8") == page else 1
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(page, encoding="utf-8")
    print(f"wrote {TARGET.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
