"""The families by `model_type`, and the real shapes that benchmarks and tests name."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from models import gemma3, llama, qwen3
from models.config import ConfigError, HFConfig, ModelConfig, Rope
from models.gemma3 import Gemma3Config
from models.llama import LlamaConfig
from models.params import Leaf, Params, random_tree
from models.qwen3 import Qwen3Config


@dataclass(frozen=True, slots=True)
class Family:
    """What a model family provides; signatures as in `llama.py`.

    Attributes:
        name: Name of its file below models/.
        config_type: Its configuration class.
        from_hf: Parsed `config.json` -> configuration.
        leaves: Configuration -> list of parameters.
        forward: Plain-JAX scores of every position.
        prefill: Plain-JAX scores after the last token, and the cache.
        decode_params: Configuration and parameters -> those of `decode_program`.
        decode_program: The decode step, written with mk.call.
    """

    name: str
    config_type: type
    from_hf: Callable[[HFConfig], ModelConfig]
    leaves: Callable[[Any], tuple[Leaf, ...]]
    forward: Callable[..., jax.Array]
    prefill: Callable[..., tuple[jax.Array, Any]]
    decode_params: Callable[[Any, Params], Params]
    decode_program: Callable[..., Callable[..., Any]]


LLAMA = Family(
    "llama",
    LlamaConfig,
    LlamaConfig.from_hf,
    llama.leaves,
    llama.forward,
    llama.prefill,
    llama.decode_params,
    llama.decode_program,
)
GEMMA3 = Family(
    "gemma3",
    Gemma3Config,
    Gemma3Config.from_hf,
    gemma3.leaves,
    gemma3.forward,
    gemma3.prefill,
    gemma3.decode_params,
    gemma3.decode_program,
)
QWEN3 = Family(
    "qwen3",
    Qwen3Config,
    Qwen3Config.from_hf,
    qwen3.leaves,
    qwen3.forward,
    qwen3.prefill,
    qwen3.decode_params,
    qwen3.decode_program,
)
FAMILIES: dict[str, Family] = {
    "gemma3": GEMMA3,
    "gemma3_text": GEMMA3,
    "llama": LLAMA,
    "qwen3": QWEN3,
}

# From the published config.json files. Context lengths are those of the files.
_LLAMA_3_2_1B = LlamaConfig(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    norm_eps=1e-5,
    tied=True,
    max_length=131072,
    rope=Rope(500_000.0, "llama3", 32.0, 1.0, 4.0, 8192),
    bos_id=128000,
    eos_ids=(128001,),
)
_GEMMA_3_270M = Gemma3Config(
    vocab_size=262144,
    hidden_size=640,
    intermediate_size=2048,
    num_layers=18,
    num_heads=4,
    num_kv_heads=1,
    head_dim=256,
    norm_eps=1e-6,
    tied=True,
    max_length=32768,
    rope=Rope(1_000_000.0),
    local_rope=Rope(10_000.0),
    layer_is_global=tuple(layer % 6 == 5 for layer in range(18)),
    window=512,
    query_scalar=256.0,
    bos_id=2,
    eos_ids=(1,),
)
_QWEN3_0_6B = Qwen3Config(
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    norm_eps=1e-6,
    tied=True,
    max_length=40960,
    rope=Rope(1_000_000.0),
    bos_id=151643,
    eos_ids=(151645,),
)
_QWEN3_8B = replace(
    _QWEN3_0_6B,
    hidden_size=4096,
    intermediate_size=12288,
    num_layers=36,
    num_heads=32,
    tied=False,
)
SHAPES: dict[str, LlamaConfig | Gemma3Config | Qwen3Config] = {
    "llama-3.2-1b": _LLAMA_3_2_1B,
    "llama-3.2-3b": replace(
        _LLAMA_3_2_1B, hidden_size=3072, num_layers=28, num_heads=24, head_dim=128
    ),
    "llama-3.1-8b": replace(
        _LLAMA_3_2_1B,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        head_dim=128,
        tied=False,
        rope=Rope(500_000.0, "llama3", 8.0, 1.0, 4.0, 8192),
    ),
    "gemma-3-270m": _GEMMA_3_270M,
    "gemma-3-1b": replace(
        _GEMMA_3_270M,
        hidden_size=1152,
        intermediate_size=6912,
        num_layers=26,
        layer_is_global=tuple(layer % 6 == 5 for layer in range(26)),
    ),
    "qwen3-0.6b": _QWEN3_0_6B,
    "qwen3-1.7b": replace(_QWEN3_0_6B, hidden_size=2048, intermediate_size=6144),
    "qwen3-4b": replace(
        _QWEN3_0_6B,
        hidden_size=2560,
        intermediate_size=9728,
        num_layers=36,
        num_heads=32,
    ),
    "qwen3-8b": _QWEN3_8B,
    "qwen3-14b": replace(
        _QWEN3_8B,
        hidden_size=5120,
        intermediate_size=17408,
        num_layers=40,
        num_heads=40,
    ),
    "qwen3-32b": replace(
        _QWEN3_8B,
        hidden_size=5120,
        intermediate_size=25600,
        num_layers=64,
        num_heads=64,
    ),
}


def family_of(config: ModelConfig) -> Family:
    """Find the family of a configuration."""
    for family in FAMILIES.values():
        if isinstance(config, family.config_type):
            return family
    raise TypeError(f"{type(config).__name__} is not the configuration of any family")


def config_from_hf(config: HFConfig) -> ModelConfig:
    """Read a parsed `config.json` of any supported family.

    Raises:
        ConfigError: Its `model_type`, or a value in it, is not supported.
    """
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise ConfigError(
            f"config.json: 'model_type' is {model_type!r}, which is not supported; "
            f"supported: {', '.join(map(repr, FAMILIES))}"
        )
    return FAMILIES[model_type].from_hf(config)


def read_config(folder: str | Path) -> ModelConfig:
    """Read `config.json` of a checkpoint folder; see `config_from_hf`."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; expected a Hugging Face folder")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    return config_from_hf(config)


def random_params(
    config: ModelConfig, key: jax.Array, dtype: DTypeLike = jnp.bfloat16
) -> Params:
    """Draw parameters for a configuration on the default device; see `random_tree`."""
    return random_tree(family_of(config).leaves(config), key, dtype)
