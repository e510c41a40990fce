"""What the roles need to know of one kind: forms, layouts, streams, equations."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mkdsl.errors import PlanError
from mkdsl.lang import program as dsl
from mkdsl.lang.body import Body, is_literal
from mkdsl.lang.expr import Expr, expr, maximum, minimum, var
from mkdsl.lang.program import Dot, Scratch
from mkdsl.lang.scratch import scratch_of, stored_in_place
from mkdsl.lower.blocked import blocked_operand
from mkdsl.lower.emit.blocks import Block, block_of, loads, tiled_page
from mkdsl.lower.ir import Kind
from mkdsl.lower.layout import Layout, Operand, operands, results
from mkdsl.lower.pages import (
    kind_streams,
    round_up,
    stacks,
    stream_operands,
    stream_page,
)


@dataclass(frozen=True, eq=False)
class Stream:
    """One stream of a kind.

    Attributes:
        parameters: parameters of the task that it reads.
        operands: their accesses.
        page: (rows, features) of a page.
        full_pages, rest: of a dot: whole pages, features of a last, shorter one.
        first: of a dot: where its depth starts in operand B.
        count: of a fold: rows that exist.
        tiled: pages are [rows, features], brought by one copy; else [rows, 64] blocks.
    """

    parameters: tuple[int, ...]
    operands: tuple[Operand, ...]
    page: tuple[int, int]
    is_fold: bool
    full_pages: int
    rest: int
    first: Expr
    count: Expr
    tiled: bool

    @property
    def stacks(self) -> int:
        """Pieces of the depth in a page, see pages.stacks."""
        return 1 if self.is_fold else stacks(self.page[0])

    @property
    def width(self) -> int:
        """Features of a page, or of each of its pieces."""
        return self.page[1] // self.stacks

    @property
    def copies(self) -> int:
        """Copies of one page."""
        return self.stacks * (1 if self.tiled else self.width // 64)


@dataclass(frozen=True, eq=False)
class Code:
    """One kind, ready to be emitted.

    Attributes:
        operands: operands of the kind; blocks: their forms, None if not resident.
        residents: the forms of the resident ones; results: of the results.
        invars: variables of the body for the operands of the task.
        equations, outvars: what this mode computes.
        extents: (parameter, axis) -> elements that exist.
        arrivals: copies of its resident operands, or 1 if it has none; of one that
            comes in blocks, those of the first block.
        blocked: which of `residents` comes in blocks, or -1.
        block_arrivals: copies of every later block.
        in_place: id of a computed operand of dots -> parameter whose block it takes.
    """

    index: int
    kind: Kind
    columns: int
    layouts: Mapping[str, Layout]
    operands: tuple[Operand, ...]
    blocks: tuple[Any, ...]
    residents: tuple[Block, ...]
    results: tuple[Block, ...]
    streams: tuple[Stream, ...]
    scratch: tuple[Scratch, ...]
    invars: tuple[Any, ...]
    equations: tuple[Any, ...]
    outvars: tuple[Any, ...]
    cut_equations: tuple[Any, ...]
    cut_vars: tuple[Any, ...]
    extents: Mapping[tuple[int, int], Expr]
    arrivals: int
    blocked: int
    block_arrivals: int
    in_place: Mapping[int, int]

    @property
    def stacked(self) -> tuple[int, ...]:
        """Width of the pieces of every dot whose pages are stacked."""
        return tuple(s.width for s in self.streams if s.stacks > 1)

    def stream_of(self, parameter: int) -> Stream:
        """The stream that reads a parameter of the task."""
        return next(s for s in self.streams if parameter in s.parameters)

    @staticmethod
    def is_constant(v: Any) -> bool:
        """True for a result that is a literal."""
        return is_literal(v)


def code_of(
    index: int,
    kind: Kind,
    layouts: Mapping[str, Layout],
    page_bytes: int,
    pieced: frozenset[str],
) -> Code:
    """Everything that the roles need to know of a kind."""
    body: Body = kind.task.body
    equations, outvars = _equations(kind, body)
    in_place = stored_in_place(equations, body.invars, outvars, kind.task.columns)
    columns = kind.task.columns
    given = operands(kind, pieced)
    long = kind.task.long if kind.pieces else 0
    blocks = tuple(
        None if o.param.use in ("scalar", "stream") else block_of(o, columns, long)
        for o in given
    )
    residents = tuple(b for b in blocks if b is not None)
    n = blocked_operand(kind) if kind.blocks > 1 else -1
    blocked = n if n < 0 else sum(b is not None for b in blocks[:n])
    copies = [
        _copies(b, layouts, kind.blocks if i == blocked else 1)
        for i, b in enumerate(residents)
    ]
    return Code(
        index=index,
        kind=kind,
        columns=round_up(columns, 8),
        layouts=layouts,
        operands=given,
        blocks=blocks,
        residents=residents,
        results=tuple(block_of(o, columns) for o in results(kind, pieced)),
        streams=tuple(_streams(kind, given, layouts, page_bytes)),
        scratch=_scratch(kind, body, equations, in_place),
        invars=tuple(body.invars[i] for i in kind.operands),
        equations=equations,
        outvars=outvars,
        cut_equations=body.cut_equations,
        cut_vars=body.cut_vars,
        extents=_extents(kind, given),
        in_place=in_place,
        arrivals=max(1, sum(copies)),
        blocked=blocked,
        block_arrivals=copies[blocked] if blocked >= 0 else 0,
    )


def _copies(block: Block, layouts: Mapping[str, Layout], parts: int) -> int:
    layout = layouts[block.operand.access.buffer]
    return len(loads(block, layout, lambda e: 0, 0, parts))


def _equations(kind: Kind, body: Body) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    if kind.mode == "full":
        return body.equations, body.outvars
    if kind.mode == "partial":
        return (*body.before, *body.cut_equations), body.cut_vars
    return body.after, body.outvars


def _scratch(
    kind: Kind, body: Body, equations: Sequence[Any], in_place: Iterable[int]
) -> tuple[Scratch, ...]:
    own = scratch_of(equations, body.invars, kind.task.columns, in_place)
    if kind.mode != "combine" or kind.task.cut != "fold":
        return own
    merge = body.cut_equations[0].params["merge"]
    return (*scratch_of(merge.eqns, (), kind.task.columns), *own)


def check_streams(program: dsl.Program) -> None:
    """Refuse a program with a stream that the tensor cores cannot read.

    Raises:
        PlanError: it is not bfloat16, or a fold walks it in blocks of other than 64,
            128, .. rows.
    """
    for call in program.calls():
        task = call.task
        for i in {i for s in task.streams for i in stream_operands(s)}:
            param = task.params[i]
            if param.dtype != "bfloat16":
                raise PlanError(
                    f"call {call.name}: task {task.name} streams {param.name}: "
                    f"{param.dtype}{list(param.shape)}, but streams are operands of "
                    "the tensor cores and bfloat16",
                    call.src,
                    "store it as bfloat16, or read it as a whole tile",
                )
        for s in task.streams:
            if not isinstance(s, Dot) and s.block % 64:
                raise PlanError(
                    f"call {call.name}: task {task.name} folds over blocks of "
                    f"{s.block} rows",
                    call.src,
                    "rows of a block are a side of the tensor cores: give mk.fold a "
                    "multiple of 64",
                )


def _streams(
    kind: Kind,
    given: Sequence[Operand],
    layouts: Mapping[str, Layout],
    page_bytes: int,
) -> list[Stream]:
    found: list[Stream] = []
    for s in kind_streams(kind):
        parameters = stream_operands(s)
        reads = tuple(given[kind.operands.index(p)] for p in parameters)
        page = stream_page(kind, s, page_bytes)
        first = expr(0)
        count = expr(0)
        full, rest = 0, 0
        if isinstance(s, Dot):
            depth = round_up(reads[0].access.shape[-1], 64)
            full, rest = divmod(depth, page[1])
            if kind.mode == "partial" and s.lhs is None:
                first = var("part") * reads[0].access.shape[-1]
        else:
            row = next(a for a in reads[0].access.axes if not a.squeezed)
            count = row.extent if row.extent is not None else expr(row.size)
        is_fold = not isinstance(s, Dot)
        # A shorter page is no contiguous piece of the slot: it comes in blocks.
        whole = page[0] * page[1] * 2 == page_bytes and not rest
        tiled = (
            not is_fold
            and whole
            and all(tiled_page(o, layouts[o.access.buffer], page) for o in reads)
        )
        found.append(
            Stream(parameters, reads, page, is_fold, full, rest, first, count, tiled)
        )
    return found


def _extents(kind: Kind, given: Sequence[Operand]) -> dict[tuple[int, int], Expr]:
    found: dict[tuple[int, int], Expr] = {}
    for parameter, o in zip(kind.operands, given, strict=False):
        kept = [
            (a, n)
            for a, n in zip(o.access.axes, o.access.view, strict=True)
            if not a.squeezed
        ]
        for axis, (a, n) in enumerate(kept):
            there = minimum(maximum(n - a.start, 0), a.size)
            found[parameter, axis] = there if a.extent is None else a.extent
    return found
