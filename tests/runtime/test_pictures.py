"""Pictures of every stage are written, say what they show, and repeat."""

import re
from pathlib import Path
from typing import Any

import pytest

import mkdsl as mk
from mkdsl.errors import LaunchError
from mkdsl.lower.machine import H200, RTX_4090, simulated
from mkdsl.lower.pipeline import run_passes
from mkdsl.runtime.layered import layered
from mkdsl.runtime.pictures import draw_stage
from mkdsl.runtime.plan_picture import memory_parts, pages_of
from mkdsl.runtime.stages import TEXTS
from tests.runtime.small_programs import decode, double, leaf, mlp

BIG = 200_000


@pytest.fixture(scope="module")
def stages() -> dict[str, Any]:
    return {s.name: s.value for s in run_passes(decode(), simulated(3))}


def texts(svg: Path) -> list[str]:
    """What matplotlib wrote beside the outlines of its letters."""
    return re.findall(r"<!-- (.*?) -->", svg.read_text())


@pytest.mark.parametrize("stage", TEXTS)
def test_every_stage_has_a_picture(
    stages: dict[str, Any], stage: str, tmp_path: Path
) -> None:
    path = tmp_path / "stage.svg"
    draw_stage(stage, stages, path)
    found = " ".join(texts(path))
    for word in WORDS[stage]:
        assert word in found
    assert path.stat().st_size < BIG
    again = tmp_path / "again.svg"
    draw_stage(stage, stages, again)
    assert again.read_bytes() == path.read_bytes()


_TASKS = ("attend", "2 layers", "next layer: ", "w.2[64 x 512]", "blue: streams")
_EVENTS = ("pairs of tasks that depend", "after fusion: ", "signals, ", " waits")
_QUEUES = ("tasks on 3 SMs", "position in the queue", "gated")
_PAGES = ("the ring of SM 0", "bytes of shared memory", "arena", "in flight")
_KERNEL = (
    "weight loader",
    "activation loader",
    "consumer",
    "storer",
    "one switch over",
)
WORDS = {
    "program": ("attend", "2 layers", "pairs of calls"),
    "tasks": _TASKS,
    "dependences": _TASKS,
    "events": _EVENTS,
    "widened": _EVENTS,
    "normalized": _EVENTS,
    "schedule": _QUEUES,
    "elided": _QUEUES,
    "pages": _PAGES,
    "words": _PAGES,
    "kernel": _KERNEL,
    "stablehlo": _KERNEL,
}


def test_a_png(stages: dict[str, Any], tmp_path: Path) -> None:
    draw_stage("tasks", stages, tmp_path / "stage.png")
    assert (tmp_path / "stage.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_what_is_no_picture_is_refused(stages: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"stage.txt is no picture") as error:
        draw_stage("tasks", stages, tmp_path / "stage.txt")
    assert ".svg or .png" in error.value.hint
    with pytest.raises(LaunchError, match=r"no picture of stage 'none'"):
        draw_stage("none", stages, tmp_path / "stage.svg")


def test_shared_memory_adds_up(stages: dict[str, Any]) -> None:
    plan = stages["pages"]
    assert sum(size for _, size in memory_parts(plan)) == plan.smem_bytes


def test_pages_of_the_ring_are_those_of_the_loader() -> None:
    plan = {s.name: s.value for s in run_passes(mlp(), simulated(1))}["pages"]
    # 4 tasks of 2 operands, 320 features; 5 of 200: pages of [64, 256] elements.
    pages = list(pages_of(plan, 0))
    assert pages.count(("gated", "gate")) == pages.count(("gated", "up")) == 4 * 2
    assert pages.count(("down", "down")) == 5
    assert len(pages) == 21
    assert pages[:4] == [("gated", "gate")] * 2 + [("gated", "up")] * 2


# --------------------------------------------------------------------------- stages


def doubled(x: Any) -> Any:
    return mk.call(
        double,
        grid=(),
        in_specs=(mk.whole,),
        out_specs=mk.whole,
        out_shape=mk.Shape(x.shape, x.dtype),
    )(x)


def test_a_lowered_megakernel_draws_its_stages(tmp_path: Path) -> None:
    step = mk.megakernel(doubled, implementation="simulate")
    lowered = step.lower(leaf(8, 128))
    lowered.draw("schedule", tmp_path / "queues.svg")
    assert "double" in texts(tmp_path / "queues.svg")
    with pytest.raises(LaunchError, match="no stage 'none'"):
        lowered.draw("none", tmp_path / "queues.svg")


def test_the_text_of_the_kernel() -> None:
    step = mk.megakernel(doubled, implementation="mosaic_gpu", machine=H200)
    text = step.lower(leaf(8, 128), platforms=("cuda",)).as_text("kernel")
    assert "axis_index[axis_name=role]" in text
    assert "semaphore_signal" in text
    assert text.count("set_max_registers_p") >= 2


def test_a_machine_without_a_kernel_has_no_text_of_one() -> None:
    step = mk.megakernel(doubled, implementation="simulate", machine=RTX_4090)
    with pytest.raises(LaunchError, match="rtx4090"):
        step.lower(leaf(8, 128)).as_text("kernel")


# --------------------------------------------------------------------------- layout


def test_edges_go_down_and_long_ones_bend_in_every_rank() -> None:
    import networkx as nx

    graph: Any = nx.DiGraph([("a", "b"), ("b", "c"), ("a", "c"), ("d", "c")])
    layout = layered(graph)
    ranks = {node: rank for node, (_, rank) in layout.at.items()}
    assert ranks == {"a": 0, "d": 0, "b": 1, "c": 2}
    assert [rank for _, rank in layout.bends["a", "c"]] == [1]
    assert layout.bends["a", "b"] == []
    assert layout.ranks == 3
    (bend,) = layout.bends["a", "c"]
    assert bend[0] != layout.at["b"][0]


def test_neighbours_stand_below_each_other() -> None:
    import networkx as nx

    graph: Any = nx.DiGraph([("a", "z"), ("b", "y"), ("c", "x")])
    graph.add_nodes_from("xyz")
    at = layered(graph).at
    assert [at[n][0] for n in "abc"] == [at[n][0] for n in "zyx"]
