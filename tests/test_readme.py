"""What the documentation tells a reader to type works, and what it links to is there.

The README marks one block: its commands run here as they stand, in order, as processes without a shell, in an empty
folder. Every other `lowbit ...` in the documentation must at least be accepted: its options by the command line's
own parser, its settings by composition and validation.
"""

import re
import shlex
from pathlib import Path
from typing import Any

import forked
import pytest
import typer

from lowbit.cli.main import build_app
from lowbit.configs.compose import compose, compose_for
from lowbit.configs.overrides import DISTILL, PIPELINE, RL, expand_sweep
from lowbit.configs.validate import validate
from lowbit.configs.validate_pipeline import validate_pipeline
from lowbit.configs.validate_rl import validate_rl
from lowbit.trainer.network_plan import take_network

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARKER = "<!-- A test runs every command of this block"
OVERRIDES = ("pretrain", "plan", "pack", "train")
"""Commands whose arguments are settings."""


def marked_block() -> list[list[str]]:
    """The words of each command in the README's marked block."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(re.escape(MARKER) + r".*?```sh\n(.*?)```", text, re.DOTALL)
    assert block, "the README's block of commands and its marker are there"
    return [shlex.split(line, comments=True) for line in block[1].splitlines() if line.strip()]


def mentioned(text: str) -> list[str]:
    """Every `lowbit ...` in a page: lines of code blocks, continued ones joined, and code within sentences."""
    text = text.replace("\\\n", " ")
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    inline = re.findall(r"`([^`]+)`", prose)
    tables = re.findall(r": (lowbit [^|`\n]+=[^|`\n]+) \|", prose)  # the presets' comments
    return [line for line in [*lines, *inline, *tables] if re.match(r"lowbit [a-z]", line)]


COMMANDS = sorted({command for page in PAGES for command in mentioned(page.read_text(encoding="utf-8"))})


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_readmes_commands(tmp_path: Path) -> None:
    commands = marked_block()
    assert len(commands) >= 8 and all(command[0] == "lowbit" for command in commands)
    printed: dict[str, str] = {}
    for index, command in enumerate(commands):
        fresh = index == 0  # this one with all the imports of its own
        done = forked.run(["-m", *command], tmp_path, {"COLUMNS": "100"}, timeout=800, fresh=fresh)
        assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"
        printed[shlex.join(command[1:])] = done.stdout

    def output(start: str, which: int = 0) -> str:
        return [text for command, text in printed.items() if command.startswith(start)][which]

    assert "below the byte-trigram" in output("pretrain") and "NOT" not in output("pretrain")
    assert "next: lowbit generate runs/first" in output("pretrain")
    assert output("generate").startswith("import ") and len(output("generate")) > 20
    assert "bits per byte" in output("eval")
    assert "resumed at step" in output("pretrain preset=quick run_name=first", 1)
    assert (tmp_path / "first.png").read_bytes().startswith(b"\x89PNG")
    table = output("pretrain preset=quick run_name=sweep").splitlines()
    assert table[-5].split()[-1] == "optim.lr" and [row.split()[0] for row in table[-4:-2]] == ["0", "1"]
    assert all((tmp_path / line.split(": ")[1]).is_file() for line in table[-2:]), table[-2:]
    assert (tmp_path / "first.html").read_text().startswith("<!DOCTYPE html>")
    assert "held-out greedy accuracy" in output("rl")
    assert "parameters" in output("plan") and "torch" in output("doctor")


def test_the_documentation_mentions_commands() -> None:
    """So that a change of its style does not leave the next test without work."""
    assert len(COMMANDS) > 15


@pytest.mark.parametrize("command", COMMANDS)
def test_a_mentioned_command_is_accepted(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("corpus", "CORPUS"):  # what stands for the reader's text
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.md").write_text("text")
    words = shlex.split(command)[1:]
    found: Any = typer.main.get_command(build_app())
    name = "lowbit"
    while words and hasattr(found, "commands"):
        if "run" in found.commands and words[0] not in found.commands:
            words.insert(0, "run")  # settings right after a group's name
        name = words.pop(0)
        assert name in found.commands, f"there is no command {name}"
        found = found.commands[name]
    if not words:
        return  # a command's name alone
    parsed = found.make_context(name, words)
    if shlex.split(command)[1] == "distill":
        for job in expand_sweep(parsed.params.get("overrides") or [], DISTILL):
            compose_for(DISTILL, job)
    elif name == "pipeline":
        for job in expand_sweep(parsed.params.get("overrides") or [], PIPELINE):
            validate_pipeline(compose_for(PIPELINE, job))
    elif name == "rl":
        Path("problems.jsonl").write_text('{"prompt": "a", "answer": "b"}')
        for job in expand_sweep(parsed.params.get("overrides") or [], RL):
            # A checkpoint's model, which is not there, may take longer sequences than the preset's.
            longer = ["model.max_sequence=8192"] if any("init_from=" in setting for setting in job) else []
            validate_rl(compose_for(RL, [*job, *longer]))
    elif name in OVERRIDES:
        _, settings = take_network(parsed.params["overrides"] or [])
        for job in expand_sweep(settings) if parsed.params.get("multirun") else [settings]:
            validate(compose(job))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = [t for t in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"[a-z]+:|#", t)]
    missing = [t for t in targets if not (page.parent / t.partition("#")[0]).exists()]
    assert not missing, f"{page.name} links to {missing}"
