"""Long runs on a shape that a CPU runs at once, and faults that they have to find."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks import alternation, soak
from benchmarks.shapes import LLAMA_3_2_1B, TINY
from benchmarks.soak import Segment, faults
from mkdsl.lower.machine import H200
from models.cache import KVCache
from models.decode import argument_shapes
from tests.lower.emit.lowered import kernels

TEXT = "--model tiny --tokens 24 --max-length 16 --segment 4 --drift 50".split()
TURNS = "--model tiny --alternate 64 --max-length 16 --segment 2".split()
both = pytest.mark.parametrize("implementation", ["xla", "simulate"])


def run(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    out = ["--out", str(tmp_path), "--commit", "abc"]
    status = soak.main([*arguments, *out])
    (path,) = tmp_path.glob("soak-*.json")
    return status, json.loads(path.read_text())


@pytest.mark.slow
@both
def test_a_text_starts_anew_and_is_the_same(
    tmp_path: Path, implementation: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, content = run(tmp_path, *TEXT, "--implementation", implementation)
    assert status == 0
    rows = content["rows"]
    assert [(row["round"], row["position"]) for row in rows] == [
        (r, p) for r in (0, 1) for p in (1, 5, 9)
    ]
    assert [row["repeated"] for row in rows] == [None] * 3 + [True] * 3
    assert all(row["finite"] and row["us_per_token"] > 0 for row in rows)
    assert rows[1]["bytes"] - rows[0]["bytes"] == 4 * TINY.kv_bytes_per_token
    assert content["failures"] == []
    assert "as in the first" in capsys.readouterr().out


@pytest.mark.slow
@both
def test_plans_in_turn_give_the_first_logits(
    tmp_path: Path, implementation: str
) -> None:
    status, content = run(tmp_path, *TURNS, "--implementation", implementation)
    assert status == 0
    assert [(row["plan"], row["launches"]) for row in content["rows"]] == [
        (f"batch {batch}, {name}", 16)
        for batch in (1, 2)
        for name in ("fine", "coarse")
    ]
    assert all(row["mismatches"] == 0 for row in content["rows"])


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [TEXT, TURNS])
def test_it_ends_when_time_is_up(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*arguments, "--implementation", "xla", "--seconds", "0"]
    assert soak.main([*arguments, "--out", str(tmp_path)]) == 0
    assert "time is up after 0 of" in capsys.readouterr().out


def test_a_segment_that_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not fit in max_length=16"):
        run(tmp_path, *TEXT, "--context", "13", "--implementation", "xla")


# ------------------------------------------------------------------------- faults


def segment(round: int, position: int, us: float, **changed: Any) -> Segment:
    repeated = None if round == 0 else True
    nbytes = LLAMA_3_2_1B.step_bytes(1, position, 500)
    row = Segment("m", 1, "xla", round, position, 500, us, nbytes, True, repeated)
    return replace(row, **changed)


GOOD = [segment(0, 1, 800), segment(0, 4001, 850), segment(1, 1, 830)]


def test_a_good_text_has_no_faults() -> None:
    assert faults(GOOD, 0.1) == []


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (segment(1, 4001, 850, finite=False), "round 1, position 4001: a logit is not"),
        (segment(1, 4001, 850, repeated=False), "other tokens than in the first round"),
        (segment(1, 4001, 938), "1.104 times the time of the first round"),
        (
            segment(0, 8001, 1100),
            "1.375 times the time of the first segment of the round, for 1.106 times",
        ),
    ],
)
def test_faults_of_a_text(row: Segment, words: str) -> None:
    (fault,) = faults([*GOOD, row], 0.1)
    assert words in fault


def spoiled(launch: int, value: float) -> Any:
    """Steps whose logits are wrong at one launch.

    They count in the last slot of the cache, which no step reads.
    """
    real = alternation.make_step

    def make_step(*args: Any, **options: Any) -> Any:
        step = real(*args, **options)

        def wrong(params: Any, cache: KVCache, tokens: Any) -> Any:
            count = cache.v[-1, 0, 0, -1, 0]
            logits, new = step(params, cache, tokens)
            logits = logits.at[0, 7].add(jnp.where(count == launch, value, 0))
            v = new.v.at[-1, 0, 0, -1, 0].set(count + 1)
            return logits, KVCache(new.k, v, new.lengths)

        return wrong

    return make_step


@pytest.fixture
def counted_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    real = alternation.megakernel.stacked_cache

    def stacked_cache(*args: Any) -> KVCache:
        cache = real(*args)
        return replace(cache, v=cache.v.at[-1, 0, 0, -1, 0].set(0))

    monkeypatch.setattr("benchmarks.megakernel.stacked_cache", stacked_cache)


@pytest.mark.slow
@pytest.mark.usefixtures("counted_cache")
def test_one_wrong_launch_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alternation, "make_step", spoiled(11, 2.0**-10))
    status, content = run(tmp_path, *TURNS, "--implementation", "xla")
    assert status == 1
    assert [row["mismatches"] for row in content["rows"]] == [1, 1, 1, 1]
    assert content["failures"][0]["error"] == "batch 1, fine: 1 mismatches"


@pytest.mark.slow
@pytest.mark.usefixtures("counted_cache")
def test_one_logit_that_is_not_finite_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak, "make_step", spoiled(13, -jnp.inf))
    status, content = run(tmp_path, *TEXT, "--implementation", "xla")
    assert status == 1
    # Four launches warmed up; the 14th is in the third segment.
    assert [row["finite"] for row in content["rows"]].index(False) == 2
    assert "a logit is not finite" in content["failures"][0]["error"]


# ---------------------------------------------------------------------- lowering


@pytest.mark.slow
def test_both_loops_lower_for_cuda() -> None:
    shape, slots = replace(LLAMA_3_2_1B, layers=2), 1024
    cases = [(b, o) for b in alternation.BATCHES for o in alternation.PLANS.values()]
    steps = [
        alternation.make_step(shape, b, slots, "mosaic_gpu", o, H200) for b, o in cases
    ]
    config = alternation.megakernel.config_of(shape, slots)
    params, cache, tokens = argument_shapes(config, 1, slots)
    traced = soak.make_segment(steps[0], 50).trace(params, cache, tokens)
    assert len(kernels(traced.lower(lowering_platforms=("cuda",)))) == 1
    sets = [alternation.input_sets(b, slots, shape.vocab) for b, _ in cases]
    caches = tuple(argument_shapes(config, b, slots)[1] for b, _ in cases)
    wanted = tuple(
        jax.ShapeDtypeStruct((alternation.INPUT_SETS, b, shape.vocab), jnp.float32)
        for b, _ in cases
    )
    run = alternation.make_alternation(steps, sets)
    traced = run.trace(params, caches, wanted, jax.ShapeDtypeStruct((), jnp.int32))
    assert len(kernels(traced.lower(lowering_platforms=("cuda",)))) == len(cases)


def test_inputs_leave_the_caches_as_they_are_after_the_first_time() -> None:
    lengths, tokens = alternation.input_sets(2, 1024, 311)
    assert (lengths[1:] > lengths[:-1]).all()
    assert 0 <= int(lengths.min()) <= int(lengths.max()) < 1024
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < 311
