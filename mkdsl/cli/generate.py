"""`python -m mkdsl generate` and `demo`: continue a prompt."""

import argparse
import time
from collections.abc import Iterator
from typing import Any

from mkdsl.cli.common import (
    PACKAGED,
    Commands,
    UsageError,
    add_model,
    add_run_arguments,
    checkpoint_folder,
    decode_step,
    dtype_of,
    positive,
    why_runs,
)
from mkdsl.lower.machine import MACHINES
from mkdsl.lower.pipeline import compile_program

PROMPT = "The capital of France is"


def add_demo(commands: Commands) -> None:
    """Add the command."""
    demo = commands.add_parser("demo", help="generate text with a small real model")
    demo.description = (
        "Continue a prompt with Gemma 3 270M, whose weights come from a Python "
        "package. The first run converts them (about 30 s)."
    )
    demo.set_defaults(run=run_demo)
    demo.add_argument("--prompt", default=PROMPT, help=f"default: {PROMPT!r}")
    _add_text_arguments(demo, 48)


def add_generate(commands: Commands) -> None:
    """Add the command."""
    generate = commands.add_parser("generate", help="continue a prompt")
    generate.set_defaults(run=run)
    add_model(generate)
    generate.add_argument("--prompt", required=True, help="text to continue")
    _add_text_arguments(generate, 128)


def _add_text_arguments(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    parser.add_argument(
        "--max-tokens",
        type=positive,
        default=max_tokens,
        help=f"default: {max_tokens}",
    )
    add_run_arguments(parser)


def run_demo(args: argparse.Namespace) -> None:
    """Run the demo."""
    args.model = PACKAGED
    run(args)
    machine = MACHINES[0]
    step, shapes = decode_step(PACKAGED, 1, 2048, machine, logits=False)
    program = step.kernel.trace(*shapes).program
    print(f"\nThe same step as one kernel, planned for an {machine.device_kind}:")
    compile_program(program, machine, dump=lambda stage: print(f"  {stage}"))


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from models.tokenizer import StreamDecoder, load_tokenizer
    from models.weights import load

    why = why_runs(args.implementation)
    folder = checkpoint_folder(args.model)
    try:
        tokenizer = load_tokenizer(folder)
    except (ImportError, FileNotFoundError) as error:
        raise UsageError(str(error)) from error
    config, params = load(folder, dtype_of(args))
    ids = tokenizer.encode(args.prompt).ids
    if not ids:
        raise UsageError("the prompt is empty, and this model has no start token")
    timer = _Timer()
    print(args.prompt, end="", flush=True)
    tokens = timer.watch(_tokens(config, params, ids, args))
    for text in StreamDecoder(tokenizer).stream(tokens):
        print(text, end="", flush=True)
    print(f"\n\n{timer.report()}, {dtype_of(args)}\n{why}")


def _tokens(config: Any, params: Any, ids: list[int], args: Any) -> Iterator[int]:
    from models.decode import generate

    for row in generate(
        config, params, [ids], args.max_tokens, implementation=args.implementation
    ):
        yield int(row[0])


class _Timer:
    """Tokens per second, without what the first token has to wait for."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._times: list[float] = []

    def watch(self, tokens: Iterator[int]) -> Iterator[int]:
        """The same tokens."""
        for token in tokens:
            self._times.append(time.perf_counter() - self._start)
            yield token

    def report(self) -> str:
        """One line."""
        if len(self._times) < 2:
            return f"{len(self._times)} tokens"
        first, last = self._times[0], self._times[-1]
        rate = (len(self._times) - 1) / (last - first)
        return (
            f"{len(self._times)} tokens, {rate:.1f} tokens/s after the first, which "
            f"took {first:.1f} s with compilation"
        )
