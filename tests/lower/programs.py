"""Programs built by hand from the dataclasses, for the tests of the compiler.

    mlp()            two calls outside a scan: gate_up, down + residual
    attention()      one call: a fold over the cache and the append of the new row
    two_layers()     a scan that carries x as [L + 1, B, D]
    llama()          a whole decode step, at the shape of Llama-3.2-1B by default

Task bodies are None: the middle of the compiler never looks at them.
"""

import sys
from collections.abc import Sequence

from mkdsl.errors import SrcInfo
from mkdsl.lang.expr import Expr, ExprLike, cdiv, expr, maximum, read, var
from mkdsl.lang.program import (
    Access,
    Axis,
    Buffer,
    Call,
    Cut,
    Dot,
    Fold,
    Output,
    Param,
    Program,
    Role,
    Scan,
    Scratch,
    Stream,
    TaskDef,
    Use,
)

LAYER, G0, G1 = var("layer"), var("g0"), var("g1")
ROWS = 64


def here(depth: int = 2) -> SrcInfo:
    """The line that called the caller of this function."""
    return SrcInfo(__file__, sys._getframe(depth).f_lineno)


def at(index: ExprLike) -> Axis:
    """One index; the dimension is absent from the task's value."""
    return Axis(expr(index), 1, squeezed=True)


def block(start: ExprLike, size: int, extent: Expr | None = None) -> Axis:
    """Elements [start, start + size), of which `extent` are real."""
    return Axis(expr(start), size, extent=extent)


def on(buffer: Buffer, *axes: Axis, view: Sequence[int] | None = None) -> Access:
    """A block of a buffer or of a reshaped view of it."""
    return Access(buffer.name, tuple(view or buffer.shape), axes, src=here())


def array(
    name: str, shape: Sequence[int], dtype: str = "bfloat16", role: Role = "temp"
) -> Buffer:
    """A buffer; 4-byte arrays of tiles hold their columns before the features."""
    tiles = dtype in ("float32", "int32") and role == "temp" and len(shape) >= 2
    return Buffer(
        name, tuple(shape), dtype, role, len(shape) - 2 if tiles else None, here()
    )


def tile(name: str, *shape: int, dtype: str = "bfloat16", use: Use = "tile") -> Param:
    """An operand or a result."""
    return Param(name, shape, dtype, use)


def task(
    name: str,
    params: Sequence[Param],
    results: Sequence[Param],
    columns: int,
    streams: Sequence[Stream] = (),
    cut: Cut = "none",
    before: Sequence[int] = (),
    after: Sequence[int] = (),
    scratch: Sequence[Scratch] = (),
) -> TaskDef:
    """A task without a body."""
    return TaskDef(
        name,
        f"{name}-digest",
        tuple(params),
        tuple(results),
        columns,
        tuple(streams),
        tuple(scratch),
        cut,
        tuple(before),
        tuple(after),
        src=here(),
    )


def call(
    name: str,
    definition: TaskDef,
    grid: Sequence[int],
    ins: Sequence[Access],
    outs: Sequence[Access],
) -> Call:
    """A call."""
    return Call(name, definition, tuple(grid), tuple(ins), tuple(outs), here())


def gate_up_task(b: int, d: int, rows: int = ROWS) -> TaskDef:
    """silu(norm(x) @ gate.T) * (norm(x) @ up.T)."""
    return task(
        "gate_up",
        [
            tile("x", b, d),
            tile("scale", d, use="vector"),
            tile("w_gate", rows, d, use="stream"),
            tile("w_up", rows, d, use="stream"),
        ],
        [tile("h", b, rows)],
        b,
        [Dot(None, 2, rows, d), Dot(None, 3, rows, d)],
        "dot",
        before=(0, 1, 2, 3),
        scratch=[Scratch("operand", d)],
    )


def residual_task(name: str, b: int, depth: int, rows: int = ROWS) -> TaskDef:
    """x + h @ w.T."""
    return task(
        name,
        [
            tile("h", b, depth),
            tile("w", rows, depth, use="stream"),
            tile("x", b, rows),
        ],
        [tile("y", b, rows)],
        b,
        [Dot(0, 1, rows, depth)],
        "dot",
        before=(0, 1),
        after=(2,),
    )


def mlp(b: int = 8, d: int = 256, i: int = 512, rows: int = ROWS) -> Program:
    """y = x + down(gate_up(norm(x))), weights [out, in]."""
    x = array("x", (b, d), role="input")
    scale = array("scale", (d,), role="input")
    w_gate = array("w_gate", (i, d), role="input")
    w_up = array("w_up", (i, d), role="input")
    w_down = array("w_down", (d, i), role="input")
    h, y = array("h", (b, i)), array("y", (b, d))
    row = (block(G0 * rows, rows), block(0, d))
    gate_up = call(
        "gate_up",
        gate_up_task(b, d, rows),
        (cdiv(i, rows),),
        [
            on(x, block(0, b), block(0, d)),
            on(scale, block(0, d)),
            on(w_gate, *row),
            on(w_up, *row),
        ],
        [on(h, block(0, b), block(G0 * rows, rows))],
    )
    down = call(
        "down",
        residual_task("down", b, i, rows),
        (cdiv(d, rows),),
        [
            on(h, block(0, b), block(0, i)),
            on(w_down, block(G0 * rows, rows), block(0, i)),
            on(x, block(0, b), block(G0 * rows, rows)),
        ],
        [on(y, block(0, b), block(G0 * rows, rows))],
    )
    args = (x, scale, w_gate, w_up, w_down)
    return Program(
        "mlp",
        (*args, h, y),
        tuple(a.name for a in args),
        (gate_up, down),
        (Output("y", None, y.shape),),
    )


def attention_task(g: int, d: int, s: int, blocks: int) -> TaskDef:
    """Online softmax over the cache, the new row merged in after the fold."""
    carries = (((g, d), "float32"), ((g, 1), "float32"), ((g, 1), "float32"))
    return task(
        "attend",
        [
            tile("q", g, d),
            tile("k", s, d, use="stream"),
            tile("v", s, d, use="stream"),
            tile("k_new", 1, d, use="vector"),
            tile("v_new", 1, d, use="vector"),
            tile("length", dtype="int32", use="scalar"),
        ],
        [
            tile("out", g, d),
            tile("k_row", 1, d, use="vector"),
            tile("v_row", 1, d, use="vector"),
        ],
        g,
        [Fold((1, 2), blocks, carries)],
        "fold",
        before=(0, 1, 2),
        after=(0, 3, 4),
    )


def attend(
    sizes: tuple[int, int, int, int, int],
    arrays: Sequence[Buffer],
    lengths: Buffer,
    window: int | None = None,
    blocks: int = 128,
    layer: Expr | None = None,
) -> Call:
    """The call over (row of the batch, kv head).

    arrays: q, k_new, v_new, k cache, v cache, out. With `layer` every array has the
    layers in front.
    """
    b, kv, g, d, s = sizes
    q, k_new, v_new, k, v, out = arrays
    lead = () if layer is None else (at(layer),)
    heads = (*(a.shape[0] for a in (q,) if lead), b, kv, g, d)
    single = (*(a.shape[0] for a in (q,) if lead), b, kv, d)
    n = read(lengths.name, G0)
    first = expr(0) if window is None else maximum(0, n + 1 - window)
    rows = s if window is None else min(s, window)
    past = (*lead, at(G0), at(G1), block(first, rows, n - first), block(0, d))
    new = (*lead, at(G0), at(G1), block(n, 1), block(0, d))
    token = (*lead, block(G0, 1), at(G1), block(0, d))
    group = (*lead, at(G0), at(G1), block(0, g), block(0, d))
    return call(
        "attend" if window is None else "attend_window",
        attention_task(g, d, s if window is None else rows, blocks),
        (b, kv),
        [
            on(q, *group, view=heads),
            on(k, *past),
            on(v, *past),
            on(k_new, *token, view=single),
            on(v_new, *token, view=single),
            on(lengths, at(G0)),
        ],
        [on(out, *group, view=heads), on(k, *new), on(v, *new)],
    )


def attention(
    b: int = 2,
    kv: int = 2,
    g: int = 4,
    d: int = 64,
    s: int = 1024,
    window: int | None = None,
) -> Program:
    """One attention layer; the cache is state, q, k, v are arguments."""
    q = array("q", (b, kv * g * d), role="input")
    k_new = array("k_new", (b, kv * d), role="input")
    v_new = array("v_new", (b, kv * d), role="input")
    lengths = array("lengths", (b,), "int32", "input")
    k = array("k", (b, kv, s, d), role="state")
    v = array("v", (b, kv, s, d), role="state")
    out = array("out", (b, kv * g * d))
    step = attend((b, kv, g, d, s), (q, k_new, v_new, k, v, out), lengths, window)
    return Program(
        "attention",
        (q, k_new, v_new, lengths, k, v, out),
        ("q", "k_new", "v_new", "lengths", "k", "v"),
        (step,),
        (Output("out", None, out.shape), Output("k"), Output("v")),
    )


def copy_task(name: str, b: int, d: int) -> TaskDef:
    """A tile as it is."""
    return task(name, [tile("x", b, d)], [tile("y", b, d)], b)


def mlp_calls(
    arrays: Sequence[Buffer], x: Access, out: Access, rows: int = ROWS, tag: str = ""
) -> tuple[Call, Call]:
    """gate_up and down + residual of one layer.

    arrays: scale, w_gate, w_up, w_down, h, each with the layers in front.
    x: the whole input [B, D]; out: the tile [B, rows] at g0 of the result.
    """
    scale, w_gate, w_up, w_down, h = arrays
    _, i, d = w_gate.shape
    b = h.shape[1]
    row = (at(LAYER), block(G0 * rows, rows), block(0, d))
    gate_up = call(
        f"gate_up{tag}",
        gate_up_task(b, d, rows),
        (cdiv(i, rows),),
        [x, on(scale, at(LAYER), block(0, d)), on(w_gate, *row), on(w_up, *row)],
        [on(h, at(LAYER), block(0, b), block(G0 * rows, rows))],
    )
    tile_of_x = Access(
        x.buffer, x.view, (*x.axes[:-1], block(G0 * rows, rows)), src=x.src
    )
    down = call(
        f"down{tag}",
        residual_task("down", b, i, rows),
        (cdiv(d, rows),),
        [
            on(h, at(LAYER), block(0, b), block(0, i)),
            on(w_down, at(LAYER), block(G0 * rows, rows), block(0, i)),
            tile_of_x,
        ],
        [out],
    )
    return gate_up, down


def two_layers(
    b: int = 8, d: int = 256, i: int = 512, length: int = 2, variants: int = 1
) -> Program:
    """x0 copied into x[0]; layer l writes x[l + 1]; the last x copied out.

    With two variants the layers alternate between two call sites of the same tasks.
    """
    rows = ROWS
    x0 = array("x0", (b, d), role="input")
    weights = [
        array("scale", (length, d), role="input"),
        array("w_gate", (length, i, d), role="input"),
        array("w_up", (length, i, d), role="input"),
        array("w_down", (length, d, i), role="input"),
    ]
    x, y = array("x", (length + 1, b, d)), array("y", (b, d))
    h = array("h", (length, b, i))
    part = block(G0 * rows, rows)
    enter = call(
        "enter",
        copy_task("copy", b, rows),
        (cdiv(d, rows),),
        [on(x0, block(0, b), part)],
        [on(x, at(0), block(0, b), part)],
    )
    sites = tuple(
        mlp_calls(
            (*weights, h),
            on(x, at(LAYER), block(0, b), block(0, d)),
            on(x, at(LAYER + 1), block(0, b), part),
            tag="" if variants == 1 else f"_{v}",
        )
        for v in range(variants)
    )
    layers = Scan(length, sites, tuple(n % variants for n in range(length)))
    leave = call(
        "leave",
        copy_task("copy", b, rows),
        (cdiv(d, rows),),
        [on(x, at(length), block(0, b), part)],
        [on(y, block(0, b), part)],
    )
    return Program(
        "two_layers",
        (x0, *weights, x, h, y),
        ("x0", *(w.name for w in weights)),
        (enter, layers, leave),
        (Output("y", None, y.shape),),
    )


def head_task(name: str, b: int, hidden: int, d: int, rope: bool) -> TaskDef:
    """One head of a projection of norm(x), rotated if it is q or k."""
    angles = [tile("cos", b, d, dtype="float32"), tile("sin", b, d, dtype="float32")]
    return task(
        name,
        [
            tile("x", b, hidden),
            tile("scale", hidden, use="vector"),
            tile("w", d, hidden, use="stream"),
            *(angles if rope else []),
        ],
        [tile("y", b, d)],
        b,
        [Dot(None, 2, d, hidden)],
        "dot",
        before=(0, 1, 2),
        after=(3, 4) if rope else (),
        scratch=[
            Scratch("operand", hidden),
            *([Scratch("roll", d, after_cut=True)] if rope else []),
        ],
    )


def logits_task(b: int, d: int, rows: int) -> TaskDef:
    """A tile of logits with its maximum and the index of the maximum."""
    return task(
        "logits",
        [
            tile("x", b, d),
            tile("scale", d, use="vector"),
            tile("w", rows, d, use="stream"),
        ],
        [
            tile("logits", b, rows, dtype="float32"),
            tile("top", b, 1, dtype="float32"),
            tile("index", b, 1, dtype="int32"),
        ],
        b,
        [Dot(None, 2, rows, d)],
        "dot",
        before=(0, 1, 2),
        scratch=[Scratch("operand", d)],
    )


def argmax_call(
    name: str, arrays: Sequence[Buffer], outs: Sequence[Buffer], size: int
) -> Call:
    """The maximum of `size` (value, index) pairs: the index, or both.

    arrays: values and indices [B, n]; outs: the same of [B, n / size], or the index.
    """
    b, n = arrays[0].shape
    names = ("top", "index")
    dtypes = [o.dtype for o in outs]
    return call(
        name,
        task(
            name,
            [
                tile(t, b, size, dtype=a.dtype)
                for t, a in zip(names, arrays, strict=True)
            ],
            [tile(f"y{i}", b, 1, dtype=dtype) for i, dtype in enumerate(dtypes)],
            b,
        ),
        (cdiv(n, size),),
        [on(a, block(0, b), block(G0 * size, size)) for a in arrays],
        [on(o, block(0, b), block(G0, 1)) for o in outs],
    )


def llama(
    b: int = 8,
    layers: int = 16,
    d: int = 2048,
    i: int = 8192,
    heads: int = 32,
    kv: int = 8,
    hd: int = 64,
    vocab: int = 128256,
    s: int = 2048,
    rows: int = ROWS,
) -> Program:
    """Token -> next token: embedding, angles, layers, logits, argmax."""
    state = {
        n: array(n, (layers, b, kv, s, hd), role="state")
        for n in ("k_cache", "v_cache")
    }
    given = {
        "tokens": array("tokens", (b,), "int32", "input"),
        "lengths": array("lengths", (b,), "int32", "input"),
        "embed": array("embed", (vocab, d), role="input"),
        "cos": array("cos", (s, hd), "float32", "input"),
        "sin": array("sin", (s, hd), "float32", "input"),
        "norm_1": array("norm_1", (layers, d), role="input"),
        "w_q": array("w_q", (layers, heads * hd, d), role="input"),
        "w_k": array("w_k", (layers, kv * hd, d), role="input"),
        "w_v": array("w_v", (layers, kv * hd, d), role="input"),
        "w_o": array("w_o", (layers, d, heads * hd), role="input"),
        "norm_2": array("norm_2", (layers, d), role="input"),
        "w_gate": array("w_gate", (layers, i, d), role="input"),
        "w_up": array("w_up", (layers, i, d), role="input"),
        "w_down": array("w_down", (layers, d, i), role="input"),
        "norm_out": array("norm_out", (d,), role="input"),
    }
    tiles = cdiv(vocab, rows)
    groups = cdiv(tiles, 64)
    temp = {
        "x": array("x", (layers + 1, b, d)),
        "cos_now": array("cos_now", (b, hd), "float32"),
        "sin_now": array("sin_now", (b, hd), "float32"),
        "q": array("q", (layers, b, heads * hd)),
        "k": array("k", (layers, b, kv * hd)),
        "v": array("v", (layers, b, kv * hd)),
        "attn": array("attn", (layers, b, heads * hd)),
        "mid": array("mid", (layers, b, d)),
        "h": array("h", (layers, b, i)),
        "logits": array("logits", (b, vocab), "float32"),
        "top": array("top", (b, tiles), "float32"),
        "index": array("index", (b, tiles), "int32"),
        "few_top": array("few_top", (b, groups), "float32"),
        "few_index": array("few_index", (b, groups), "int32"),
        "token": array("token", (b, 1), "int32"),
    }
    few = [temp["few_top"], temp["few_index"]]
    u = given | state | temp
    n = read("lengths", G0)
    piece = min(d, 256)
    embed = call(
        "embed",
        copy_task("embed", 1, piece),
        (b, cdiv(d, piece)),
        [on(u["embed"], block(read("tokens", G0), 1), block(G1 * piece, piece))],
        [on(u["x"], at(0), block(G0, 1), block(G1 * piece, piece))],
    )
    angle = [tile(t, 1, hd, dtype="float32") for t in ("cos", "sin")]
    angles = call(
        "angles",
        task("angles", angle, angle, 1),
        (b,),
        [on(u[t], block(n, 1), block(0, hd)) for t in ("cos", "sin")],
        [on(u[t], block(G0, 1), block(0, hd)) for t in ("cos_now", "sin_now")],
    )
    x = on(u["x"], at(LAYER), block(0, b), block(0, d))

    def head(name: str, count: int, rope: bool) -> Call:
        now = [on(u[t], block(0, b), block(0, hd)) for t in ("cos_now", "sin_now")]
        return call(
            name,
            head_task("head_rope" if rope else "head", b, d, hd, rope),
            (count,),
            [
                x,
                on(u["norm_1"], at(LAYER), block(0, d)),
                on(u[f"w_{name}"], at(LAYER), block(G0 * hd, hd), block(0, d)),
                *(now if rope else []),
            ],
            [on(u[name], at(LAYER), block(0, b), block(G0 * hd, hd))],
        )

    depth = heads * hd
    out = call(
        "o",
        residual_task("o", b, depth, rows),
        (cdiv(d, rows),),
        [
            on(u["attn"], at(LAYER), block(0, b), block(0, depth)),
            on(u["w_o"], at(LAYER), block(G0 * rows, rows), block(0, depth)),
            on(u["x"], at(LAYER), block(0, b), block(G0 * rows, rows)),
        ],
        [on(u["mid"], at(LAYER), block(0, b), block(G0 * rows, rows))],
    )
    layer = (
        head("q", heads, True),
        head("k", kv, True),
        head("v", kv, False),
        attend(
            (b, kv, heads // kv, hd, s),
            [u[t] for t in ("q", "k", "v", "k_cache", "v_cache", "attn")],
            u["lengths"],
            layer=LAYER,
        ),
        out,
        *mlp_calls(
            [u[t] for t in ("norm_2", "w_gate", "w_up", "w_down", "h")],
            on(u["mid"], at(LAYER), block(0, b), block(0, d)),
            on(u["x"], at(LAYER + 1), block(0, b), block(G0 * rows, rows)),
            rows,
        ),
    )
    logits = call(
        "logits",
        logits_task(b, d, rows),
        (tiles,),
        [
            on(u["x"], at(layers), block(0, b), block(0, d)),
            on(u["norm_out"], block(0, d)),
            on(u["embed"], block(G0 * rows, rows), block(0, d)),
        ],
        [
            on(u["logits"], block(0, b), block(G0 * rows, rows)),
            on(u["top"], block(0, b), block(G0, 1)),
            on(u["index"], block(0, b), block(G0, 1)),
        ],
    )
    some = argmax_call("argmax_some", [u[t] for t in ("top", "index")], few, 64)
    argmax = argmax_call("argmax", few, [u["token"]], groups)
    return Program(
        "llama",
        tuple(u.values()),
        tuple(given | state),
        (
            embed,
            angles,
            Scan(layers, (layer,), (0,) * layers),
            logits,
            some,
            argmax,
        ),
        (
            Output("token", None, (b, 1)),
            Output("logits", None, (b, vocab)),
            Output("k_cache"),
            Output("v_cache"),
        ),
    )
