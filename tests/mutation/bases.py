"""Valid small plans to be mutated: programs with bodies, on 1 to 4 SMs.

layer     two calls over ragged tiles
blocks    the same, down with its operand in four blocks
split     the same, down in two parts and a combine
bump      a state that one call reads and a later one overwrites
chain     a state that is overwritten in place and in part, again and again
activation   a product that streams what an earlier call has written
decode    two layers of attention over a cache with an append, and an mlp
flash     the same with the fold in two parts and a combine
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import mkdsl as mk
from mkdsl.lang.program import Program
from mkdsl.lang.trace import trace_program
from mkdsl.lower.decompose import DecomposeOptions, decompose
from mkdsl.lower.dependences import find_dependences
from mkdsl.lower.elide_waits import elide_waits
from mkdsl.lower.fuse_events import fuse_events
from mkdsl.lower.ir import KernelPlan, TaskGraph
from mkdsl.lower.machine import Machine, simulated
from mkdsl.lower.normalize import normalize
from mkdsl.lower.plan_pages import plan_pages
from mkdsl.lower.schedule import schedule
from mkdsl.runtime.interpret_schedule import simulate
from tests.runtime.small_programs import (
    BF16,
    arguments,
    bump,
    decode,
    double,
    leaf,
    mlp,
    residual,
)


@mk.task
def add(x: Any, y: Any) -> Any:
    """x + y."""
    return x + y


def chain(d: int = 256) -> Program:
    """s is overwritten from itself, in part, and read by tiles of other sizes."""

    def program(s: Any, t: Any) -> Any:
        def tile(n: int, by: int = 0) -> Any:
            return mk.Spec((1, n), lambda i: (0, i + by))

        def into(n: int, by: int = 0) -> Any:
            return mk.Into(s, (1, n), lambda i: (0, i + by))

        def run(name: str, grid: int, specs: Any, out: Any, *arrays: Any) -> Any:
            new = None if isinstance(out, mk.Into) else mk.Shape((1, d), BF16)
            body = double if len(arrays) == 1 else add
            call = mk.call(
                body,
                grid=(grid,),
                in_specs=specs,
                out_specs=out,
                out_shape=new,
                name=name,
            )
            return call(*arrays)

        y = run("first", d // 64, tile(64), tile(64), s)
        s = run("own", d // 64, (tile(64), tile(64)), into(64), s, y)
        z = run("wide", d // 128, tile(128), tile(128), s)
        s = run("half", d // 128, tile(64, 1), into(64, 1), z)
        u = run("last", d // 64, (tile(64), tile(64)), tile(64), s, t)
        return y, z, u, s

    return trace_program(program, (leaf(1, d), leaf(1, d)), "chain", ["s", "t"])[0]


def activation(b: int = 2, d: int = 128) -> Program:
    """x + h @ w2.T, where w2 = 2 * w is streamed, and h = 2 * x is not."""

    def program(x: Any, w: Any) -> Any:
        rows, tile = (
            mk.Spec((64, d), lambda i: (i, 0)),
            mk.Spec((b, 64), lambda i: (0, i)),
        )
        h = mk.call(
            double,
            grid=(d // 64,),
            in_specs=tile,
            out_specs=tile,
            out_shape=mk.Shape((b, d), BF16),
            name="h",
        )(x)
        w2 = mk.call(
            double,
            grid=(d // 64,),
            in_specs=rows,
            out_specs=rows,
            out_shape=mk.Shape((d, d), BF16),
            name="w2",
        )(w)
        return mk.call(
            residual,
            grid=(d // 64,),
            in_specs=(tile, mk.whole, rows),
            out_specs=tile,
            out_shape=mk.Shape((b, d), BF16),
        )(x, h, w2)

    return trace_program(program, (leaf(b, d), leaf(d, d)), "activation", ["x", "w"])[0]


Waits = str  # "fused", "normalized" or "elided"
PROGRAMS: dict[str, tuple[Callable[[], Program], dict[str, int]]] = {
    "layer": (lambda: mlp(1, 128, 200), {}),
    "blocks": (lambda: mlp(1, 64, 1024), {}),
    "split": (lambda: mlp(1, 64, 512), {"down": 2}),
    "bump": (lambda: bump(256), {}),
    "chain": (chain, {}),
    "activation": (activation, {}),
    "decode": (lambda: decode(2, 64, 64, 128, 2), {}),
    "flash": (lambda: decode(1, 64, 128, 256, 2), {"attend": 2}),
}


@dataclass(frozen=True, slots=True)
class Base:
    """A plan, how it was made, and what it computes."""

    name: str
    plan: KernelPlan
    machine: Machine
    options: DecomposeOptions
    waits: Waits
    inputs: tuple[np.ndarray, ...]
    expected: tuple[np.ndarray, ...]


def plan_of(graph: TaskGraph, machine: Machine, waits: Waits) -> KernelPlan:
    """The plan of a graph with dependences, its waits reduced so far."""
    events = fuse_events(graph)
    if waits != "fused":
        events = normalize(events)
    made = schedule(events, machine)
    if waits == "elided":
        made = elide_waits(made)
    return plan_pages(made, machine)


def compiled(
    program: Program, machine: Machine, options: DecomposeOptions, waits: Waits
) -> KernelPlan:
    """The plan of a program."""
    graph = find_dependences(decompose(program, machine, options))
    return plan_of(graph, machine, waits)


def run(plan: KernelPlan, inputs: Sequence[np.ndarray], seed: int) -> list[np.ndarray]:
    """The outputs in one interleaving, with a check of races."""
    return simulate(plan, inputs, seed=seed)


@functools.cache
def program_of(name: str) -> Program:
    """A program, traced once."""
    return PROGRAMS[name][0]()


@functools.cache
def base(name: str, sms: int, waits: Waits) -> Base:
    """A plan to be mutated."""
    program, splits = program_of(name), PROGRAMS[name][1]
    machine = simulated(sms)
    options = DecomposeOptions(split=False, splits=tuple(splits.items()))
    plan = compiled(program, machine, options, waits)
    inputs = tuple(arguments(program, length=70))
    expected = tuple(run(plan, inputs, 0))
    return Base(name, plan, machine, options, waits, inputs, expected)


def bases() -> Iterator[Base]:
    """Every program on 1 to 4 SMs, with all waits and with the fewest; one in blocks
    on 5 SMs, of which no one works for every block: no event implies another."""
    for sms in (2, 1, 3, 4):
        for waits in ("elided", "normalized", "fused"):
            for name in PROGRAMS:
                yield base(name, sms, waits)
    for waits in ("elided", "normalized", "fused"):
        yield base("blocks", 5, waits)
