"""Configuration of Gemma 3 (text), whose `config.json` comes in many spellings."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from models.config import (
    ConfigError,
    HFConfig,
    ModelConfig,
    Rope,
    choice,
    common_fields,
    count,
    number,
    read_rope,
    refuse,
)

GLOBAL, LOCAL = "full_attention", "sliding_attention"

# transformers leaves out of a nested `text_config` what equals the defaults of its
# class (configuration_gemma3.py, Gemma3TextConfig): the 4B file gives five numbers.
_NESTED_DEFAULTS: HFConfig = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
# Keys that a multimodal file may give outside of `text_config`, for the whole model.
_OUTER_KEYS = (
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
    "dtype",
    "torch_dtype",
    "quantization_config",
)


@dataclass(frozen=True, slots=True)
class Gemma3Config(ModelConfig):
    """Sizes and constants of a Gemma 3 text model.

    Attributes:
        rope: Rotary position embedding of the global layers.
        local_rope: That of the sliding-window layers.
        layer_is_global: Per layer, whether it sees every token.
        window: Tokens that the other layers see, the current one included.
        query_scalar: Scores are divided by its square root.
    """

    local_rope: Rope = field(kw_only=True)
    layer_is_global: tuple[bool, ...] = field(kw_only=True)
    window: int = field(kw_only=True)
    query_scalar: float = field(kw_only=True)

    def __post_init__(self) -> None:
        if len(self.layer_is_global) != self.num_layers:
            raise ConfigError(
                f"layer_types has {len(self.layer_is_global)} entries for "
                f"{self.num_layers} layers"
            )

    @classmethod
    def from_hf(cls, config: HFConfig) -> "Gemma3Config":
        """Read a parsed `config.json`, of the text model or with a `text_config`.

        Raises:
            ConfigError: A key is missing, or its value is not supported.
        """
        config = _flatten(config)
        key = "hidden_activation" if config.get("hidden_activation") else "hidden_act"
        choice(config, key, ("gelu_pytorch_tanh",))
        refuse(
            config,
            "attn_logit_softcapping",
            "final_logit_softcapping",
            "use_bidirectional_attention",
        )
        # head_dim never is hidden / heads here, so a file without it is not guessed at.
        count(config, "head_dim")
        rope, local_rope = _ropes(config)
        is_global = _layer_is_global(config)
        max_length = count(config, "max_position_embeddings")
        # A file may have no window if no layer uses it.
        window = count(config, "sliding_window", max_length if all(is_global) else None)
        return cls(
            **common_fields(config, tied=True),
            rope=rope,
            local_rope=local_rope,
            layer_is_global=is_global,
            window=window,
            query_scalar=number(config, "query_pre_attn_scalar"),
        )


def _flatten(config: HFConfig) -> HFConfig:
    """Take the text model out of a multimodal configuration."""
    text = config.get("text_config")
    if text is None:
        return config
    outer = {key: config[key] for key in _OUTER_KEYS if config.get(key) is not None}
    # One dtype in two spellings: the outer one counts, whichever it is.
    inner = dict(cast("HFConfig", text))
    if "dtype" in outer or "torch_dtype" in outer:
        inner.pop("dtype", None)
        inner.pop("torch_dtype", None)
    return {**_NESTED_DEFAULTS, **inner, **outer}


def _ropes(config: HFConfig) -> tuple[Rope, Rope]:
    """Read RoPE of the global and of the sliding-window layers.

    Files of transformers 5 have one description per layer type; older ones describe
    the global layers (`rope_theta`, `rope_scaling`) and give a base for the others.
    """
    theta = number(config, "rope_theta", 1_000_000.0)
    local_theta = number(config, "rope_local_base_freq", 10_000.0)
    key = "rope_scaling" if config.get("rope_parameters") is None else "rope_parameters"
    spec = cast("Mapping[str, Any]", config.get(key) or {})
    if GLOBAL not in spec and LOCAL not in spec:
        return read_rope(spec, config, theta, key=key), Rope(local_theta)
    return (
        read_rope(spec.get(GLOBAL), config, theta, key=f"{key}[{GLOBAL!r}]"),
        read_rope(spec.get(LOCAL), config, local_theta, key=f"{key}[{LOCAL!r}]"),
    )


def _layer_is_global(config: HFConfig) -> tuple[bool, ...]:
    """Read the layer pattern: a list, or a number n for "every n-th is global"."""
    types = cast("list[Any] | None", config.get("layer_types"))
    if types is None:
        public = config.get("sliding_window_pattern") is not None
        key = "sliding_window_pattern" if public else "_sliding_window_pattern"
        pattern = count(config, key, 6)
        layers = range(1, count(config, "num_hidden_layers") + 1)
        return tuple(layer % pattern == 0 for layer in layers)
    unknown = sorted({str(name) for name in types} - {GLOBAL, LOCAL})
    if unknown:
        raise ConfigError(
            f"config.json: 'layer_types' has {', '.join(map(repr, unknown))}, which is "
            f"not supported; supported: {GLOBAL!r}, {LOCAL!r}"
        )
    return tuple(name == GLOBAL for name in types)
