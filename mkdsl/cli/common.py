"""What several commands share: the model, and the decode step, that the user names."""

import argparse
from pathlib import Path
from typing import Any

from mkdsl.lower.machine import MACHINES, Machine, simulated
from mkdsl.runtime.execute import IMPLEMENTATIONS, default_platform
from mkdsl.runtime.launch import megakernel

PACKAGED = "gemma-3-270m"
DTYPES = ("float32", "bfloat16")
MACHINE_NAMES = (*(m.name for m in MACHINES), "simulated")
# Commands of a parser; argparse has no public type for them.
Commands = Any


class UsageError(Exception):
    """What the user gave cannot be used; the text says why."""


def positive(text: str) -> int:
    """An argument that counts something."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def add_model(parser: argparse.ArgumentParser) -> None:
    """Which checkpoint."""
    parser.add_argument(
        "--model",
        required=True,
        help=f"a Hugging Face folder, or {PACKAGED!r} for the model of the demo",
    )


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """How a model is run."""
    parser.add_argument(
        "--implementation",
        choices=IMPLEMENTATIONS,
        help="default: mosaic_gpu on a supported GPU, xla elsewhere",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="default: bfloat16 on a GPU, float32 elsewhere"
    )


def dtype_of(args: argparse.Namespace) -> str:
    """The dtype of weights and activations."""
    return args.dtype or ("bfloat16" if default_platform() == "cuda" else "float32")


def checkpoint_folder(model: str) -> Path:
    """The checkpoint folder that the user means."""
    path = Path(model)
    if path.is_dir():
        return path
    if model != PACKAGED:
        raise UsageError(f"--model: {model} is no folder; nor is it {PACKAGED!r}")
    from models.gguf import gemma3_270m

    try:
        return gemma3_270m()
    except ImportError as error:
        raise UsageError(str(error)) from error


def why_runs(implementation: Any) -> str:
    """Which implementation will run, and why."""

    def decode() -> None: ...

    return megakernel(decode, implementation=implementation).why()


def machine_named(name: str) -> Machine:
    """The machine that the user means."""
    return {m.name: m for m in MACHINES}.get(name) or simulated()


def add_step_arguments(parser: argparse.ArgumentParser) -> None:
    """Which decode step, of which model, for which machine."""
    parser.add_argument(
        "--model", required=True, help="a checkpoint folder, or the name of a shape"
    )
    parser.add_argument("--batch", type=positive, default=1, help="default: 1")
    parser.add_argument(
        "--max-length", type=positive, default=2048, help="of the cache (2048)"
    )
    parser.add_argument("--machine", default=MACHINE_NAMES[0], choices=MACHINE_NAMES)
    parser.add_argument(
        "--logits", action="store_true", help="the step that gives scores, not tokens"
    )


def add_context(parser: argparse.ArgumentParser) -> None:
    """How much of the cache is filled."""
    parser.add_argument(
        "--context", type=positive, default=1024, help="positions cached (1024)"
    )


def check_context(args: argparse.Namespace) -> None:
    """Refuse more positions than the cache has.

    Raises:
        UsageError: it has fewer.
    """
    if args.context > args.max_length:
        raise UsageError(
            f"--context: {args.context} positions do not fit in a cache of "
            f"{args.max_length}; give a larger --max-length"
        )


def lowered_step(args: argparse.Namespace) -> Any:
    """The decode step of the arguments, lowered for their machine."""
    machine = machine_named(args.machine)
    step, shapes = decode_step(
        args.model, args.batch, args.max_length, machine, logits=args.logits
    )
    platform = "cuda" if machine.runs_kernel else "cpu"
    return step.kernel.lower(*shapes, platforms=(platform,))


def decode_step(
    model: str, batch: int, max_length: int, machine: Machine, *, logits: bool
) -> tuple[Any, Any]:
    """The decode step of a model for a machine that need not be here, and the shapes
    of its arguments."""
    from models.decode import DecodeStep, argument_shapes
    from models.registry import SHAPES, read_config

    if model in SHAPES:
        config = SHAPES[model]
    elif Path(model).is_dir():
        config = read_config(model)
    else:
        raise UsageError(
            f"--model: {model} is no folder, and no shape: {', '.join(SHAPES)}"
        )
    step = DecodeStep(
        config,
        batch,
        max_length,
        logits=logits,
        implementation="mosaic_gpu" if machine.runs_kernel else "simulate",
        machine=machine,
    )
    return step, argument_shapes(config, batch, max_length)
