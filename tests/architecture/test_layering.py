"""Imports go one way: runtime -> lower -> lang -> errors, and jax stays at the ends.

The rules are checked on the syntax tree, so that nothing has to be imported and an
import inside a function counts like any other.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Lowest first. Modules of mkdsl in none of these (its __init__, __main__, show) are at
# the top and may import all of them.
LAYERS = ("errors", "lang", "lower", "runtime")
TOP = len(LAYERS)

JAX_MAY_BE_IN = (
    "mkdsl.lang.task",
    "mkdsl.lang.trace",
    "mkdsl.lang.primitives",
    "mkdsl.lang.body",
    "mkdsl.lang.arrays",
    "mkdsl.lower.emit",
    "mkdsl.runtime",
    "mkdsl.__main__",
)
# Packages that are, or import, jax.
JAX = {"jax", "jaxlib", "flax"}
# What uses mkdsl, and so is unknown to it below its command line.
OUTSIDE = {"models", "examples", "benchmarks", "tests"}
PUBLIC = ("mkdsl", "mkdsl.runtime")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources(*folders: str) -> Iterator[tuple[Path, str]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path, module_name(path)


def package_of(module: str, path: Path) -> list[str]:
    parts = module.split(".")
    return parts if path.name == "__init__.py" else parts[:-1]


def imports(text: str, package: list[str]) -> Iterator[tuple[int, str]]:
    """(line, dotted target) of each import; `from a import b` gives `a.b`.

    Whether b is a module or a name in a, the layer of `a.b` is that of a, except where
    a is the root package: there b names the layer.
    """
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, name.name) for name in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = package[: len(package) - level + 1] if level else []
                base = [*base, *(module.split(".") if module else [])]
                for name in names:
                    yield node.lineno, ".".join([*base, name.name])
            case ast.Call(func=function, args=[ast.Constant(value=str(target)), *_]):
                if ast.unparse(function).endswith(("import_module", "__import__")):
                    yield node.lineno, target


def within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == p or module.startswith(p + ".") for p in packages)


def layer(module: str) -> int:
    """The rank of a module of mkdsl, 0 for the lowest."""
    parts = module.split(".")
    return LAYERS.index(parts[1]) if parts[1:2] and parts[1] in LAYERS else TOP


def layer_name(rank: int) -> str:
    return f"mkdsl/{LAYERS[rank]}" if rank < TOP else "the top of mkdsl"


def fault_in_mkdsl(module: str, target: str) -> str | None:
    """What is wrong with `module` of mkdsl importing `target`, and what to do."""
    root = target.split(".")[0]
    if root in JAX and not within(module, JAX_MAY_BE_IN):
        return (
            f"imports {root}; jax may be imported in {', '.join(JAX_MAY_BE_IN)} alone. "
            "Move what needs it there, or pass its result in as plain data"
        )
    if root in OUTSIDE and layer(module) < TOP:
        return f"imports {root}, which uses mkdsl. Pass what it needs as an argument"
    if root == "mkdsl" and layer(target) > layer(module):
        return (
            f"imports {target} from {layer_name(layer(target))}, which is above it. "
            f"Move what both need down to {layer_name(layer(module))} or lower"
        )
    return None


def fault_in_user_code(target: str) -> str | None:
    """What is wrong with a model or an example importing `target`."""
    parts = target.split(".")
    if parts[0] != "mkdsl" or parts[:2] == ["mkdsl", "runtime"]:
        return None
    private = any(part.startswith("_") for part in parts)
    inner = len(parts) > 1 and (ROOT / "mkdsl" / parts[1]).with_suffix(".py").exists()
    if private or inner or len(parts) > 2 or layer(target) < TOP:
        return (
            f"imports {target}; models and examples use {' and '.join(PUBLIC)} alone. "
            "If every user needs this name, re-export it from mkdsl/__init__.py"
        )
    return None


def report(faults: list[str]) -> None:
    assert not faults, "imports against the layering:\n" + "\n".join(faults)


def test_imports_of_mkdsl_go_down_and_jax_stays_at_the_ends():
    report(
        [
            f"{path.relative_to(ROOT)}:{line}: {fault}"
            for path, module in sources("mkdsl")
            for line, target in imports(path.read_text(), package_of(module, path))
            if (fault := fault_in_mkdsl(module, target))
        ]
    )


def test_models_and_examples_use_the_public_names():
    report(
        [
            f"{path.relative_to(ROOT)}:{line}: {fault}"
            for path, module in sources("models", "examples")
            for line, target in imports(path.read_text(), package_of(module, path))
            if (fault := fault_in_user_code(target))
        ]
    )


# The rules themselves, one construct a line.


@pytest.mark.parametrize(
    ("module", "line", "word"),
    [
        ("mkdsl.lang.region", "import mkdsl.lower.ir", "above"),
        ("mkdsl.lang.region", "from mkdsl.runtime import launch", "above"),
        ("mkdsl.lang.region", "from mkdsl import lower", "above"),
        ("mkdsl.lang.region", "from mkdsl import megakernel", "above"),
        ("mkdsl.lang.region", "from ..lower import ir", "above"),
        ("mkdsl.errors", "from .lang import types", "above"),
        ("mkdsl.lower.emit.kernel", "import mkdsl.runtime.launch as l", "above"),
        ("mkdsl.lower.schedule", "import jax", "jax may be"),
        ("mkdsl.lower.schedule", "from jax import numpy as jnp", "jax may be"),
        ("mkdsl.lower.schedule", "def f():\n    import jax.numpy", "jax may be"),
        ("mkdsl.lower.emitter", "import jax", "jax may be"),
        ("mkdsl.lang.types", "from flax import nnx", "jax may be"),
        ("mkdsl.lang.types", "importlib.import_module('jax')", "jax may be"),
        ("mkdsl.__init__", "import jax", "jax may be"),
        ("mkdsl.runtime.decode", "import models.llama", "uses mkdsl"),
    ],
)
def test_bad_import_of_mkdsl_is_found(module, line, word):
    ((_, target),) = imports(line, module.split(".")[:-1])
    assert word in (fault_in_mkdsl(module, target) or "")


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("mkdsl.runtime.launch", "from mkdsl.lower import ir"),
        ("mkdsl.runtime.launch", "import jax"),
        ("mkdsl.lower.ir", "from mkdsl.lang.program import Program"),
        ("mkdsl.lower.ir", "from ..lang import program"),
        ("mkdsl.lower.ir", "from . import machine"),
        ("mkdsl.lower.ir", "from mkdsl import errors"),
        ("mkdsl.lower.emit.kernel", "from jax.experimental import pallas as pl"),
        ("mkdsl.lang.task", "import jax"),
        ("mkdsl.__main__", "import models.gemma3"),
        ("mkdsl.lang.types", "import math"),
    ],
)
def test_good_import_of_mkdsl_passes(module, line):
    ((_, target),) = imports(line, module.split(".")[:-1])
    assert fault_in_mkdsl(module, target) is None


@pytest.mark.parametrize(
    ("line", "good"),
    [
        ("import mkdsl as mk", True),
        ("from mkdsl import megakernel", True),
        ("from mkdsl.runtime import decode", True),
        ("import mkdsl.runtime.measure", True),
        ("import jax", True),
        ("import mkdsl.lower.ir", False),
        ("from mkdsl.lang.task import task", False),
        ("from mkdsl import lower", False),
        ("from mkdsl import errors", False),
        ("from mkdsl import _hidden", False),
    ],
)
def test_user_code_sees_the_public_names_alone(line, good):
    ((_, target),) = imports(line, ["models"])
    assert (fault_in_user_code(target) is None) == good
