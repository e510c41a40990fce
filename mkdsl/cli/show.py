"""`python -m mkdsl show`: print a stage of the compiler."""

import argparse

from mkdsl.cli.common import Commands, add_step_arguments, lowered_step
from mkdsl.runtime.stages import TEXTS


def add_show(commands: Commands) -> None:
    """Add the command."""
    show = commands.add_parser("show", help="print a stage of the compiler")
    show.set_defaults(run=run)
    show.add_argument("--stage", default="program", choices=TEXTS)
    add_step_arguments(show)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    print(lowered_step(args).as_text(args.stage), end="")
