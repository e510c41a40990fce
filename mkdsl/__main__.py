"""The command line: `python -m mkdsl COMMAND`, see `--help`.

The models of this repository use mkdsl as anyone would; only this file and those of
cli/ know of them.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdsl.cli.common import UsageError, decode_step, positive
from mkdsl.cli.estimate import add_estimate
from mkdsl.cli.show import add_show
from mkdsl.cli.timeline import add_timeline
from mkdsl.errors import MkdslError
from mkdsl.lower.machine import MACHINES
from mkdsl.lower.pipeline import compile_program
from mkdsl.runtime.execute import IMPLEMENTATIONS, default_platform

if TYPE_CHECKING:
    import numpy as np

PROMPT = "The capital of France is"
PACKAGED = "gemma-3-270m"
DTYPES = ("float32", "bfloat16")


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


# ----------------------------------------------------------------------- arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mkdsl", description="Megakernels for JAX: run and inspect them."
    )
    commands = parser.add_subparsers(required=True, metavar="command")

    demo = commands.add_parser("demo", help="generate text with a small real model")
    demo.description = (
        "Continue a prompt with Gemma 3 270M, whose weights come from a Python "
        "package. The first run converts them (about 30 s)."
    )
    demo.set_defaults(run=_demo)
    demo.add_argument("--prompt", default=PROMPT, help=f"default: {PROMPT!r}")
    _add_text_arguments(demo, 48)

    generate = commands.add_parser("generate", help="continue a prompt")
    generate.set_defaults(run=_generate)
    _add_model(generate)
    generate.add_argument("--prompt", required=True, help="text to continue")
    _add_text_arguments(generate, 128)

    logits = commands.add_parser("logits", help="score given tokens, one by one")
    logits.set_defaults(run=_logits)
    _add_model(logits)
    logits.add_argument(
        "--ids", required=True, type=Path, help="int .npy, [T] or [B, T], padded by -1"
    )
    logits.add_argument(
        "--out",
        required=True,
        type=Path,
        help="float32 .npy to write, [T, V] or [B, T, V]; row t follows token t",
    )
    _add_run_arguments(logits)

    add_show(commands)
    add_estimate(commands)
    add_timeline(commands)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        required=True,
        help=f"a Hugging Face folder, or {PACKAGED!r} for the model of the demo",
    )


def _add_text_arguments(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    parser.add_argument(
        "--max-tokens",
        type=positive,
        default=max_tokens,
        help=f"default: {max_tokens}",
    )
    _add_run_arguments(parser)


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--implementation",
        choices=IMPLEMENTATIONS,
        help="default: mosaic_gpu on a supported GPU, xla elsewhere",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="default: bfloat16 on a GPU, float32 elsewhere"
    )


def _dtype(args: argparse.Namespace) -> str:
    return args.dtype or ("bfloat16" if default_platform() == "cuda" else "float32")


# ------------------------------------------------------------------------ commands


def _demo(args: argparse.Namespace) -> None:
    args.model = PACKAGED
    _generate(args)
    machine = MACHINES[0]
    step, shapes = decode_step(PACKAGED, 1, 2048, machine, logits=False)
    program = step.kernel.trace(*shapes).program
    print(f"\nThe same step as one kernel, planned for an {machine.device_kind}:")
    compile_program(program, machine, dump=lambda stage: print(f"  {stage}"))


def _generate(args: argparse.Namespace) -> None:
    from models.tokenizer import StreamDecoder, load_tokenizer
    from models.weights import load

    why = _why(args.implementation)
    folder = _folder(args.model)
    try:
        tokenizer = load_tokenizer(folder)
    except (ImportError, FileNotFoundError) as error:
        raise UsageError(str(error)) from error
    config, params = load(folder, _dtype(args))
    ids = tokenizer.encode(args.prompt).ids
    if not ids:
        raise UsageError("the prompt is empty, and this model has no start token")
    timer = _Timer()
    print(args.prompt, end="", flush=True)
    tokens = timer.watch(_tokens(config, params, ids, args))
    for text in StreamDecoder(tokenizer).stream(tokens):
        print(text, end="", flush=True)
    print(f"\n\n{timer.report()}, {_dtype(args)}\n{why}")


def _tokens(config: Any, params: Any, ids: list[int], args: Any) -> Iterator[int]:
    from models.decode import generate

    for row in generate(
        config, params, [ids], args.max_tokens, implementation=args.implementation
    ):
        yield int(row[0])


def _logits(args: argparse.Namespace) -> None:
    import numpy as np

    from models.decode import teacher_forced
    from models.registry import read_config
    from models.weights import load

    _why(args.implementation)
    folder = _folder(args.model)
    config = read_config(folder)
    ids = _read_ids(args.ids, config.vocab_size)
    if not args.out.parent.is_dir():
        raise UsageError(f"--out: there is no folder {args.out.parent}")
    config, params = load(folder, _dtype(args))
    scores = teacher_forced(
        config, params, np.atleast_2d(ids), implementation=args.implementation
    )
    with args.out.open("wb") as file:
        np.save(file, scores if ids.ndim == 2 else scores[0])


def _read_ids(path: Path, vocabulary: int) -> "np.ndarray[Any, Any]":
    import numpy as np

    try:
        ids: Any = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(f"--ids: {path} cannot be read: {error}") from None
    # An .npz file gives an archive, not an array.
    if not isinstance(ids, np.ndarray) or not np.issubdtype(ids.dtype, np.integer):
        raise UsageError(f"--ids: {path} holds no array of integers")
    if ids.ndim not in (1, 2) or ids.size == 0:
        raise UsageError(f"--ids: {list(ids.shape)} is neither [T] nor [B, T]")
    rows = np.atleast_2d(ids)
    real = rows != -1
    if ((rows < -1) | (rows >= vocabulary)).any():
        bad = rows[(rows < -1) | (rows >= vocabulary)][:8].tolist()
        raise UsageError(f"--ids: {bad}: tokens are 0 to {vocabulary - 1}")
    if not real[:, 0].all() or (real[:, 1:] & ~real[:, :-1]).any():
        raise UsageError("--ids: padding (-1) stands on the right of each row alone")
    return ids.astype(np.int32)


# -------------------------------------------------------------------------- pieces


def _folder(model: str) -> Path:
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


def _why(implementation: Any) -> str:
    """Which implementation will run, and why."""
    from mkdsl.runtime.launch import megakernel

    def decode() -> None: ...

    return megakernel(decode, implementation=implementation).why()


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


if __name__ == "__main__":
    sys.exit(main())
