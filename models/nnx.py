"""Parameters from a `flax.nnx` model, one of ours or the user's own, and back.

A model's state is a tree of variables with names of its own. `names` says where each
leaf of our parameters (`family_of(config).leaves(config)`) is in it:

    {"embed": "tok.embedding",
     "layers.q": "blocks.{}.attn.wq.kernel.T", ...}

A path with `{}` is unrolled layers, which are stacked; without, layers are stacked
already (`nnx.scan`, `nnx.vmap`) and taken as they are. `.T` at the end is for a matrix
[in, out], as `nnx.Linear` keeps it: ours are [out, in]. The modules of `nnx_decoder.py`
have the names of Hugging Face's keys and need no `names`.
"""

# flax and jax annotate few of their functions in full.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from models.config import ModelConfig
from models.params import Leaf, Params, build_tree
from models.registry import family_of
from models.weights import CheckpointError

type Names = Mapping[str, str]
type Flat = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a leaf is in a model.

    Attributes:
        paths: Of its parts, in layer order, or of the whole.
        shape: Of each part, as the model has it.
        unrolled: Whether there is a part per layer.
        turned: Whether a part is [in, out].
    """

    paths: tuple[str, ...]
    shape: tuple[int, ...]
    unrolled: bool
    turned: bool

    @classmethod
    def of(cls, leaf: Leaf, name: str) -> "_Place":
        path, turned = name.removesuffix(".T"), name.endswith(".T")
        unrolled = leaf.stacked and "{}" in path
        shape = leaf.part_shape if unrolled else leaf.shape
        if turned:
            shape = (*shape[:-2], shape[-1], shape[-2])
        count = leaf.shape[0] if unrolled else 1
        paths = tuple(path.format(i) if unrolled else path for i in range(count))
        return cls(paths, shape, unrolled, turned)

    def turn(self, part: jax.Array) -> jax.Array:
        """From the model's form of a part to ours, or back."""
        return jnp.swapaxes(part, -1, -2) if self.turned else part


def default_names(config: ModelConfig) -> dict[str, str]:
    """Where the modules of `nnx_decoder.py` keep each leaf."""

    def place(leaf: Leaf) -> str:
        module = leaf.key.removesuffix(".weight")
        if len(leaf.part_shape) == 1:
            return f"{module}.scale"
        embedding = leaf.path == ("embed",)
        return f"{module}.embedding" if embedding else f"{module}.kernel.T"

    return {leaf.name: place(leaf) for leaf in family_of(config).leaves(config)}


def from_nnx(
    config: ModelConfig,
    source: Any,
    names: Names | None = None,
    *,
    dtype: DTypeLike | None = None,
    free: bool = False,
) -> Params:
    """Take the parameters out of a model, leaf by leaf.

    Args:
        config: What the model is in the terms of its family.
        source: An `nnx.Module`, its `nnx.State`, or that as nested dictionaries.
        names: See the module docstring; those of `nnx_decoder.py` where None.
        dtype: Of the parameters; that of the model where None.
        free: Delete the model's arrays as soon as they have been copied, so that the
            peak is the model plus its largest leaf. The model is of no use then.

    Returns:
        The parameters, see `params.py`.

    Raises:
        CheckpointError: Names, variables or shapes do not fit the configuration; all
            that do not are listed.
    """
    found = _flatten(source)
    leaves = family_of(config).leaves(config)
    places = _places(leaves, found, default_names(config) if names is None else names)

    def take() -> Iterator[tuple[Leaf, jax.Array]]:
        for leaf, place in zip(leaves, places, strict=True):
            parts = [_value(found[path]) for path in place.paths]
            turned = [place.turn(part) for part in parts]
            array = jnp.stack(turned) if place.unrolled else turned[0]
            array = array if dtype is None else array.astype(dtype)
            if free and array is not parts[0]:
                jax.block_until_ready(array)
                for part in parts:
                    part.delete()
            yield leaf, array

    return build_tree(take())


def to_nnx[M: nnx.Module](
    config: ModelConfig, params: Params, module: M, names: Names | None = None
) -> M:
    """Put parameters into a model, which may be abstract (`nnx.eval_shape`).

    Args:
        config, names: As for `from_nnx`.
        params: The parameters, see `params.py`.
        module: Changed in place, and returned.

    Raises:
        CheckpointError: See `from_nnx`.
    """
    found = _flatten(module)
    leaves = family_of(config).leaves(config)
    places = _places(leaves, found, default_names(config) if names is None else names)
    for leaf, place in zip(leaves, places, strict=True):
        array: Any = params
        for name in leaf.path:
            array = array[name]
        for at, path in enumerate(place.paths):
            found[path].set_value(place.turn(array[at] if place.unrolled else array))
    return module


def _flatten(source: Any) -> Flat:
    """Variables (or arrays) by their path with dots."""
    state: Any = nnx.state(source) if isinstance(source, nnx.Module) else source
    if not isinstance(state, nnx.State):
        state = nnx.State(state)
    return {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}


def _value(variable: Any) -> jax.Array:
    return variable[...] if isinstance(variable, nnx.Variable) else variable


def _places(leaves: tuple[Leaf, ...], found: Flat, names: Names) -> list[_Place]:
    """Where each leaf is.

    Raises:
        CheckpointError: Some leaf is not there, or has another shape.
    """
    problems = [
        f"{name}: no parameter of this family"
        for name in sorted(names.keys() - {leaf.name for leaf in leaves})
    ]
    places: list[_Place] = []
    for leaf in leaves:
        if leaf.name not in names:
            problems.append(f"{leaf.name}: `names` does not say where it is")
            continue
        place = _Place.of(leaf, names[leaf.name])
        places.append(place)
        for path in place.paths:
            if path not in found:
                problems.append(f"{leaf.name}: {path} is not in the model")
            elif found[path].shape != place.shape:
                shapes = f"{list(found[path].shape)}, expected {list(place.shape)}"
                problems.append(f"{leaf.name}: {path} is {shapes}")
    if problems:
        listed = "\n".join(f"  {p}" for p in problems)
        raise CheckpointError(
            f"the model does not hold what its configuration describes:\n{listed}\n"
            f"  hint: it has {', '.join(sorted(found)[:8])}, ..; a matrix [in, out] "
            "needs .T at the end of its name"
        )
    return places
