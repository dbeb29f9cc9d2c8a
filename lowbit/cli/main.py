"""The `lowbit` command: one Typer application, one thin file a command, and the rules for how it ends.

Exit codes: 0 done, 1 failed, 2 bad configuration or usage, 130 interrupted after saving. What lowbit raises on purpose
is printed as one line, `lowbit: error: ...` (`lowbit: interrupted ...` is no error); any other exception is a bug and
keeps its traceback.

Nothing heavy is imported here: `lowbit --help` and shell completion answer at once because PyTorch, Hydra and the
rest are imported inside the commands that need them.
"""

import errno
import os
import sys
from typing import cast

import typer

from lowbit.cli import (
    complete,
    data,
    distill,
    doctor,
    evaluate,
    export,
    generate,
    importing,
    pipeline,
    plan,
    pretrain,
    report,
    rl,
    tokenizer,
    version,
)
from lowbit.cli.ending import say
from lowbit.cli.settings import TAKES_SETTINGS
from lowbit.cli.signals import EndingSignals
from lowbit.errors import EXIT_BAD_CONFIG, EXIT_FAILED, EXIT_INTERRUPTED, Interrupted, LowbitError, RankError
from lowbit.trainer.reader import discard

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
USAGE_ERROR: type[Exception] = cast(type[Exception], typer.BadParameter.__mro__[1])
"""What Typer raises for wrong options and arguments; only its subclasses are public."""


def build_app() -> typer.Typer:
    """The application with all its commands."""
    app = typer.Typer(
        name="lowbit",
        help="Train language models in few bits, end to end.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.command("pretrain", context_settings=TAKES_SETTINGS)(pretrain.pretrain)
    app.command("pipeline", context_settings=TAKES_SETTINGS)(pipeline.pipeline)
    app.command("stage", hidden=True)(pipeline.stage)
    app.command("rl", context_settings=TAKES_SETTINGS)(rl.rl)
    app.command("generate")(generate.generate)
    app.command("eval")(evaluate.evaluate)
    app.command("report")(report.report)
    app.command("export")(export.export)
    app.command("import")(importing.import_)
    app.command("plan", context_settings=TAKES_SETTINGS)(plan.plan)
    app.command("doctor")(doctor.doctor)
    app.command("version")(version.version)
    app.add_typer(distill.app, name="distill")
    app.add_typer(data.app, name="data")
    app.add_typer(tokenizer.app, name="tokenizer")
    return app


def main(signals: EndingSignals | None = None) -> None:
    """Run the command line and leave with its exit code. `signals`: those that somebody watches already."""
    if complete.answer_bash(os.environ):
        return
    if signals is None:
        signals = EndingSignals()
        signals.watch()
    code = run(sys.argv[1:], signals)
    try:
        sys.stdout.flush()  # what was printed before an error
    except OSError:
        discard(sys.stdout)
    sys.exit(code)


def run(arguments: list[str], signals: EndingSignals | None = None) -> int:
    """Run one command; returns the exit code. Exceptions that are no LowbitError propagate.

    `signals` knows when an error is only what a library made of an interruption.
    """
    signals = signals or EndingSignals()
    try:
        result = build_app()(arguments, prog_name="lowbit", standalone_mode=False)
        sys.stdout.flush()  # here, where a reader that went away or a full disk can be told
    except (KeyboardInterrupt, typer.Abort):
        signals.finish()
        return say("interrupted", EXIT_INTERRUPTED)
    except Exception as error:
        signals.finish()
        if signals.came is not None and not isinstance(error, (Interrupted, RankError)):
            return say(f"interrupted by {signals.came}", EXIT_INTERRUPTED)
        return _explain(error)
    signals.finish()
    if result == EXIT_INTERRUPTED:  # Typer makes this of a KeyboardInterrupt
        return say("interrupted", EXIT_INTERRUPTED)
    return result if isinstance(result, int) else 0


def _explain(error: Exception) -> int:
    """The line and the exit code for what a command raised; raises it again when it is a bug."""
    if isinstance(error, LowbitError):
        return say(str(error), error.exit_code)
    if isinstance(error, USAGE_ERROR):
        return _usage(error)
    if isinstance(error, BrokenPipeError):  # the reader of our output went away, as in `lowbit generate ... | head`
        discard(sys.stdout)
        return EXIT_FAILED
    if isinstance(error, OSError) and error.errno in FULL and error.filename is None:  # as in `lowbit plan > FILE`
        discard(sys.stdout)
        return say(f"the output cannot be written ({error.strerror}): free some space", EXIT_FAILED)
    raise error


def _usage(error: BaseException) -> int:
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":  # a bare `lowbit`: the help is the answer
        print(error, file=sys.stderr, end="")
        return EXIT_BAD_CONFIG
    where = getattr(context, "command_path", "lowbit")
    message = getattr(error, "format_message", error.__str__)()
    return say(f"{message.rstrip('.')}; see `{where} --help`", EXIT_BAD_CONFIG)
