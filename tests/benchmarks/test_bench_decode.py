"""The decode benchmark end to end, on a shape that a CPU runs at once."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

import mkdsl as mk
from benchmarks import baselines, bench_decode, megakernel
from benchmarks.bench_decode import Case, Outputs
from benchmarks.shapes import LLAMA_3_2_1B, TINY
from mkdsl.lower.machine import H200
from mkdsl.lower.pipeline import compile_program
from models.decode import argument_shapes
from models.registry import family_of

CASE = Case(TINY, batch=2, context=8, max_length=32, steps=4)
ARGUMENTS = "--models tiny --batches 2 --contexts 8 --max-length 32 --steps 4".split()
ARGUMENTS += ["--repeats", "20", "--ceiling", "0.01", "--commit", "abc"]
PLAIN = baselines.make_step_of(baselines.VARIANTS["xla_bksd"])


def plugged(change):
    """An implementation: the plain loop, its result changed."""

    def make_step(shape, batch, max_length, steps=64):
        loop, args = PLAIN(shape, batch, max_length, steps)
        return (lambda *a: change(loop(*a))), args

    return make_step


def run_main(tmp_path, *extra):
    status = bench_decode.main([*ARGUMENTS, "--out", str(tmp_path), *extra])
    (path,) = tmp_path.glob("*.json")
    return status, json.loads(path.read_text())


@pytest.mark.slow
def test_writes_a_row_for_each_implementation(tmp_path, capsys):
    status, content = run_main(tmp_path, "--implementations", "xla_bksd,xla_bskd")
    assert status == 0
    assert [row["implementation"] for row in content["rows"]] == [
        "xla_bksd",
        "xla_bskd",
    ]
    for row in content["rows"]:
        us = row["us_per_token"]
        assert 0 < us["min"] <= us["median"] <= us["max"]
        assert row["repeatable"]
        assert row["repeats"] == 20
        assert row["max_error"] < 0.05
        assert 0 <= row["max_gap"] <= 2 * row["max_error"] + 1e-6
    assert max(row["gap_recovered"] for row in content["rows"]) == 0.0
    assert "us/token" in capsys.readouterr().out


@pytest.mark.slow
def test_a_megakernel_is_measured(tmp_path, monkeypatch):
    """On a CPU: the same program and loop with implementation="xla"."""
    monkeypatch.setitem(
        bench_decode.IMPLEMENTATIONS, "mosaic_gpu", megakernel.make_step_of("xla")
    )
    status, content = run_main(tmp_path)
    assert status == 0
    row, plain = content["rows"]
    assert [row["implementation"], plain["implementation"]] == [
        "mosaic_gpu",
        "xla_bksd",
    ]
    assert row["max_error"] < 0.02
    assert row["max_gap"] < 0.02
    assert row["repeatable"]
    assert row["bytes"] == plain["bytes"]


@pytest.mark.slow
def test_a_megakernel_with_norms_of_q_and_k():
    shape = dataclasses.replace(TINY, qk_norm=True, rope_scaling=None)
    chosen = {}
    for name, make_step in (("plain", PLAIN), ("mine", megakernel.make_step_of("xla"))):
        loop, (params, cache) = make_step(shape, 2, 32, 4)
        found = loop(params, cache, jnp.array([5, 6]), jnp.int32(8))
        chosen[name] = found.tokens.tolist()
    assert chosen["mine"] == chosen["plain"]


def test_default_implementations_depend_on_the_batch():
    assert list(bench_decode.chosen_for(1, None)) == ["mosaic_gpu", "xla_bksd"]
    assert "xla_cudnn" in bench_decode.chosen_for(8, None)
    assert list(bench_decode.chosen_for(8, ["xla_bskd"])) == ["xla_bskd"]


@pytest.mark.slow
def test_the_reference_follows_other_tokens():
    reference = bench_decode.Reference(CASE)
    own = reference.outputs().tokens
    assert reference.max_gap(own) == 0.0
    other = own.copy()
    other[1] = (own[1] + 1) % TINY.vocab
    assert reference.max_gap(other) > 0.0


@pytest.mark.slow
def test_a_failure_is_recorded_and_does_not_stop_the_others(tmp_path, monkeypatch):
    def wrong(result):
        return result._replace(tokens=result.tokens.at[0, 0].set(-1))

    monkeypatch.setitem(bench_decode.IMPLEMENTATIONS, "wrong", plugged(wrong))
    status, content = run_main(tmp_path, "--implementations", "wrong,xla_bksd")
    assert status == 1
    assert [row["implementation"] for row in content["rows"]] == ["xla_bksd"]
    assert "outside the vocabulary" in content["failures"][0]["error"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r._replace(scores=r.scores.at[1, 1].set(jnp.nan)), "score"),
        (lambda r: r._replace(cache=r.cache[0].k.at[0].set(jnp.nan)), "cache"),
        (lambda r: r._replace(tokens=r.tokens[1:]), "shape"),
    ],
)
def test_wrong_outputs_are_refused(change, message):
    loop, args = plugged(change)(TINY, CASE.batch, CASE.max_length, CASE.steps)
    result = loop(*args, CASE.token, CASE.position)
    with pytest.raises(ValueError, match=message):
        bench_decode.check_outputs(result, Outputs.of(result), CASE)


def test_scores_are_compared_up_to_the_first_other_token():
    reference = Outputs(np.array([[1, 1], [2, 2], [3, 3]]), np.zeros((3, 2)))
    scores = np.array([[0.1, 0.2], [0.3, -0.4], [9.0, 0.0]])
    outputs = Outputs(np.array([[1, 1], [7, 2], [3, 3]]), scores)
    assert bench_decode.compare(outputs, reference) == (1, 0.4)
    assert bench_decode.compare(reference, reference) == (3, 0.0)
    assert bench_decode.compare(Outputs(outputs.tokens, None), reference) == (1, None)


def test_a_case_that_overflows_its_cache_is_refused():
    with pytest.raises(ValueError, match="does not fit"):
        Case(TINY, batch=1, context=1000, max_length=1024, steps=64)


@pytest.mark.slow
def test_events_are_compared_on_the_same_tiles():
    """Coarse, fine, and with block waits: other waits, the same tasks and bodies."""
    config = megakernel.config_of(LLAMA_3_2_1B, 2048)
    decode = family_of(config).decode_program(
        config, 1, 2048, rows=megakernel.EVENT_ROWS
    )
    step = mk.megakernel(decode, machine=H200)
    program = step.trace(*argument_shapes(config, 1, 2048)).program
    events = [
        compile_program(program, H200, options).schedule.events
        for options in megakernel.EVENTS.values()
    ]
    assert len({len(e.graph.tasks) for e in events}) == 1
    blocked = [any(kind.blocks > 1 for kind in e.graph.kinds) for e in events]
    assert blocked == [False, False, True]
    coarse, fine, blocks = (sum(map(len, e.waits)) for e in events)
    assert coarse < fine < blocks
