"""Choose tokens by their scores: temperature, then top-k, then top-p.

The order is that of Hugging Face's processors (transformers, generation/utils.py,
`_get_logits_processor`). The draw is a Gumbel-max: the token of the largest `scaled
score + Gumbel noise` has the probability of its softmax. The noise belongs to key, row,
position and token, so a row's tokens depend neither on other rows nor on how many there
are, and a text that is continued later continues the same stream.
"""

# The annotations of jax have gaps, on which strict pyright insists.
# pyright: reportUnknownMemberType=false

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

type PerRow = float | Any
"""A number, or an array [B] of one for each row."""

_RULES: dict[str, tuple[Any, str]] = {
    "temperature": (
        lambda x: np.isfinite(x) & (x >= 0),
        "finite and not negative; 0 takes the best token",
    ),
    "top_k": (lambda x: x >= 0, "0 or more tokens; 0 keeps all"),
    "top_p": (lambda x: (x > 0) & (x <= 1), "in (0, 1]; 1 keeps all"),
}


def sample(
    logits: jax.Array,
    key: jax.Array,
    temperature: PerRow = 1.0,
    top_k: PerRow = 0,
    top_p: PerRow = 1.0,
    *,
    position: PerRow = 0,
) -> jax.Array:
    """Draw a token of each row. A pure function, also under `jax.jit`.

    Args:
        logits: [B, V].
        key: Of `jax.random.key`, the same for all rows and positions.
        temperature: Divides the scores; 0 takes the best token, the lowest on ties.
        top_k: Keep so many of the best tokens, the lowest on ties; 0 keeps all.
        top_p: Of these keep the fewest best ones whose probability is at least this;
            1 keeps all. The best token is always kept.
        position: Of the token that is drawn, in its text.

    Returns:
        int32 [B].

    Raises:
        ValueError: A number is out of range, which traced ones cannot be checked for;
            or the key is of a generator whose streams depend on the batch.
    """
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    checked = {
        name: value if isinstance(value, Tracer) else per_row(name, value, len(logits))
        for name, value in given.items()
    }
    check_key(key)
    return sample_unchecked(logits, key, position=position, **checked)


@jax.jit
def sample_unchecked(
    logits: jax.Array,
    key: jax.Array,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    position: Any,
) -> jax.Array:
    """`sample` of numbers that were checked before: it waits for no device."""
    batch, vocabulary = logits.shape
    order, scaled, allowed = kept(logits, temperature, top_k, top_p)

    def noise(row: jax.Array, at: jax.Array) -> jax.Array:
        one = jax.random.fold_in(jax.random.fold_in(key, row), at)
        return jax.random.gumbel(one, (vocabulary,), jnp.float32)

    at = jnp.broadcast_to(jnp.asarray(position), (batch,))
    drawn = jax.vmap(noise)(jnp.arange(batch), at)
    drawn = jnp.take_along_axis(drawn, order, axis=-1)
    found = jnp.argmax(jnp.where(allowed, scaled + drawn, -jnp.inf), axis=-1)
    found = jnp.take_along_axis(order, found[:, None], axis=-1)[:, 0]
    # The first of the order is the best, the lowest on ties.
    return jnp.where(jnp.asarray(temperature) > 0, found, order[:, 0])


def kept(
    logits: jax.Array, temperature: PerRow, top_k: PerRow, top_p: PerRow
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Which tokens may be drawn, best first.

    Args:
        logits: [B, V].
        temperature, top_k, top_p: As in `sample`; a temperature of 0 counts as 1.

    Returns:
        Tokens in the order of their scores, int32 [B, V]; their scaled scores, float32,
        0 for the best; whether each may be drawn.
    """
    logits = logits.astype(jnp.float32)
    temperature, top_k, top_p = (
        jnp.reshape(jnp.asarray(x), (-1, 1)) for x in (temperature, top_k, top_p)
    )
    order = jnp.argsort(-logits, axis=-1, stable=True).astype(jnp.int32)
    best_first = jnp.take_along_axis(logits, order, axis=-1)
    # Less the best before the division: a small temperature must not give inf - inf.
    scaled = best_first - best_first[:, :1]
    scaled = scaled / jnp.where(temperature > 0, temperature, 1)
    allowed = (jnp.arange(logits.shape[-1]) < top_k) | (top_k == 0)
    weights = jnp.where(allowed, jnp.exp(scaled), 0)
    mass = jnp.cumsum(weights / weights.sum(axis=-1, keepdims=True), axis=-1)
    before = jnp.pad(mass[:, :-1], ((0, 0), (1, 0)))
    # Rounded sums may reach 1 before the last token.
    return order, scaled, allowed & ((before < top_p) | (top_p >= 1))


def per_row(name: str, value: PerRow, rows: int) -> np.ndarray[Any, Any]:
    """One number of `temperature`, `top_k` or `top_p` for each row, checked.

    Returns:
        float32 [rows]; int32 for `top_k`.

    Raises:
        ValueError: The shape is another, or a number is out of range.
    """
    values = np.asarray(value)
    if values.shape not in ((), (rows,)):
        raise ValueError(
            f"{name} must be a number or one for each of the {rows} rows, not of shape "
            f"{list(values.shape)}"
        )
    if name == "top_k" and not np.issubdtype(values.dtype, np.integer):
        raise ValueError(f"top_k must be whole numbers, not {values.tolist()}")
    test, rule = _RULES[name]
    bad = values[~test(values)].tolist() if values.ndim else values.tolist()
    if not np.all(test(values)):
        raise ValueError(f"{name} must be {rule}; not {bad}")
    dtype = np.int32 if name == "top_k" else np.float32
    return np.broadcast_to(values, (rows,)).astype(dtype)


def check_key(key: jax.Array) -> None:
    """Raise if the numbers of a key depend on how many keys are used at once.

    Raises:
        ValueError: It is not a threefry key; those of "rbg" do
            (docs.jax.dev/en/latest/jax.random.html).
    """
    kind = str(jax.random.key_impl(key))
    if kind != "threefry2x32":
        raise ValueError(
            f"a key of {kind!r} gives a row other numbers in another batch; make it by "
            "jax.random.key(seed, impl='threefry2x32')"
        )
