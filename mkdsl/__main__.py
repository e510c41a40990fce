"""The command line: `python -m mkdsl COMMAND`, see `--help`.

The models of this repository use mkdsl as anyone would; only this file and those of
cli/ know of them.
"""

import argparse
import sys
from collections.abc import Sequence

from mkdsl.cli.common import UsageError
from mkdsl.cli.estimate import add_estimate
from mkdsl.cli.generate import add_demo, add_generate
from mkdsl.cli.logits import add_logits
from mkdsl.cli.show import add_show
from mkdsl.cli.timeline import add_timeline
from mkdsl.errors import MkdslError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit status: 0, or 2 if the input was not usable.
    """
    args = _parser().parse_args(argv)
    try:
        args.run(args)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if not _is_expected(error):
            raise
        for line in (f"error: {error}", *getattr(error, "__notes__", ())):
            print(line, file=sys.stderr)
        return 2
    return 0


def _is_expected(error: Exception) -> bool:
    """Whether the text of an error is all that the user needs."""
    from models.config import ConfigError
    from models.weights import CheckpointError

    return isinstance(error, UsageError | MkdslError | ConfigError | CheckpointError)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mkdsl", description="Megakernels for JAX: run and inspect them."
    )
    commands = parser.add_subparsers(required=True, metavar="command")

    add_demo(commands)
    add_generate(commands)
    add_logits(commands)
    add_show(commands)
    add_estimate(commands)
    add_timeline(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
