"""`python -m mkdsl show`: print a stage of the compiler, or draw it."""

import argparse
from pathlib import Path

from mkdsl.cli.common import Commands, UsageError, add_step_arguments, lowered_step
from mkdsl.runtime.pictures import check_suffix
from mkdsl.runtime.stages import TEXTS


def add_show(commands: Commands) -> None:
    """Add the command."""
    show = commands.add_parser("show", help="print or draw a stage of the compiler")
    show.set_defaults(run=run)
    show.add_argument("--stage", default="program", choices=TEXTS)
    show.add_argument("--picture", type=Path, help=".svg or .png to write, no text")
    add_step_arguments(show)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    if args.picture is None:
        print(lowered_step(args).as_text(args.stage), end="")
        return
    check_suffix(args.picture)
    try:
        lowered_step(args).draw(args.stage, args.picture)
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be written: {error}") from None
    print(args.picture)
