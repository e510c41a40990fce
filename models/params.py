"""The parameters of a model: one table of leaves, from which trees are made.

A family lists its leaves once (`leaves(config)`); loading, random initialisation and
tests all read that table. Parameters are a dictionary of stacked arrays:

    {"embed": [V, h], "layers": {"q": [L, H * D, h], ...}, "norm": [h]}

plus `"head": [V, h]` where the head is not tied to the embedding. Matrices are [out,
in] as Hugging Face stores them.
"""

# The annotations of jax have gaps, on which strict pyright insists.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from models.config import ModelConfig

type Params = dict[str, Any]
"""Nested dictionary of arrays, as the module docstring says."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of the parameters.

    Attributes:
        path: Keys that lead to it, for example `("layers", "q")`.
        key: Its key in a checkpoint; a stacked leaf has `{}` for the layer number.
        shape: Its shape, with the layers first if stacked.
        mean: Mean of its random initialisation; gains of a norm need not be near zero.
    """

    path: tuple[str, ...]
    key: str
    shape: tuple[int, ...]
    mean: float = 0.0

    @property
    def stacked(self) -> bool:
        """Whether the leaf has one entry per layer."""
        return "{}" in self.key

    @property
    def name(self) -> str:
        """The path with dots."""
        return ".".join(self.path)

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of one tensor in the checkpoint."""
        return self.shape[1:] if self.stacked else self.shape

    def keys(self) -> tuple[str, ...]:
        """Keys of all its parts, in layer order."""
        if not self.stacked:
            return (self.key,)
        return tuple(self.key.format(layer) for layer in range(self.shape[0]))


def decoder_leaves(
    config: ModelConfig, norms: dict[str, str], *, gain_mean: float
) -> tuple[Leaf, ...]:
    """List the leaves of a decoder with gated MLP.

    Args:
        config: Sizes.
        norms: Leaf name to key, below a layer, of each norm; a name that starts with
            `q_` or `k_` is a norm over head_dim, others are over hidden_size.
        gain_mean: 1 where the norm multiplies by its gain, 0 where by 1 + gain.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    matrices = {
        "q": ("self_attn.q_proj", (q_size, hidden)),
        "k": ("self_attn.k_proj", (kv_size, hidden)),
        "v": ("self_attn.v_proj", (kv_size, hidden)),
        "o": ("self_attn.o_proj", (hidden, q_size)),
        "gate": ("mlp.gate_proj", (inner, hidden)),
        "up": ("mlp.up_proj", (inner, hidden)),
        "down": ("mlp.down_proj", (hidden, inner)),
    }

    def layer(name: str, key: str, shape: tuple[int, ...], mean: float) -> Leaf:
        full = f"model.layers.{{}}.{key}.weight"
        return Leaf(("layers", name), full, (config.num_layers, *shape), mean)

    embed_shape = (config.vocab_size, hidden)
    leaves = [Leaf(("embed",), "model.embed_tokens.weight", embed_shape)]
    for name, key in norms.items():
        size = config.head_dim if name[:2] in ("q_", "k_") else hidden
        leaves.append(layer(name, key, (size,), gain_mean))
    leaves += [layer(name, key, size, 0.0) for name, (key, size) in matrices.items()]
    leaves.append(Leaf(("norm",), "model.norm.weight", (hidden,), gain_mean))
    if not config.tied:
        leaves.append(Leaf(("head",), "lm_head.weight", embed_shape))
    return tuple(leaves)


def build_tree(arrays: Iterable[tuple[Leaf, Any]]) -> Params:
    """Put arrays where their leaves say, consuming the iterable one by one."""
    tree: Params = {}
    for leaf, array in arrays:
        node = tree
        for name in leaf.path[:-1]:
            node = node.setdefault(name, {})
        node[leaf.path[-1]] = array
    return tree


def random_tree(
    leaves: Iterable[Leaf], key: jax.Array, dtype: DTypeLike = jnp.bfloat16
) -> Params:
    """Draw parameters on the default device, leaf by leaf and layer by layer.

    Matrices have standard deviation 1 / sqrt(in), so that activations stay of order
    one; gains spread by 0.1 around their mean, so that ignoring one shows.

    Args:
        leaves: What to draw.
        key: A `jax.random` key; the same key gives the same parameters.
        dtype: float32 or bfloat16.
    """
    leaves = tuple(leaves)
    keys = jax.random.split(key, len(leaves))

    def draw() -> Iterator[tuple[Leaf, jax.Array]]:
        for leaf, one in zip(leaves, keys, strict=True):
            spread = 0.1 if len(leaf.part_shape) == 1 else leaf.part_shape[-1] ** -0.5
            yield leaf, _draw(one, leaf.mean, spread, leaf.shape, leaf.stacked, dtype)

    return build_tree(draw())


@partial(jax.jit, static_argnums=(3, 4, 5))
def _draw(
    key: jax.Array,
    mean: float,
    spread: float,
    shape: tuple[int, ...],
    stacked: bool,
    dtype: DTypeLike,
) -> jax.Array:
    """Draw normally distributed numbers of a shape."""
    part_shape = shape[1:] if stacked else shape

    def part(one: jax.Array) -> jax.Array:
        x = jax.random.normal(one, part_shape, dtype)
        return (mean + spread * x).astype(dtype)

    # One layer at a time: the random bits of a whole leaf may be as large as the leaf.
    return jax.lax.map(part, jax.random.split(key, shape[0])) if stacked else part(key)
