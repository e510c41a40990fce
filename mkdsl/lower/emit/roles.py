"""The four roles of an SM, one warpgroup each, over one queue of instructions.

    loader      streams pages into the ring, ahead of everything but `stream` waits
    fetcher     makes the `resident` waits and brings resident operands to the arena
    consumer    runs task bodies and puts results into staging
    storer      copies results to device memory and signals

Hand-offs are mbarriers: full/empty per ring slot, landed/free for the resident operands
of a task, ready/drained for its results. Every role walks the same instructions, so counts of
pages and tasks agree by construction.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mkdsl.lang.expr import Expr, Ops, read
from mkdsl.lower import encode
from mkdsl.lower.emit.blocks import Copy, loads, page_copies, stores
from mkdsl.lower.emit.body import WG, Emitter, PageBlock, Pages, Tile, resident
from mkdsl.lower.emit.code import Code, Stream
from mkdsl.lower.emit import timestamps as ts
from mkdsl.lower.emit.sync import Counters

Ref = Any
Value = Any
KERNEL_OPS = Ops(lax.div, lax.rem, lax.min, lax.max)


class Memory(NamedTuple):
    """References of one SM, by what they hold; lists have one entry per kind."""

    arrays: dict[str, Ref]
    words: Ref
    scalars: Ref
    pages: dict[tuple[int, bool], Ref]
    raw_pages: dict[int, Ref]
    arena: Sequence[Sequence[Ref]]
    raw_arena: Sequence[Sequence[Ref]]
    scratch: Sequence[Sequence[Ref]]
    staging: Sequence[Sequence[Ref]]
    raw_staging: Sequence[Sequence[Ref]]
    full: Ref
    empty: Ref
    landed: dict[int, Ref]
    free: Ref
    ready: Ref
    drained: Ref
    done: Ref


class Kernel(NamedTuple):
    """What the roles share: code of the kinds, sizes, memory, counters.

    A barrier counts a fixed number of arrivals, and an arrival by hand costs 128
    operations on one address, so there is one `landed` barrier per number of copies.

    counters is None on one SM without device counters (interpret mode): every task
    then waits until the one before it has been stored.
    """

    codes: Sequence[Code]
    stride: int
    offsets: dict[str, tuple[int, tuple[int, ...]]]
    ring: int
    in_flight: int
    page_arrivals: int
    memory: Memory
    counters: Counters | None
    stamps: Ref | None = None

    def stamp(self, i: Value, what: int) -> None:
        """Note the time of a step of instruction i, if anyone wants to know."""
        if self.stamps is not None:
            ts.stamp(self.stamps.at[i, what])


class Instruction:
    """The instruction at position i, and the value of its index expressions."""

    def __init__(self, kernel: Kernel, i: Value) -> None:
        self.kernel, self.base = kernel, i * kernel.stride

    def word(self, k: int) -> Value:
        """Word k of the instruction."""
        return self.kernel.memory.words[self.base + k]

    def grid(self, rank: int) -> list[Value]:
        """Grid indices."""
        return [self.word(encode.HEADER + a) for a in range(rank)]

    def __call__(self, value: Expr) -> Value:
        """The value of an index expression."""
        if value.is_constant:
            return int(value)
        env = {"layer": encode.LAYER, "part": encode.PART}
        words = {
            name: self.word(env[name] if name in env else encode.HEADER + int(name[1:]))
            for name in sorted(value.variables)
        }
        return value.evaluate(words, self.scalar, KERNEL_OPS)

    def scalar(self, buffer: str, index: tuple[Value, ...]) -> Value:
        """An element of an integer input."""
        offset, shape = self.kernel.offsets[buffer]
        flat: Value = 0
        for i, n in zip(index, shape, strict=True):
            flat = flat * n + i
        return self.kernel.memory.scalars[offset + flat]


def walk(kernel: Kernel, branches: Sequence[Callable[..., Value]]) -> tuple[Any, Any]:
    """Run the branch of every instruction: state = branch(i, state).

    Returns:
        The number of instructions and the last state.
    """
    words = kernel.memory.words

    def more(c: tuple[Value, Value]) -> Value:
        return words[c[0] * kernel.stride] >= 0

    def one(c: tuple[Value, Value]) -> tuple[Value, Value]:
        i, state = c
        return i + 1, lax.switch(words[i * kernel.stride], branches, i, state)

    zero = jnp.int32(0)
    return lax.while_loop(more, one, (zero, zero))


def drain(barrier: Ref, slots: int, total: Value) -> None:
    """Observe the last phase of every slot: no barrier is left half-watched."""

    def one(i: Value, carry: Value) -> Value:
        plgpu.barrier_wait(barrier.at[lax.rem(i, slots)])
        return carry

    lax.fori_loop(lax.max(total - slots, 0), total, one, 0)


def _observe_last(barrier: Ref, count: Value) -> None:
    """The same for a single barrier that was waited for from the second time on."""

    @pl.when(count > 0)
    def _() -> None:
        plgpu.barrier_wait(barrier)


def _part(ref: Ref, index: tuple[Any, ...]) -> Ref:
    return ref.at[index] if index else ref


def _waits(kernel: Kernel, at: Instruction, first: int) -> None:
    """The waits of one gate of an instruction."""
    if kernel.counters is None:
        return
    offset, count = at.word(first), at.word(first + 1)
    words, counters = kernel.memory.words, kernel.counters

    def one(k: Value, carry: Value) -> Value:
        pair = offset + encode.WAIT_WORDS * k
        counters.wait(words[pair], words[pair + 1])
        return carry

    lax.fori_loop(0, count, one, 0)


def _after_previous(kernel: Kernel, i: Value) -> None:
    if kernel.counters is None:

        @pl.when(i > 0)
        def _() -> None:
            plgpu.barrier_wait(kernel.memory.done)


def _arena_target(kernel: Kernel, code: Code, k: int, copy: Copy) -> Ref:
    """Where a copy of resident operand k goes."""
    mem = kernel.memory
    if copy.raw and kernel.counters is None:
        # The interpreter gives the two views of a block memory of their own.
        (j,) = copy.shared
        return mem.arena[code.index][k].at[:, pl.ds(64 * j, 64)]
    refs = mem.raw_arena if copy.raw else mem.arena
    return _part(refs[code.index][k], copy.shared)


def loader(kernel: Kernel) -> None:
    """Stream pages: at most `in_flight` on their way, the rest of the ring landed."""
    mem, ring, flying = kernel.memory, kernel.ring, kernel.in_flight

    def issue(g: Value, s: Stream, copies: Sequence[Copy]) -> Value:
        slot = lax.rem(g, ring)

        @pl.when(g >= ring)
        def _() -> None:
            plgpu.barrier_wait(mem.empty.at[slot])

        @pl.when(g >= flying)
        def _() -> None:
            plgpu.barrier_wait(mem.full.at[lax.rem(g - flying, ring)])

        for copy in copies:
            target = _page_target(kernel, s, slot, copy)
            source = mem.arrays[copy.array].at[copy.index]
            plgpu.copy_gmem_to_smem(source, target, mem.full.at[slot])
        for _ in range(kernel.page_arrivals - len(copies)):
            plgpu.barrier_arrive(mem.full.at[slot])
        return g + 1

    def dot(code: Code, s: Stream, at: Instruction, g: Value) -> Value:
        (operand,) = s.operands
        layout = code.layouts[operand.access.buffer]

        def page(p: Value, features: int, g: Value) -> Value:
            shape = (s.page[0], features)
            column = p * s.page[1]
            copies = page_copies(operand, layout, shape, 0, column, at, tiled=s.tiled)
            return issue(g, s, copies)

        g = lax.fori_loop(0, s.full_pages, lambda p, g: page(p, s.page[1], g), g)
        return page(s.full_pages, s.rest, g) if s.rest else g

    def fold(code: Code, s: Stream, at: Instruction, g: Value) -> Value:
        def block(i: Value, g: Value) -> Value:
            for operand in s.operands:
                layout = code.layouts[operand.access.buffer]
                row = i * s.page[0]
                copies = page_copies(operand, layout, s.page, row, 0, at, tiled=s.tiled)
                g = issue(g, s, copies)
            return g

        return lax.fori_loop(0, fold_blocks(s, at), block, g)

    def branch(code: Code) -> Callable[[Value, Value], Value]:
        def run(i: Value, g: Value) -> Value:
            at = Instruction(kernel, i)
            _after_previous(kernel, i)
            if code.streams:
                _waits(kernel, at, encode.STREAM_WAITS)
            if code.streams:
                kernel.stamp(i, ts.FIRST_PAGE)
            for s in code.streams:
                g = (fold if s.is_fold else dot)(code, s, at, g)
            return g

        return run

    count, total = walk(kernel, [branch(c) for c in kernel.codes])
    drain(mem.empty, ring, total)

    def land(g: Value, carry: Value) -> Value:
        plgpu.barrier_wait(mem.full.at[lax.rem(g, ring)])
        return carry

    lax.fori_loop(lax.max(total - flying, 0), total, land, 0)
    _last(kernel, count)


def _last(kernel: Kernel, count: Value) -> None:
    if kernel.counters is None:
        _observe_last(kernel.memory.done, count)


def _page_target(kernel: Kernel, s: Stream, slot: Value, copy: Copy) -> Ref:
    """Where a copy of a page goes."""
    mem, rows = kernel.memory, s.page[0]
    if s.tiled:
        return mem.pages[slot_rows(rows), True].at[slot]
    ref = mem.raw_pages[slot_rows(rows)]
    part = () if rows == ref.shape[2] else (pl.ds(0, rows),)
    return ref.at[(slot, *copy.shared, *part)]


def slot_rows(rows: int) -> int:
    """Rows of the view of the ring that pages of `rows` rows use."""
    return 64 if rows <= 64 else 128 if rows <= 128 else 256


def fold_blocks(s: Stream, at: Instruction) -> Value:
    """Number of blocks that a fold has to walk."""
    count = at(s.count)
    return (
        lax.div(count + s.page[0] - 1, s.page[0])
        if not isinstance(count, int)
        else (-(-count // s.page[0]))
    )


def fetcher(kernel: Kernel) -> None:
    """Bring resident operands in, once their producers have signalled."""
    mem = kernel.memory

    def branch(code: Code) -> Callable[[Value, Value], Value]:
        def run(i: Value, state: Value) -> Value:
            at = Instruction(kernel, i)

            @pl.when(i > 0)
            def _() -> None:
                plgpu.barrier_wait(mem.free)

            _after_previous(kernel, i)
            _waits(kernel, at, encode.RESIDENT_WAITS)
            kernel.stamp(i, ts.WAITED)
            landed, made = mem.landed[code.arrivals], 0
            for k, block in enumerate(code.residents):
                layout = code.layouts[block.operand.access.buffer]
                for copy in loads(block, layout, at):
                    target = _arena_target(kernel, code, k, copy)
                    source = mem.arrays[copy.array].at[copy.index]
                    plgpu.copy_gmem_to_smem(source, target, landed)
                    made += 1
            if made == 0:
                plgpu.barrier_arrive(landed)
            kernel.stamp(i, ts.FETCHED)
            return state

        return run

    count, _ = walk(kernel, [branch(c) for c in kernel.codes])
    _observe_last(mem.free, count)
    _last(kernel, count)


class _Consumer:
    """Runs one instruction; counts the pages that it uses."""

    def __init__(self, kernel: Kernel, code: Code, i: Value, g: Value) -> None:
        self.kernel, self.code, self.g = kernel, code, g
        self.at = Instruction(kernel, i)
        self.i = i

    def chunks(self, g: Value, s: Stream, features: int) -> list[Ref]:
        """The [rows, features] or [rows, 64] blocks of the page that is number g."""
        ref = self.kernel.memory.pages[slot_rows(s.page[0]), s.tiled]
        slot = lax.rem(g, self.kernel.ring)
        if s.tiled:
            return [ref.at[slot]]
        rows = () if s.page[0] == ref.shape[2] else (pl.ds(0, s.page[0]),)
        return [ref.at[(slot, j, *rows)] for j in range(features // 64)]

    def take(self, g: Value) -> None:
        plgpu.barrier_wait(self.kernel.memory.full.at[lax.rem(g, self.kernel.ring)])

    def give(self, g: Value) -> None:
        plgpu.barrier_arrive(self.kernel.memory.empty.at[lax.rem(g, self.kernel.ring)])

    def dot(self, pages: Pages, step: Callable[..., None]) -> None:
        """See body.Streams."""
        s, base = self.code.stream_of(pages.index), self.g
        first = self.at(s.first)

        def page(p: Value, features: int) -> None:
            self.take(base + p)
            step(self.chunks(base + p, s, features), first + p * s.page[1])
            self.give(base + p)

        def one(p: Value, carry: Value) -> Value:
            page(p, s.page[1])
            return carry

        lax.fori_loop(0, s.full_pages, one, 0)
        if s.rest:
            page(s.full_pages, s.rest)

    def advance(self, pages: Pages) -> None:
        """See body.Streams."""
        s = self.code.stream_of(pages.index)
        self.g = self.g + s.full_pages + (1 if s.rest else 0)

    def fold(
        self,
        streams: Sequence[Pages],
        count: Value,
        step: Callable[..., list[Value]],
        carry: list[Value],
    ) -> list[Value]:
        """See body.Streams."""
        s, base, n = self.code.stream_of(streams[0].index), self.g, len(streams)
        rows = s.page[0]

        def one(i: Value, carry: list[Value]) -> list[Value]:
            first = base + i * n
            blocks: list[PageBlock] = []
            for j in range(n):
                self.take(first + j)
                chunks = tuple(self.chunks(first + j, s, s.page[1]))
                blocks.append(PageBlock(chunks, rows))

            @pl.when((i + 1) * rows > count)
            def _() -> None:
                for b in blocks:
                    _clear(b, i * rows, count)
                plgpu.commit_smem()

            out = step(i, blocks, carry)
            for j in range(n):
                self.give(first + j)
            return out

        total = fold_blocks(s, self.at)
        self.g = base + total * n
        return list(lax.fori_loop(0, total, one, carry))

    def extent(self, parameter: int, axis: int) -> Value:
        """Elements of an operand's axis that exist."""
        return self.at(self.code.extents[parameter, axis])

    def run(self) -> Value:
        """Emit the instruction; returns the number of pages used so far."""
        code, mem, at = self.code, self.kernel.memory, self.at
        plgpu.barrier_wait(mem.landed[code.arrivals])
        self.kernel.stamp(self.i, ts.LANDED)
        refs = iter(mem.arena[code.index])
        blocks = [None if b is None else next(refs) for b in code.blocks]
        values = [self.value(i, ref) for i, ref in enumerate(blocks)]
        first = None
        if code.kind.mode == "partial" and code.kind.parts > 1:
            first = at.word(encode.PART) == 0
        emitter = Emitter(
            code.columns,
            mem.scratch[code.index],
            self,
            self.extent,
            at.grid(len(code.kind.grid)),
            first,
        )
        known = dict(zip(code.invars, values, strict=False))
        emitter.parameters = {
            id(v): p for v, p in zip(code.invars, code.kind.operands, strict=True)
        }
        emitter.in_place = {
            v: blocks[code.kind.operands.index(p)] for v, p in code.in_place.items()
        }
        if code.kind.mode == "combine":
            known.update(self.joined(emitter, values[len(code.invars) :]))
        env = emitter.run(code.equations, known)

        @pl.when(self.i > 0)
        def _() -> None:
            plgpu.barrier_wait(mem.drained)

        for k, v in enumerate(code.outvars):
            out = env[v] if not code.is_constant(v) else jnp.asarray(v.val)
            self.put(emitter, k, out)
        plgpu.commit_smem()
        plgpu.barrier_arrive(mem.ready)
        self.kernel.stamp(self.i, ts.COMPUTED)
        plgpu.barrier_arrive(mem.free)
        return self.g

    def value(self, i: int, ref: Ref) -> Value:
        """Operand i of the kind as a value; parts of a combine as a reference."""
        o, code = self.code.operands[i], self.code
        if o.param.use == "scalar":
            a = o.access
            return self.at(read(a.buffer, *[x.start for x in a.axes]))
        if o.param.use == "stream":
            index = code.kind.operands[i]
            # After the cut only the extents of a stream are left to use.
            combine = code.kind.mode == "combine"
            return Pages(index, 0 if combine else code.stream_of(index).page[0])
        return ref if o.parts else resident(code.blocks[i], ref)

    def joined(self, emitter: Emitter, refs: Sequence[Ref]) -> dict[Any, Value]:
        """Accumulators or carries of all parts, joined in order."""
        code, parts = self.code, self.code.kind.parts
        blocks = code.blocks[len(code.invars) :]
        if code.kind.task.cut == "fold":

            def part(i: Any) -> list[Value]:
                whole = [
                    resident(b, r.at[i]) for b, r in zip(blocks, refs, strict=True)
                ]
                return [
                    emitter.whole(x, b.features) if isinstance(x, Tile) else x
                    for x, b in zip(whole, blocks, strict=True)
                ]

            outs = emitter.merge(code.cut_equations[0], parts, part)
            return dict(zip(code.cut_vars, outs, strict=True))

        def total(ref: Ref) -> Callable[..., Value]:
            def at(start: Any, rows: int, _: Any) -> Value:
                loaded = [
                    plgpu.load(
                        ref.at[p, pl.ds(start, rows)], layout=WG, optimized=False
                    )
                    for p in range(parts)
                ]
                value = loaded[0]
                for x in loaded[1:]:
                    value = value + x
                return value

            return at

        return {
            v: emitter.tile(b.features, total(r))
            for v, b, r in zip(code.cut_vars, blocks, refs, strict=True)
        }

    def put(self, emitter: Emitter, k: int, value: Value) -> None:
        """Result k into its staging slot."""
        code, block = self.code, self.code.results[k]
        ref = self.kernel.memory.staging[code.index][k]
        if block.column:
            value = value if jnp.ndim(value) else emitter.as_column(value)
            ref[...] = value.astype(block.dtype)
            return
        tiled = len(ref.shape) == 3

        def step(start: Any, rows: int, carry: Value) -> Value:
            memo: dict[int, Value] = {}
            v = emitter.rows(value, start, rows, memo).astype(block.dtype)
            if block.wide:
                ref.at[pl.ds(start, rows)][...] = v
            elif not tiled:
                ref.at[:, pl.ds(start, rows)].transpose((1, 0))[...] = v
            else:
                for j in range(rows // 64):
                    part = v if rows == 64 else v[64 * j : 64 * j + 64]
                    at = (
                        j
                        if isinstance(start, int) and start == 0
                        else (lax.div(start, 64) + j)
                    )
                    ref.at[at].transpose((1, 0))[...] = part
            return carry

        emitter.loop(block.features, step, 0)


def _clear(block: PageBlock, first: Value, count: Value) -> None:
    """Zero the rows of a block that do not exist: they may hold NaN."""
    for chunk in block.chunks:
        for r in range(0, block.rows, 64):
            part = chunk if block.rows == 64 else chunk.at[pl.ds(r, 64)]
            v = plgpu.load(part, layout=WG, optimized=False)
            row = plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=WG) + first + r
            zero = plgpu.layout_cast(jnp.zeros(v.shape, v.dtype), WG)
            part[...] = jnp.where(row < count, v, zero)


def consumer(kernel: Kernel) -> None:
    """Run the bodies."""

    def branch(code: Code) -> Callable[[Value, Value], Value]:
        return lambda i, g: _Consumer(kernel, code, i, g).run()

    count, _ = walk(kernel, [branch(c) for c in kernel.codes])
    _observe_last(kernel.memory.drained, count)


def storer(kernel: Kernel) -> None:
    """Write results to device memory, then signal."""
    mem = kernel.memory

    def branch(code: Code) -> Callable[[Value, Value], Value]:
        def run(i: Value, state: Value) -> Value:
            at = Instruction(kernel, i)
            plgpu.barrier_wait(mem.ready)
            kernel.stamp(i, ts.BEGAN)
            for k, block in enumerate(code.results):
                layout = code.layouts[block.operand.access.buffer]
                flat = kernel.counters is not None
                for copy in stores(block, layout, at, flat=flat):
                    refs = mem.raw_staging if copy.raw else mem.staging
                    source = _part(refs[code.index][k], copy.shared)
                    _copy_out(kernel, at, copy, source)
            plgpu.commit_smem_to_gmem_group()
            plgpu.wait_smem_to_gmem(0)
            kernel.stamp(i, ts.STORED)
            plgpu.barrier_arrive(mem.drained)
            if kernel.counters is not None:
                _signal(kernel.counters, at.word(encode.SIGNAL))
            else:
                plgpu.barrier_arrive(mem.done)
            kernel.stamp(i, ts.SIGNALLED)
            return state

        return run

    walk(kernel, [branch(c) for c in kernel.codes])


def _signal(counters: Counters, event: Value) -> None:
    @pl.when(event >= 0)
    def _() -> None:
        counters.signal(event)


def _copy_out(kernel: Kernel, at: Instruction, copy: Copy, source: Ref) -> None:
    target = kernel.memory.arrays[copy.array].at[copy.index]
    inside: Value = None
    for start, n in copy.guard:
        one = at(start) < n
        inside = one if inside is None else jnp.logical_and(inside, one)
    if inside is None:
        plgpu.copy_smem_to_gmem(source, target, commit_group=False)
        return

    @pl.when(inside)
    def _() -> None:
        plgpu.copy_smem_to_gmem(source, target, commit_group=False)
