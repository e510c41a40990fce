"""Read a Hugging Face `config.json`, in the spellings of transformers 4 and 5.

The family files turn the dictionary into their own frozen dataclass with the readers
below, so that two spellings of one model compare equal. What is not supported is an
error that names the key, the value and what is supported: a key that is ignored by
mistake shows only as wrong text, sometimes only beyond some position.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, cast

type HFConfig = Mapping[str, Any]
type RopeKind = Literal["default", "linear", "llama3"]

ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3")
DTYPES = ("float32", "bfloat16", "float16")


class ConfigError(ValueError):
    """A configuration that is incomplete, inconsistent or not supported."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding of one kind of layer.

    Attributes:
        theta: Base of the geometric series of frequencies.
        kind: How frequencies are rescaled for long contexts.
        factor: Divisor of the rescaled frequencies (`linear`, `llama3`).
        low_freq_factor: `llama3`: waves longer than `original_max_length / low` are
            divided by `factor`.
        high_freq_factor: `llama3`: waves shorter than `original_max_length / high` are
            kept.
        original_max_length: `llama3`: context length, in tokens, before rescaling.
    """

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_length: int = 0

    def __post_init__(self) -> None:
        if not (self.theta > 0 and self.factor > 0):
            raise ConfigError(f"RoPE needs {self.theta=} and {self.factor=} above zero")
        if self.kind != "llama3":
            return
        if not self.high_freq_factor > self.low_freq_factor > 0:
            raise ConfigError(
                "RoPE type 'llama3' needs high_freq_factor > low_freq_factor > 0, not "
                f"{self.high_freq_factor=} and {self.low_freq_factor=}"
            )
        if self.original_max_length <= 0:
            raise ConfigError(
                "RoPE type 'llama3' needs original_max_position_embeddings above zero, "
                f"not {self.original_max_length}"
            )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and constants that the models of every family have.

    Attributes:
        vocab_size: Rows of the embedding (V).
        hidden_size: Width of the residual stream (h).
        intermediate_size: Width inside the MLP (I).
        num_layers: Decoder layers (L).
        num_heads: Query heads (H), a multiple of `num_kv_heads`.
        num_kv_heads: Key and value heads (KV).
        head_dim: Features per head (D), even.
        norm_eps: Added to the mean square in every norm.
        tied: Whether the head is the embedding.
        max_length: Longest context the model was made for, in tokens.
        rope: Rotary position embedding.
        bos_id: Token that starts a text, if any.
        eos_ids: Tokens that end one.
        dtype: Dtype of the checkpoint.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    tied: bool
    max_length: int
    rope: Rope = field(kw_only=True)
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    dtype: str = "bfloat16"


class CommonFields(TypedDict):
    """The fields of `ModelConfig` but RoPE, ready to be passed by name."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    tied: bool
    max_length: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    dtype: str


def number(config: HFConfig, key: str, default: float | None = None) -> float:
    """Read a number; a key that is absent or null gives `default`, else an error."""
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float):
        problem = "is missing" if value is None else f"is {value!r}"
        raise ConfigError(f"config.json: {key!r} {problem}; expected a number")
    return value


def count(config: HFConfig, key: str, default: int | None = None) -> int:
    """Read a whole number of at least one; see `number`."""
    value = number(config, key, default)
    if value < 1 or value != int(value):
        raise ConfigError(
            f"config.json: {key!r} is {value!r}; expected a whole number of at least 1"
        )
    return int(value)


def choice(config: HFConfig, key: str, supported: tuple[str, ...]) -> str:
    """Read one of a few names; absent gives the first, an unknown one is an error."""
    value = config.get(key)
    if value is None:
        return supported[0]
    if value not in supported:
        raise ConfigError(
            f"config.json: {key!r} is {value!r}, which is not supported; "
            f"supported: {', '.join(map(repr, supported))}"
        )
    return cast("str", value)


def refuse(config: HFConfig, *keys: str) -> None:
    """Raise if a feature that the forward passes do not have is switched on."""
    for key in keys:
        value = config.get(key)
        if value:
            raise ConfigError(
                f"config.json: {key!r} is {value!r}, which is not supported; "
                "supported: absent, null or false"
            )


def common_fields(config: HFConfig, *, tied: bool) -> CommonFields:
    """Read the fields that every family has.

    Args:
        config: The parsed `config.json`.
        tied: Whether the family ties embedding and head where the file does not say.

    Raises:
        ConfigError: A size is missing or impossible, or a feature is not supported.
    """
    refuse(config, "attention_bias", "mlp_bias", "quantization_config")
    if number(config, "partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(
            "config.json: 'partial_rotary_factor' is "
            f"{config['partial_rotary_factor']!r}, which is not supported; supported: 1"
        )
    num_heads = count(config, "num_attention_heads")
    num_kv_heads = count(config, "num_key_value_heads", num_heads)
    hidden_size = count(config, "hidden_size")
    # A published head_dim need not be hidden / heads (Qwen3 0.6B, all Gemma 3).
    head_dim = count(config, "head_dim", hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"config.json: 'num_attention_heads' is {num_heads}, not a multiple of "
            f"'num_key_value_heads', {num_kv_heads}"
        )
    if head_dim % 2:
        raise ConfigError(
            f"config.json: 'head_dim' is {head_dim}; RoPE rotates pairs of features "
            "and needs an even number"
        )
    tie = config.get("tie_word_embeddings")
    bos = _ids(config, "bos_token_id")
    return CommonFields(
        vocab_size=count(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=count(config, "intermediate_size"),
        num_layers=count(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=number(config, "rms_norm_eps", 1e-6),
        tied=tied if tie is None else bool(tie),
        max_length=count(config, "max_position_embeddings"),
        bos_id=bos[0] if bos else None,
        eos_ids=_ids(config, "eos_token_id"),
        dtype=_dtype(config),
    )


def read_rope(
    scaling: HFConfig | None, config: HFConfig, theta: float, *, key: str
) -> Rope:
    """Read one RoPE description.

    Args:
        scaling: The dictionary that describes the scaling, or None for no scaling. In
            files of transformers 5 it also holds `rope_theta`.
        config: Where `original_max_position_embeddings` may stand instead.
        theta: Base frequency where `scaling` does not give one.
        key: Name of the dictionary, for messages.

    Raises:
        ConfigError: The type is unknown, or a number that it needs is missing.
    """
    spec: HFConfig = scaling or {}
    named = "rope_type" if spec.get("rope_type") is not None else "type"
    kind = spec.get(named) or "default"
    if kind not in ROPE_KINDS:
        raise ConfigError(
            f"config.json: {key}[{named!r}] is {kind!r}, which is not supported; "
            f"supported: {', '.join(map(repr, ROPE_KINDS))}"
        )
    if number(spec, "partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(
            f"config.json: {key}['partial_rotary_factor'] is "
            f"{spec['partial_rotary_factor']!r}, which is not supported; supported: 1"
        )
    theta = number(spec, "rope_theta", theta)
    if kind == "default":
        return Rope(theta)
    try:
        factor = number(spec, "factor")
        if kind == "linear":
            return Rope(theta, "linear", factor)
        original = "original_max_position_embeddings"
        return Rope(
            theta,
            "llama3",
            factor,
            low_freq_factor=number(spec, "low_freq_factor"),
            high_freq_factor=number(spec, "high_freq_factor"),
            original_max_length=count({**config, **spec}, original),
        )
    except ConfigError as error:
        raise ConfigError(f"{error} (in {key!r}, RoPE type {kind!r})") from None


def read_one_rope(config: HFConfig) -> Rope:
    """Read the RoPE of a model that has one for all layers; see `read_rope`."""
    key = "rope_scaling"
    key = key if config.get("rope_parameters") is None else "rope_parameters"
    theta = number(config, "rope_theta", 10_000.0)
    return read_rope(config.get(key), config, theta, key=key)


def _ids(config: HFConfig, key: str) -> tuple[int, ...]:
    """Read token ids, which may be absent, one number or a list."""
    value = config.get(key)
    if value is None:
        return ()
    ids: list[Any] = cast("list[Any]", value) if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ConfigError(f"config.json: {key!r} is {value!r}; expected token ids")
    return tuple(ids)


def _dtype(config: HFConfig) -> str:
    """Read the checkpoint's dtype; torch's default where the file does not say."""
    for key in ("dtype", "torch_dtype"):
        value = config.get(key)
        if value is not None:
            name = str(value).removeprefix("torch.")
            return choice({key: name}, key, DTYPES)
    return "float32"
