"""mk.megakernel as a function of JAX, and what its errors say."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mkdsl as mk
from mkdsl.lower.machine import H200, RTX_4090
from mkdsl.runtime.stages import TEXTS
from models.llama import decode_program
from tests.tiny_llama import TINY, example

Array = Any
F32 = jnp.float32
ROW = (1, 8)
SLOTS = 4


@mk.task
def append_row(x: Array) -> tuple[Array, Array]:
    """x + 1, and x."""
    return x + 1.0, x


def decode(params: Any, cache: Any, x: Array) -> Any:
    """y = x + 1; the cache gets x in its row `length`."""
    length = cache["length"]
    y, rows = mk.call(
        append_row,
        in_specs=(mk.whole,),
        out_specs=(
            mk.Spec(ROW, lambda: (0, 0)),
            mk.Into(cache["rows"], ROW, lambda: (length[0], 0)),
        ),
        out_shape=(mk.Shape(ROW, F32), None),
    )(x)
    return {"y": y, "rows": rows}


def arguments(length: int = 0) -> tuple[Any, Any, Array]:
    cache = {
        "rows": jnp.zeros((SLOTS, 8), F32),
        "length": jnp.array([length], jnp.int32),
    }
    return {"unused": [jnp.ones((2, 2))]}, cache, jnp.arange(8.0)[None]


def check(out: Any, x: Array, length: int) -> None:
    np.testing.assert_array_equal(out["y"], x + 1)
    want = np.zeros((SLOTS, 8))
    if length < SLOTS:
        want[length] = x[0]
    np.testing.assert_array_equal(out["rows"], want)


# ------------------------------------------------------------------ where it runs


@pytest.mark.parametrize("implementation", [None, "xla", "simulate"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["alone", "in jit"])
@pytest.mark.parametrize("length", [0, 3, SLOTS])
def test_call(implementation: Any, wrap: Callable[..., Any], length: int) -> None:
    f = mk.megakernel(decode, implementation=implementation)
    args = arguments(length)
    check(wrap(f)(*args), args[2], length)
    np.testing.assert_array_equal(args[1]["rows"], np.zeros((SLOTS, 8)))


@pytest.mark.parametrize("implementation", [None, "simulate"])
def test_every_loop_of_jax_and_one_trace(implementation: Any) -> None:
    f = mk.megakernel(decode, donate_argnums=1, implementation=implementation)

    def step(i: Array, carry: Any) -> Any:
        rows, x = carry
        out = f({}, {"rows": rows, "length": jnp.array([i], jnp.int32)}, x)
        return out["rows"], out["y"]

    def scanned(n: int, init: Any) -> Any:
        return jax.lax.scan(lambda c, i: (step(i, c), None), init, jnp.arange(n))[0]

    def looped(n: int, init: Any) -> Any:
        return jax.lax.while_loop(
            lambda c: c[0] < n, lambda c: (c[0] + 1, step(c[0], c[1])), (0, init)
        )[1]

    def counted(n: int, init: Any) -> Any:
        return jax.lax.fori_loop(0, n, step, init)

    x = jnp.arange(8.0)[None]
    want = np.arange(8.0) + np.arange(3)[:, None]
    for loop in (counted, looped, scanned):
        init = jnp.zeros((SLOTS, 8)), x
        rows, y = jax.jit(loop, static_argnums=0)(3, init)
        np.testing.assert_array_equal(rows[:3], want)
        np.testing.assert_array_equal(y, x + 3)
    assert f.traces == 1


@pytest.mark.slow
def test_a_step_traces_and_compiles_once_for_all_positions() -> None:
    f = mk.megakernel(decode_program(TINY, 2, 128), donate_argnums=1)
    params, cache, tokens = example(TINY, [3, 0], 128)
    for _ in range(4):
        tokens, new = f(params, cache, tokens)
        cache = replace(new, lengths=new.lengths + 1)
    assert f.traces == 1
    assert f.trace(params, cache, tokens).compilations == 1
    f(*example(TINY, [3, 0], 64))
    assert f.traces == 2


def test_only_state_in_donated_arguments_is_reused() -> None:
    params, cache, x = arguments()
    out = mk.megakernel(decode, donate_argnums=(1, 2))(params, cache, x)
    assert cache["rows"].is_deleted()
    assert not cache["length"].is_deleted()
    assert not x.is_deleted()
    check(out, x, 0)


@pytest.mark.slow
def test_simulation_of_a_model_agrees_with_xla() -> None:
    args = example(TINY, [5, 70], 128)
    tokens = [
        mk.megakernel(decode_program(TINY, 2, 128), implementation=i)(*args)[0]
        for i in ("xla", "simulate")
    ]
    np.testing.assert_array_equal(*tokens)


def test_keyword_and_numpy_arguments() -> None:
    params, cache, x = arguments(1)
    out = mk.megakernel(decode)(params, x=np.asarray(x, np.float64), cache=cache)
    check(out, x, 1)


def test_status_counts_writes_without_a_place() -> None:
    f = mk.megakernel(decode)
    assert f.status(*arguments(SLOTS - 1)) == 0
    assert jax.jit(f.status)(*arguments(SLOTS)) == 1
    assert f.traces == 1


# ----------------------------------------------------------------------- stages


def test_every_stage_prints() -> None:
    lowered = mk.megakernel(decode).lower(*arguments())
    # A float32 state is refused by the kernel; test_pictures.py prints one that is not.
    texts = {s: lowered.as_text(s) for s in TEXTS if s != "kernel"}
    assert "append_row" in texts["program"]
    assert "stablehlo" in texts["stablehlo"]
    assert texts["words"].startswith("sm 0")
    assert lowered.as_text("pages") == lowered.as_text("pages")
    with pytest.raises(mk.LaunchError, match=r"no stage 'sass'.*\n.*words"):
        lowered.as_text("sass")


def test_compiled_is_called_with_the_same_shapes() -> None:
    compiled = mk.megakernel(decode).lower(*arguments()).compile()
    args = arguments(2)
    check(compiled(*args), args[2], 2)
    assert "HloModule" in compiled.as_text()
    with pytest.raises(
        mk.LaunchError, match=r"argument x is float32\[2, 8\].*\[1, 8\]"
    ):
        compiled(*args[:2], jnp.ones((2, 8)))
    with pytest.raises(mk.LaunchError, match=r"argument x is int32\[1, 8\].*float32"):
        compiled(*args[:2], jnp.ones((1, 8), jnp.int32))
    with pytest.raises(mk.LaunchError, match="traced for"):
        compiled(args[0], {"rows": args[2]}, args[2])


def test_tracing_needs_shapes_alone() -> None:
    shapes = jax.eval_shape(arguments)
    traced = mk.megakernel(decode, name="step").trace(*shapes)
    assert traced.program.name == "step"
    assert traced.as_text().startswith("program step(")


# ----------------------------------------------------------- which implementation


def test_why() -> None:
    assert "cpu" in mk.megakernel(decode).why()
    assert mk.megakernel(decode).why().startswith("xla")
    asked = mk.megakernel(decode).lower(*arguments(), implementation="simulate")
    assert asked.why() == "simulate: asked for"


def test_a_named_implementation_that_cannot_run_says_why() -> None:
    f = mk.megakernel(decode, implementation="mosaic_gpu")
    with pytest.raises(mk.LaunchError, match="cannot run: it needs a CUDA device"):
        f(*arguments())
    with pytest.raises(mk.LaunchError, match="cannot run"):
        f.lower(*arguments())
    with pytest.raises(
        mk.LaunchError, match=r"'triton' is no implementation(.|\n)*xla"
    ):
        mk.megakernel(decode, implementation="triton")  # pyright: ignore


@pytest.mark.parametrize(
    ("kind", "machine", "want"),
    [
        ("NVIDIA H200", None, "mosaic_gpu: the device is a NVIDIA H200"),
        ("NVIDIA A100", None, "xla: no machine for device kind 'NVIDIA A100'"),
        ("NVIDIA A100", H200, "xla: machine 'h200' is a 'NVIDIA H200'"),
        (None, None, "xla: lowered for 'cuda' on a machine without"),
        (None, H200, "mosaic_gpu: the device is a NVIDIA H200"),
        ("NVIDIA GeForce RTX 4090", None, "xla: machine 'rtx4090'"),
        ("NVIDIA H200", RTX_4090, "xla: machine 'rtx4090'"),
        (None, RTX_4090, "xla: machine 'rtx4090'"),
    ],
)
def test_choice_on_cuda(
    kind: str | None, machine: Any, want: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mkdsl.runtime.execute.device_kind", lambda: kind)
    f = mk.megakernel(decode, machine=machine)
    lowered = f.lower(*arguments(), platforms=("cuda",))
    assert lowered.why().startswith(want)


@pytest.mark.parametrize(
    ("sms", "want"),
    [
        (None, "mosaic_gpu: the device is a NVIDIA H200"),
        (132, "mosaic_gpu: the device is a NVIDIA H200"),
        (131, "xla: machine 'h200' has 132 SMs, the device has 131: not all CTAs"),
    ],
)
def test_a_device_with_fewer_sms_would_hang(
    sms: int | None, want: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mkdsl.runtime.execute.device_kind", lambda: "NVIDIA H200")
    monkeypatch.setattr("mkdsl.runtime.execute.device_sms", lambda: sms)
    lowered = mk.megakernel(decode).lower(*arguments(), platforms=("cuda",))
    assert lowered.why().startswith(want)


def test_the_kernel_is_refused_on_a_machine_that_it_does_not_run_on() -> None:
    f = mk.megakernel(decode, implementation="mosaic_gpu", machine=RTX_4090)
    with pytest.raises(mk.LaunchError, match=r"cannot run: machine 'rtx4090'") as e:
        f.lower(*arguments(), platforms=("cuda",))
    assert "'simulate'" in str(e.value)


def test_the_kernel_is_one_custom_call_that_aliases_its_state() -> None:
    f = mk.megakernel(decode_program(TINY, 2, 128), donate_argnums=1, machine=H200)
    text = f.lower(*example(TINY, [5, 70], 128), platforms=("cuda",)).as_text()
    assert text.count("custom_call @") == 1
    assert text.count("tf.aliasing_output") == 2


# ------------------------------------------------------------------ what is refused


IMPLEMENTATIONS = [None, "xla", "simulate", "mosaic_gpu"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["alone", "in jit"])
def test_vmap_and_grad_are_refused(implementation: Any, wrap: Any) -> None:
    params, cache, x = arguments()
    f = wrap(
        lambda x: mk.megakernel(decode, implementation=implementation)(params, cache, x)
    )
    with pytest.raises(
        mk.LaunchError, match=r"'decode': jax.vmap is not supported(.|\n)*batch columns"
    ):
        jax.vmap(f)(x[None])
    with pytest.raises(
        mk.LaunchError, match="'decode': differentiation is not supported"
    ):
        jax.grad(lambda x: jnp.sum(f(x)["y"]))(x)


def test_gradients_around_a_megakernel_are_not_refused() -> None:
    f = mk.megakernel(decode)

    def loss(w: Array) -> Array:
        params, cache, x = arguments()
        return jnp.sum(w * f(params, cache, x)["y"])

    np.testing.assert_array_equal(jax.grad(loss)(jnp.ones(8)), np.arange(8) + 1)


SHARDED = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import mkdsl as mk
from tests.runtime.test_launch import arguments, decode
mesh = Mesh(np.array(jax.devices()), ("d",))
params, cache, x = arguments()
x = jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, "d")))
for f in (mk.megakernel(decode), jax.jit(mk.megakernel(decode))):
    try:
        f(params, cache, x)
    except mk.LaunchError as error:
        print(error)
"""


def test_sharded_arguments_are_refused() -> None:
    flags = "--xla_force_host_platform_device_count=2"
    result = subprocess.run(
        [sys.executable, "-c", SHARDED],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "argument x is sharded over 2 devices" in result.stdout
    assert "a computation over 2 devices is not supported" in result.stdout


# ------------------------------------------------------------------- bad arguments


def test_bad_arguments_are_named() -> None:
    f = mk.megakernel(decode)
    params, cache, x = arguments()
    with pytest.raises(mk.LaunchError, match=r"'decode\(.*missing.*'x'"):
        f(params, cache)
    with pytest.raises(mk.TraceError, match=r"argument x is a int(.|\n)*partial"):
        f(params, cache, 3)
    with pytest.raises(mk.TraceError, match=r"argument params\.unused\.0 .*uint8"):
        f({"unused": [jnp.ones(2, jnp.uint8)]}, cache, x)
