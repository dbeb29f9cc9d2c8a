"""`python -m lowbit`, and the `lowbit` command: signals are taken over before anything that takes time is imported."""

import sys

from lowbit.cli.ending import say
from lowbit.cli.signals import EndingSignals
from lowbit.errors import EXIT_INTERRUPTED
from lowbit.trainer.reader import prepare_streams


def main() -> None:
    """Run the command line and leave with its exit code."""
    prepare_streams()
    signals = EndingSignals()
    try:
        signals.watch()
        from lowbit.cli.main import main as command_line

        command_line(signals)
    except KeyboardInterrupt:
        signals.finish()
        sys.exit(say("interrupted", EXIT_INTERRUPTED))


if __name__ == "__main__":
    main()
