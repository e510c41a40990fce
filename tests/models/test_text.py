"""The printed stages of every family's decode step parse back."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import mkdsl as mk
from mkdsl.lower.machine import H200, Machine, simulated
from mkdsl.lower.pipeline import STAGES, Stage, run_passes
from models.decode import DecodeStep, argument_shapes
from models.registry import SHAPES, read_config

FIXTURES = Path(__file__).parents[1] / "fixtures"
FOLDERS = ["llama_rope3_tied", "llama_untied_nohd", "gemma3_window16"]
# Of the real shapes one layer is enough: the others are the same.
REAL = ["llama-3.2-1b", "gemma-3-270m"]


def stages(config: Any, batch: int, machine: Machine, **options: Any) -> list[Stage]:
    """Every stage of a decode step, and it is the program that was traced."""
    step = DecodeStep(config, batch, 128, machine=machine, **options)
    traced = step.kernel.trace(*argument_shapes(config, batch, 128))
    return list(run_passes(traced.program, machine))


def check(made: list[Stage]) -> None:
    """Each text gives its stage, with the bodies of the program, and is its text."""
    program: Any = made[0].value
    assert [stage.name for stage in made] == list(STAGES)
    for stage in made:
        found = mk.parse(stage.as_text(), program)
        assert found == stage.value, stage.name
        assert stage.print_value(found) == stage.as_text()
    bodies = {id(call.task.body) for call in program.calls()}
    parsed: Any = mk.parse(made[-1].as_text(), program)
    kinds = parsed.schedule.events.graph.kinds
    assert {id(kind.task.body) for kind in kinds} <= bodies


@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize("name", FOLDERS)
def test_small_models(name: str, logits: bool) -> None:
    config = read_config(FIXTURES / name)
    check(stages(config, 2, simulated(), logits=logits))


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("name", REAL)
def test_a_layer_of_a_real_model(name: str, batch: int) -> None:
    one: dict[str, Any] = {"num_layers": 1}
    one |= {"layer_is_global": (False,)} if name.startswith("gemma") else {}
    made = stages(replace(SHAPES[name], **one), batch, H200)
    check(made)
    if (name, batch) == ("llama-3.2-1b", 1):
        assert " pieces\n" in made[-1].as_text()
