"""`python -m mkdsl logits`: score given tokens, one by one."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdsl.cli.common import (
    Commands,
    UsageError,
    add_model,
    add_run_arguments,
    checkpoint_folder,
    dtype_of,
    why_runs,
)

if TYPE_CHECKING:
    import numpy as np


def add_logits(commands: Commands) -> None:
    """Add the command."""
    logits = commands.add_parser("logits", help="score given tokens, one by one")
    logits.set_defaults(run=run)
    add_model(logits)
    logits.add_argument(
        "--ids", required=True, type=Path, help="int .npy, [T] or [B, T], padded by -1"
    )
    logits.add_argument(
        "--out",
        required=True,
        type=Path,
        help="float32 .npy to write, [T, V] or [B, T, V]; row t follows token t",
    )
    add_run_arguments(logits)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    import numpy as np

    from models.decode import teacher_forced
    from models.registry import read_config
    from models.weights import load

    why_runs(args.implementation)
    folder = checkpoint_folder(args.model)
    config = read_config(folder)
    ids = _read_ids(args.ids, config.vocab_size)
    if not args.out.parent.is_dir():
        raise UsageError(f"--out: there is no folder {args.out.parent}")
    config, params = load(folder, dtype_of(args))
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
