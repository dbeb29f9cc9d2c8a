"""What commands that train take: `KEY=VALUE` arguments (declared, completed and read here), `-m` and `--cfg`."""

from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowbit.cli.complete import candidates
from lowbit.cli.start import with_start

if TYPE_CHECKING:
    from lowbit.configs.schema import RunConfig

TAKES_SETTINGS = {"ignore_unknown_options": True}
"""Context of commands that take settings: they get unknown options too, to answer them with the key that was meant."""


class Shown(StrEnum):
    """What `--cfg` prints."""

    job = "job"
    resolved = "resolved"


Multirun = Annotated[bool, typer.Option("--multirun", "-m", help="Run every combination of comma lists.")]
Cfg = Annotated[
    Shown | None,
    typer.Option(
        "--cfg", help="Print the configuration and stop: as Hydra composed it (job), or resolved and checked."
    ),
]


def settings(help: str, complete: Callable[[str], list[str]] = candidates) -> Any:
    """The declaration of a command's `KEY=VALUE` arguments."""
    return typer.Argument(metavar="KEY=VALUE", help=help, autocompletion=complete, show_default=False)


def read(overrides: list[str] | None) -> "RunConfig":
    """The configuration that the arguments describe, checked. Raises ConfigError."""
    from lowbit.configs.compose import compose
    from lowbit.configs.validate import validate

    config = compose(with_start(overrides or []))
    validate(config)
    if config.init_from:
        from lowbit.trainer.imported import check_start

        check_start(config)
    return config
