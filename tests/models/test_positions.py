"""A decode step at positions up to 32767, against the same step in float64."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.cache import KVCache
from models.config import Rope
from models.decode import DecodeStep, decode_params, prefill
from models.llama import LlamaConfig
from models.params import Params
from models.registry import random_params

# That of Llama 3.1.
SCALED = Rope(5e5, "llama3", 8.0, 1.0, 4.0, 8192)
CONFIG = LlamaConfig(
    vocab_size=257,
    hidden_size=128,
    intermediate_size=192,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=64,
    norm_eps=1e-5,
    tied=False,
    max_length=131072,
    rope=SCALED,
)
LENGTHS = (4096, 8192, 32767)
SLOTS = 32768
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def arguments() -> tuple[Params, np.ndarray, jax.Array]:
    """Parameters, keys and values [2, L, B, KV, S, D] with NaN unused, and tokens."""
    params = random_params(CONFIG, jax.random.key(0), jnp.float32)
    size = (2, CONFIG.num_layers, len(LENGTHS), CONFIG.num_kv_heads, SLOTS, 64)
    old = np.random.default_rng(0).standard_normal(size, np.float32)
    for row, n in enumerate(LENGTHS):
        old[:, :, row, :, n:] = np.nan
    return params, old, jnp.array([3, 100, 256], jnp.int32)


def cache_of(old: np.ndarray) -> KVCache:
    """A cache of its own for every call, since it is donated."""
    return KVCache(*map(jnp.array, old), jnp.array(LENGTHS, jnp.int32))


def scaled_frequencies() -> np.ndarray:
    """Llama 3's frequencies as its authors' code has them, wave by wave."""
    found: list[float] = []
    for i in range(32):
        f = 5e5 ** -(i / 32)
        wave = 2 * np.pi / f
        if wave < 8192 / 4:
            found.append(f)
        elif wave > 8192 / 1:
            found.append(f / 8)
        else:
            smooth = (8192 / wave - 1) / (4 - 1)
            found.append((1 - smooth) * f / 8 + smooth * f)
    return np.array(found)


def float64_step(
    params: Params, old: np.ndarray, tokens: Any, frequencies: np.ndarray
) -> np.ndarray:
    """Logits [B, V]: one row, layer and head after the other."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

    def norm(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean() + 1e-5) * gain

    def turn(x: np.ndarray, n: int) -> np.ndarray:
        """Heads [N, D] as complex numbers (i, i + D / 2)."""
        z = (x[:, :32] + 1j * x[:, 32:]) * np.exp(1j * n * frequencies)
        return np.concatenate([z.real, z.imag], axis=1)

    def row(b: int) -> np.ndarray:
        n, x = LENGTHS[b], p["embed"][int(tokens[b])]
        for i in range(CONFIG.num_layers):
            w = {name: leaf[i] for name, leaf in p["layers"].items()}
            y = norm(x, w["input_norm"])
            q = turn((w["q"] @ y).reshape(6, 64), n)
            k, v = turn((w["k"] @ y).reshape(2, 64), n), (w["v"] @ y).reshape(2, 64)
            a = []
            for h in range(6):
                g = h // 3
                keys = np.vstack([old[0, i, b, g, :n], k[g]]).astype(np.float64)
                values = np.vstack([old[1, i, b, g, :n], v[g]]).astype(np.float64)
                scores = keys @ q[h] / 8
                weights = np.exp(scores - scores.max())
                a.append(weights @ values / weights.sum())
            x = x + w["o"] @ np.concatenate(a)
            y = norm(x, w["post_norm"])
            gate = w["gate"] @ y
            x = x + w["down"] @ (gate / (1 + np.exp(-gate)) * (w["up"] @ y))
        return p["head"] @ norm(x, p["norm"])

    return np.stack([row(b) for b in range(len(LENGTHS))])


@pytest.fixture(scope="module")
def exact(arguments: tuple[Params, np.ndarray, jax.Array]) -> np.ndarray:
    return float64_step(*arguments, scaled_frequencies())


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["xla", "simulate"])
def test_the_program(arguments: Any, exact: np.ndarray, implementation: Any) -> None:
    params, old, tokens = arguments
    step = DecodeStep(
        CONFIG, len(LENGTHS), SLOTS, logits=True, implementation=implementation
    )
    found, _ = step(decode_params(CONFIG, params), cache_of(old), tokens)
    np.testing.assert_allclose(found, exact, atol=TOLERANCE, rtol=0)


@pytest.mark.slow
def test_the_plain_forward_pass(arguments: Any, exact: np.ndarray) -> None:
    params, old, tokens = arguments
    one = jnp.ones(len(LENGTHS), jnp.int32)
    found, _ = prefill(CONFIG, params, cache_of(old), tokens[:, None], one)
    np.testing.assert_allclose(found, exact, atol=TOLERANCE, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [None, 32.0])
def test_another_scaling_shows(
    arguments: Any, exact: np.ndarray, factor: float | None
) -> None:
    """What the tests above tell apart."""
    params, old, tokens = arguments
    wrong = Rope(5e5) if factor is None else replace(SCALED, factor=factor)
    config = replace(CONFIG, rope=wrong)
    step = DecodeStep(config, len(LENGTHS), SLOTS, logits=True, implementation="xla")
    found, _ = step(decode_params(config, params), cache_of(old), tokens)
    assert (np.abs(found - exact).max(axis=1) > 10 * TOLERANCE).all()
