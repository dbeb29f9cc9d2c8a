"""Shell completion of `key=value` arguments, from the schema and the preset folders.

Bash treats `=` as a word break, so it asks about `model=ti` as the three words `model`, `=`, `ti` and replaces only
the last one. `answer_bash` joins such words, completes the whole, and answers with what follows the `=`. Other
shells ask through Typer's own callback (`candidates`). Keys come with their default as a second candidate: the shell
then shows it, and leaves the cursor right after the `=`. The schema is read only when there is something to complete
(`lowbit.cli.candidates`): this module is imported for every command.
"""

from collections.abc import Callable, Mapping

COMMANDS = {
    ("pretrain",): "pretrain",
    ("plan",): "pretrain",
    ("data", "pack"): "pretrain",
    ("tokenizer", "train"): "pretrain",
    ("distill", "cache"): "distill",
    ("distill", "train"): "distill",
    ("distill",): "distill",
    ("rl",): "rl",
    ("pipeline",): "pipeline",
}
"""Commands whose arguments are overrides, and whose settings they are."""


def _completing(command: str) -> Callable[[str], list[str]]:
    """Completion of the settings of a command."""

    def complete(incomplete: str) -> list[str]:
        from lowbit.cli.candidates import overrides_like

        return overrides_like(incomplete, command)

    return complete


candidates = _completing("pretrain")
distill_candidates = _completing("distill")
rl_candidates = _completing("rl")
pipeline_candidates = _completing("pipeline")


def plan_candidates(incomplete: str) -> list[str]:
    """Those of `lowbit pretrain`, and a network."""
    network = ("network=25gbit", "nodes=16")
    return sorted([*candidates(incomplete), *(c for c in network if incomplete and c.startswith(incomplete))])


def answer_bash(environment: Mapping[str, str]) -> bool:
    """Answer a completion request from bash about overrides on standard output; False if this is no such request."""
    if environment.get("_LOWBIT_COMPLETE") != "complete_bash":
        return False
    import shlex

    try:
        words = shlex.split(environment.get("COMP_WORDS", ""))
    except ValueError:  # an open quote
        return False
    position = int(environment.get("COMP_CWORD", "0"))
    command = next((c for c in COMMANDS if tuple(words[1 : 1 + len(c)]) == c), None)
    if command is None or position < 1 + len(command):
        return False
    current = words[position] if position < len(words) else ""
    if current.startswith("-") or (command == ("distill",) and position == 2 and current.isalpha()):
        return False  # an option, or perhaps a command of the group
    whole = _join(words[1 + len(command) : position], current)
    tail = len(whole) - len(current.removeprefix("=") if current == "=" else current)
    of = {"distill": distill_candidates, "rl": rl_candidates, "pipeline": pipeline_candidates}
    complete = plan_candidates if command == ("plan",) else of.get(COMMANDS[command], candidates)
    found = complete(whole)
    print("\n".join(c[tail:] for c in found))
    return True


def _join(before: list[str], current: str) -> str:
    """The override that the cursor is in: `current` with the words that bash split off at `=`."""
    if current == "=":
        return f"{before[-1]}=" if before else current
    if before and before[-1] == "=":
        return f"{before[-2]}={current}" if len(before) > 1 else current
    return current
