"""Make the pictures of docs/see_it.md: stages of a model, timelines of a small program.

    python -m examples.see_it [folder]            docs/pictures if none is named

The small program has four layers of ten independent groups. Task i of a layer reads
what task i of the layer before wrote and nothing else, so fine events let a group go on
while others are still at work; coarse ones hold every group back for all.
Needs `pip install mkdsl[pictures]`.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import mkdsl as mk
from mkdsl.runtime.gantt import draw_timelines
from mkdsl.runtime.timeline import Timeline
from mkdsl.runtime.timeline_report import report
from models.decode import DecodeStep, argument_shapes
from models.registry import SHAPES

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "pictures"
MODEL, BATCH, SLOTS, CONTEXT = "llama-3.2-1b", 1, 2048, 1024
STAGES = ("tasks", "normalized")
WINDOW = (95.0, 210.0)
LAYERS, GROUPS, WIDTH, ROWS, SMS = 4, 10, 128, 4, 3


@mk.task
def group(x: Any, w: Any) -> Any:  # x [B, 128], w [128, 128] -> [B, 128]
    return jax.nn.silu(mk.dot(x, w)).astype(x.dtype)


def grouped(x: Any, weights: Sequence[Any]) -> Any:  # x [B, 1280], each [1280, 128]
    tile = mk.Spec((x.shape[0], WIDTH), lambda i: (0, i))
    for w in weights:
        x = mk.call(
            group,
            grid=(GROUPS,),
            in_specs=(tile, mk.Spec((WIDTH, WIDTH), lambda i: (i, 0))),
            out_specs=tile,
            out_shape=mk.Shape(x.shape, x.dtype),
        )(x, w)
    return x


def small_timelines() -> list[tuple[str, Timeline]]:
    """The small program with coarse events, and with fine ones."""
    leaf = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731
    width = GROUPS * WIDTH
    step = mk.megakernel(grouped, implementation="simulate", machine=mk.simulated(SMS))
    lowered = step.lower(leaf(ROWS, width), [leaf(width, WIDTH)] * LAYERS)
    return [
        ("coarse events, all of the layer before", lowered.timeline(coarse=True)),
        ("fine events, its own group alone", lowered.timeline()),
    ]


def draw_model(folder: Path) -> None:
    """Stages of the decode step of a real model, and some of its timeline."""
    config = SHAPES[MODEL]
    # Traced on shapes and planned for an H200, wherever this runs.
    step = DecodeStep(config, BATCH, SLOTS, implementation="xla")
    lowered = step.kernel.lower(*argument_shapes(config, BATCH, SLOTS))
    for stage in STAGES:
        lowered.draw(stage, folder / f"{MODEL}-{stage}.png")
    timeline = lowered.timeline({"cache.lengths": CONTEXT})
    title = f"{MODEL}, batch {BATCH}, context {CONTEXT}; the whole step"
    draw_timelines([(title, timeline)], folder / f"{MODEL}-timeline.png", WINDOW)


def main(folder: Path = FOLDER) -> list[tuple[str, Timeline]]:
    """Write all pictures; prints why SMs of the small program wait."""
    timelines = small_timelines()
    draw_timelines(timelines, folder / "coarse-and-fine.png")
    for title, timeline in timelines:
        print(f"{title}\n{report(timeline)}")
    draw_model(folder)
    return timelines


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
