"""Arrays between the layout of the program and that of the kernel."""

import math
from typing import Any

import jax.numpy as jnp

from mkdsl.lower.layout import Layout

Array = Any


def to_physical(layout: Layout, x: Array) -> Array:
    """An array in the layout of the kernel."""
    if layout.column is None:
        return x.reshape(layout.shape)
    x = jnp.moveaxis(x.reshape(layout.view), layout.column, -1)
    features = x.size // (layout.shape[0] * x.shape[-1])
    x = x.reshape(layout.shape[0], features, x.shape[-1])
    pads = [(0, 0), (0, layout.shape[1] - features), (0, layout.shape[2] - x.shape[2])]
    return jnp.pad(x, pads)


def from_physical(layout: Layout, x: Array) -> Array:
    """The logical array of one in the layout of the kernel."""
    view, column = layout.view, layout.column
    if column is None:
        return x.reshape(layout.buffer.shape)
    outer = [n for i, n in enumerate(view) if i != column]
    features = math.prod(outer) // layout.shape[0]
    x = x[:, :features, : view[column]].reshape(*outer, view[column])
    return jnp.moveaxis(x, -1, column).reshape(layout.buffer.shape)
