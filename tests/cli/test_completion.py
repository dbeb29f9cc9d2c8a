"""Shell completion, asked as shells ask: through the environment, and by bash itself."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import lowbit

from lowbit.cli.candidates import overrides_like
from lowbit.cli.complete import answer_bash
from lowbit.configs.compose import compose
from lowbit.configs.overrides import groups
from lowbit.configs.strict import schema_paths


def ask(words: str, capsys: pytest.CaptureFixture[str]) -> list[str] | None:
    """What bash would be answered for a line whose last word the cursor is in; None: not ours to answer."""
    split = words.split(" ")
    line = {"_LOWBIT_COMPLETE": "complete_bash", "COMP_WORDS": "\n".join(split), "COMP_CWORD": str(len(split) - 1)}
    answered = answer_bash(line)
    return capsys.readouterr().out.split() if answered else None


@pytest.mark.parametrize(
    ("words", "answers"),
    [
        ("lowbit pretrain model=t", ["model=tiny"]),
        ("lowbit pretrain model = t", ["tiny"]),
        ("lowbit pretrain preset =", ["cpu", "gpu"]),
        ("lowbit pretrain optim.kind = a", ["adamw"]),
        ("lowbit pretrain seed = 3 model = 3", ["30m", "370m"]),
        ("lowbit pretrain model = tiny,3", ["tiny,30m", "tiny,370m"]),
        ("lowbit data pack data = f", ["files"]),
        ("lowbit data pa", None),
        ("lowbit plan optim.l", ["optim.lr=", "optim.lr=0.003"]),
        ("lowbit plan net", ["network=25gbit"]),
        ("lowbit plan comm = sq", ["sq48", "sq48_fast", "squinch"]),
        ("lowbit pretrain +optim.sc", ["+optim.schedule." + k for k in ("decay_fraction=", "decay_fraction=0.3")]),
        ("lowbit pretrain deter", ["deterministic=", "deterministic=false", "deterministic=true"]),
        ("lowbit pretrain logging.wandb = on", ["online"]),
        ("lowbit pretrain data.sources.mine.ki", ["data.sources.mine.kind=", "data.sources.mine.kind=conversations"]),
        ("lowbit pretrain dat", ["data.", "data="]),
        ("lowbit pretrain nonsense", []),
        ("lowbit pretrain nonsense.x", []),
        ("lowbit pretrain nonsense = x", []),
        ("lowbit pipeline rl.algo", ["rl.algorithm.", "rl.algorithm="]),
        ("lowbit pipeline rl.algorithm = gs", ["gspo"]),
        ("lowbit pipeline teacher = 3", ["30m", "370m"]),
        ("lowbit pipeline pretrain.max_st", ["pretrain.max_steps=", "pretrain.max_steps=null"]),
        ("lowbit pipeline pretrain.prec", ["pretrain.precision.", "pretrain.precision="]),
        ("lowbit pipeline pipeline = q", ["quick"]),
        ("lowbit pretrain --mu", None),
        ("lowbit pre", None),
        ("lowbit doctor --p", None),
        ("lowbit pretrain 'open", None),
    ],
)
def test_answers_to_bash(words: str, answers: list[str] | None, capsys: pytest.CaptureFixture[str]) -> None:
    found = ask(words, capsys)
    assert found is None if answers is None else found is not None and found[: len(answers)] == answers


def test_every_key_can_be_reached_and_every_answer_is_valid() -> None:
    """Walk from the empty word through all sections; each `key=value` offered composes."""
    seen: set[str] = set()
    sections = [""]
    while sections:
        for answer in overrides_like(sections.pop()):
            if answer.endswith("."):
                sections.append(answer)
            seen.add(answer)
    leaves = {a.partition("=")[0] for a in seen if "=" in a}
    named = (p for p in schema_paths() if not p.startswith("precision.define"))  # names that only the user knows
    paths = {p.replace("NAME", "python_docs") for p in named}
    with_children = {p.rsplit(".", 1)[0] for p in paths if "." in p}
    assert leaves == (paths - with_children) | set(groups())
    offered = [a for a in seen if not a.endswith(("=", ".")) and not a.endswith("=???")]
    assert len(offered) > 80
    compose([a for a in offered if a.partition("=")[0] not in groups()])


def test_other_shells_and_options_go_through_typer(tmp_path: Path) -> None:
    zsh = {"_LOWBIT_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "lowbit pretrain model=ti"}
    assert "model=tiny" in lowbit([], tmp_path, environment=zsh).out
    option = {"_LOWBIT_COMPLETE": "complete_bash", "COMP_WORDS": "lowbit pretrain --mu", "COMP_CWORD": "2"}
    assert lowbit([], tmp_path, environment=option).out.split() == ["--multirun"]


def test_it_is_quick_and_light(tmp_path: Path) -> None:
    code = "import sys, lowbit.cli.main as m; m.main(); print({'torch', 'hydra', 'omegaconf'} & set(sys.modules))"
    environment = {"_LOWBIT_COMPLETE": "complete_bash", "COMP_WORDS": "lowbit pretrain model=ti", "COMP_CWORD": "2"}
    spent = []
    for _ in range(3):
        start = time.process_time() + sum(os.times()[2:4])
        out = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, check=True
        ).stdout
        spent.append(time.process_time() + sum(os.times()[2:4]) - start)
        assert out.split() == ["model=tiny", "set()"]
    assert min(spent) < 0.5, spent


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_itself(tmp_path: Path) -> None:
    """The function that `lowbit --show-completion` prints, called by bash as it calls it for the tab key."""
    command = tmp_path / "lowbit"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m lowbit "$@"\n')
    command.chmod(0o755)
    script = """
    source <(_LOWBIT_COMPLETE=source_bash lowbit)
    COMP_WORDS=(lowbit pretrain optim = mu); COMP_CWORD=4
    _lowbit_completion lowbit; echo "${COMPREPLY[@]}"
    complete -p lowbit
    """
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(["bash", "-c", script], env=os.environ | {"PATH": path}, capture_output=True, text=True)
    assert done.stdout.splitlines()[0] == "muon", done
    assert "_lowbit_completion" in done.stdout
