"""The decode programs of models/ as implementations of the benchmark.

The timed step is what a user runs: mk.megakernel of `decode_program` in a jitted loop.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import mkdsl as mk
from benchmarks import baselines
from benchmarks.baselines import DecodeLoop, LoopResult, MakeStep
from benchmarks.shapes import DecodeShape
from mkdsl.lower.decompose import DecomposeOptions
from mkdsl.lower.pipeline import Options
from models.cache import KVCache
from models.config import Rope
from models.decode import decode_params
from models.llama import LlamaConfig
from models.qwen3 import Qwen3Config
from models.registry import family_of

# What a task waits for, on the same tiles: those of 16 rows, since gate_up then runs in
# several waves, and the first blocks of its result are there before the last ones.
WHOLE_OPERANDS = DecomposeOptions(most_blocks=1)
EVENTS = {
    "events_coarse": Options(decompose=WHOLE_OPERANDS, coarse=True),
    "events_fine": Options(decompose=WHOLE_OPERANDS),
    "events_blocks": Options(),
}
EVENT_ROWS = 16


def config_of(shape: DecodeShape, max_length: int) -> LlamaConfig | Qwen3Config:
    """The configuration of a shape."""
    family = Qwen3Config if shape.qk_norm else LlamaConfig
    scaling, rope = shape.rope_scaling, Rope(shape.rope_theta)
    if scaling is not None:
        rope = Rope(
            shape.rope_theta,
            "llama3",
            scaling.factor,
            scaling.low_freq_factor,
            scaling.high_freq_factor,
            scaling.original_positions,
        )
    return family(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_layers=shape.layers,
        num_heads=shape.q_heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        norm_eps=shape.rms_eps,
        tied=shape.tied,
        max_length=max_length,
        rope=rope,
    )


def stacked_params(shape: DecodeShape) -> dict[str, Any]:
    """The values of `baselines.init_params` as the tree of models/params.py."""
    params = baselines.init_params(shape)
    q_rows = shape.q_heads * shape.head_dim
    k_stop = q_rows + shape.kv_heads * shape.head_dim

    @jax.jit
    def stack(layers: tuple[baselines.LayerParams, ...]) -> dict[str, jax.Array]:
        parts = [
            {
                "input_norm": layer.input_norm,
                "post_norm": layer.mlp_norm,
                "q_norm": layer.q_norm,
                "k_norm": layer.k_norm,
                "q": layer.qkv[:q_rows],
                "k": layer.qkv[q_rows:k_stop],
                "v": layer.qkv[k_stop:],
                "o": layer.output,
                "gate": layer.gate_up[: shape.intermediate],
                "up": layer.gate_up[shape.intermediate :],
                "down": layer.down,
            }
            for layer in layers
        ]
        # Without norms of q and k these are None, which is no leaf.
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)
        return {name: leaf for name, leaf in stacked.items() if leaf is not None}

    tree: dict[str, Any] = {
        "embed": params.embedding,
        "norm": params.final_norm,
        "layers": stack(params.layers),
    }
    if params.lm_head is not None:
        tree["head"] = params.lm_head
    return tree


def stacked_cache(shape: DecodeShape, batch: int, max_length: int) -> KVCache:
    """The values of `baselines.init_cache`; the loop sets the lengths."""
    layers = baselines.init_cache(shape, batch, max_length)
    k, v = (jnp.stack([getattr(layer, n) for layer in layers]) for n in "kv")
    return KVCache(k, v, jnp.zeros(batch, jnp.int32))


def make_loop(
    shape: DecodeShape,
    batch: int,
    max_length: int,
    steps: int,
    implementation: Any,
    options: Any = None,
    **sizes: Any,
) -> DecodeLoop:
    """`steps` greedy steps as one jitted function; the cache is donated.

    Args:
        implementation, options: of mk.megakernel.
        sizes: of tiles, see `models.programs.Step`.
    """
    config = config_of(shape, max_length)
    program = family_of(config).decode_program(
        config, batch, max_length, scores=True, **sizes
    )
    step = mk.megakernel(
        program, donate_argnums=1, implementation=implementation, options=options
    )

    def decode_loop(
        params: Any, cache: KVCache, token: jax.Array, position: jax.Array
    ) -> LoopResult:
        def body(i: jax.Array, state: Any) -> Any:
            k, v, token, tokens, scores = state
            lengths = jnp.full((batch,), position + i, jnp.int32)
            (token, score), new = step(params, KVCache(k, v, lengths), token)
            tokens = lax.dynamic_update_slice(tokens, token[None], (i, 0))
            scores = lax.dynamic_update_slice(scores, score[None], (i, 0))
            return new.k, new.v, token, tokens, scores

        tokens = jnp.zeros((steps, batch), jnp.int32)
        scores = jnp.zeros((steps, batch), jnp.float32)
        start = (cache.k, cache.v, token, tokens, scores)
        k, v, _, tokens, scores = lax.fori_loop(0, steps, body, start)
        return LoopResult(KVCache(k, v, cache.lengths), tokens, scores)

    return jax.jit(decode_loop, donate_argnames="cache")


def make_step_of(implementation: Any, options: Any = None, **sizes: Any) -> MakeStep:
    """An implementation of mk.megakernel as one of the benchmark.

    Args:
        options, sizes: see `make_loop`.
    """

    def make_step(
        shape: DecodeShape, batch: int, max_length: int, steps: int = baselines.STEPS
    ) -> tuple[DecodeLoop, tuple[Any, Any]]:
        loop = make_loop(
            shape, batch, max_length, steps, implementation, options, **sizes
        )
        config = config_of(shape, max_length)
        params = decode_params(config, stacked_params(shape))
        return loop, (params, stacked_cache(shape, batch, max_length))

    return make_step
