"""Every spelling of a configuration gives the same one; the rest is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from models.config import ConfigError, Rope
from models.gemma3 import Gemma3Config
from models.llama import LlamaConfig
from models.qwen3 import Qwen3Config
from models.registry import config_from_hf, read_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
GEMMA: dict[str, Any] = {
    **LLAMA,
    "model_type": "gemma3_text",
    "num_hidden_layers": 4,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 16,
    "sliding_window_pattern": 3,
}
QWEN: dict[str, Any] = {**LLAMA, "model_type": "qwen3"}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def without(config: dict[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in config.items() if k != key}


@pytest.mark.parametrize(
    "name", ["llama_rope3_tied", "llama_untied_nohd", "gemma3_window16", "qwen3_untied"]
)
def test_files_of_both_library_versions_are_equal(fixtures: Path, name: str) -> None:
    files = sorted((fixtures / name).glob("config*.json"))
    assert len(files) >= 2
    read = [config_from_hf(json.loads(file.read_text())) for file in files]
    assert all(config == read[0] for config in read)
    assert hash(read[0]) == hash(read[-1])


def test_values_are_those_of_the_file(fixtures: Path) -> None:
    llama = read_config(fixtures / "llama_rope3_tied")
    assert isinstance(llama, LlamaConfig)
    assert llama.rope == Rope(500_000.0, "llama3", 32.0, 1.0, 4.0, 64)
    assert (llama.head_dim, llama.tied, llama.norm_eps) == (64, True, 1e-5)
    assert (llama.bos_id, llama.eos_ids, llama.dtype) == (2, (1,), "bfloat16")
    gemma = read_config(fixtures / "gemma3_window16")
    assert isinstance(gemma, Gemma3Config)
    assert gemma.rope == Rope(1_000_000.0, "linear", 8.0)
    assert gemma.local_rope == Rope(10_000.0)
    assert gemma.layer_is_global == (False,) * 5 + (True,)
    assert (gemma.window, gemma.query_scalar) == (16, 32)


def test_head_dim_is_guessed_only_where_the_file_has_none(fixtures: Path) -> None:
    assert read_config(fixtures / "llama_untied_nohd").head_dim == 256 // 4
    assert LlamaConfig.from_hf({**LLAMA, "head_dim": 32}).head_dim == 32


@pytest.mark.parametrize("spelling", ["rope_type", "type"])
@pytest.mark.parametrize("theta_inside", [False, True])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rope_spellings(spelling: str, theta_inside: bool, key: str) -> None:
    spec = {**without(LLAMA3, "rope_type"), spelling: "llama3"}
    outer = {} if theta_inside else {"rope_theta": 5e5}
    inner = {"rope_theta": 5e5} if theta_inside else {}
    config = LlamaConfig.from_hf({**LLAMA, **outer, key: {**spec, **inner}})
    assert config.rope == Rope(5e5, "llama3", 8.0, 1.0, 4.0, 64)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", ["bfloat16", "torch.bfloat16"])
def test_dtype_spellings(key: str, value: str) -> None:
    assert LlamaConfig.from_hf({**LLAMA, key: value}).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("value", "ids"), [(7, (7,)), ([7, 8], (7, 8)), (None, ()), ([], ())]
)
def test_eos_spellings(value: Any, ids: tuple[int, ...]) -> None:
    assert LlamaConfig.from_hf({**LLAMA, "eos_token_id": value}).eos_ids == ids


def test_absent_kv_heads_are_as_many_as_query_heads() -> None:
    assert LlamaConfig.from_hf(without(LLAMA, "num_key_value_heads")).num_kv_heads == 4


def test_layer_pattern_spellings() -> None:
    pattern = Gemma3Config.from_hf(GEMMA)
    assert pattern.layer_is_global == (False, False, True, False)
    bare = without(GEMMA, "sliding_window_pattern")
    assert Gemma3Config.from_hf({**bare, "_sliding_window_pattern": 3}) == pattern
    types = ["full_attention" if g else "sliding_attention" for g in (0, 0, 1, 0)]
    assert Gemma3Config.from_hf({**bare, "layer_types": types}) == pattern
    # The list decides where a file has both.
    both = {**GEMMA, "layer_types": ["full_attention"] * 4}
    assert Gemma3Config.from_hf(both).layer_is_global == (True,) * 4


def test_nested_text_config_equals_flat_one() -> None:
    text = without(without(GEMMA, "model_type"), "max_position_embeddings")
    flat = {**GEMMA, "max_position_embeddings": 131072, "eos_token_id": [1, 106]}
    flat |= {"bos_token_id": 2, "torch_dtype": "bfloat16"}
    nested = {
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "torch_dtype": "bfloat16",
        "text_config": {**text, "dtype": "float32", "model_type": "gemma3_text"},
        "vision_config": {"hidden_size": 1},
    }
    assert config_from_hf(nested) == config_from_hf(flat)


def test_published_4b_file_leaves_out_what_is_default() -> None:
    config = config_from_hf(
        {
            "model_type": "gemma3",
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
        }
    )
    assert isinstance(config, Gemma3Config)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert config.rope == Rope(1_000_000.0, "linear", 8.0)
    assert sum(config.layer_is_global) == 5


REFUSED = [
    (
        LLAMA,
        "model_type",
        "mistral",
        r"is 'mistral'.*'gemma3_text', 'llama', 'qwen3",
    ),
    (QWEN, "use_sliding_window", True, r"'use_sliding_window' is True"),
    (
        QWEN,
        "layer_types",
        ["sliding_attention"] * 2,
        r"has 'sliding_att.*'full_attention'",
    ),
    (QWEN, "attention_bias", True, r"'attention_bias' is True"),
    (QWEN, "hidden_act", "gelu", r"'hidden_act' is 'gelu'.*'silu'"),
    (
        QWEN,
        "rope_scaling",
        {"rope_type": "yarn"},
        r"rope_scaling\['rope_type'\] is 'yarn'",
    ),
    (LLAMA, "hidden_act", "relu", r"'hidden_act' is 'relu'.*'silu'"),
    (GEMMA, "hidden_activation", "gelu", r"'gelu'.*'gelu_pytorch_tanh'"),
    (GEMMA, "hidden_act", "silu", r"'hidden_act' is 'silu'"),
    (LLAMA, "attention_bias", True, r"'attention_bias' is True"),
    (LLAMA, "mlp_bias", True, r"'mlp_bias' is True"),
    (LLAMA, "quantization_config", {"bits": 4}, r"'quantization_config'"),
    (LLAMA, "partial_rotary_factor", 0.5, r"'partial_rotary_factor' is 0.5"),
    (GEMMA, "final_logit_softcapping", 30.0, r"'final_logit_softcapping' is 30.0"),
    (GEMMA, "attn_logit_softcapping", 50.0, r"'attn_logit_softcapping' is 50.0"),
    (GEMMA, "use_bidirectional_attention", True, r"'use_bidirectional_attention'"),
    (LLAMA, "dtype", "int8", r"'dtype' is 'int8'.*'bfloat16'"),
    (LLAMA, "rope_scaling", {"type": "yarn"}, r"rope_scaling\['type'\] is 'yarn'"),
    (LLAMA, "rope_parameters", {"rope_type": "dynamic"}, r"rope_parameters.*'dynamic'"),
    (LLAMA, "rope_scaling", {"type": "linear"}, r"'factor' is missing.*'linear'"),
    (
        LLAMA,
        "rope_scaling",
        without(LLAMA3, "original_max_position_embeddings"),
        r"'original_max_position_embeddings' is missing.*'llama3'",
    ),
    (
        LLAMA,
        "rope_scaling",
        {**LLAMA3, "high_freq_factor": 1.0},
        r"high_freq_factor > low_freq_factor",
    ),
    (
        GEMMA,
        "rope_parameters",
        {"full_attention": {"rope_type": "yarn"}},
        r"rope_parameters\['full_attention'\]\['rope_type'\] is 'yarn'",
    ),
    (GEMMA, "layer_types", ["chunked_attention"] * 4, r"'chunked_attention'.*'full_"),
    (GEMMA, "layer_types", ["full_attention"], r"1 entries for 4 layers"),
    (GEMMA, "sliding_window", None, r"'sliding_window' is missing"),
    (GEMMA, "head_dim", None, r"'head_dim' is missing"),
    (LLAMA, "head_dim", 33, r"'head_dim' is 33.*even"),
    (LLAMA, "num_key_value_heads", 3, r"is 4, not a multiple of.*3"),
    (LLAMA, "hidden_size", None, r"'hidden_size' is missing"),
    (LLAMA, "vocab_size", 0, r"'vocab_size' is 0"),
    (LLAMA, "num_hidden_layers", "two", r"'num_hidden_layers' is 'two'"),
    (LLAMA, "eos_token_id", ["</s>"], r"'eos_token_id'.*token ids"),
]


@pytest.mark.parametrize(
    ("config", "key", "value", "message"),
    REFUSED,
    ids=[f"{r[1]}={r[2]}" for r in REFUSED],
)
def test_refused(config: dict[str, Any], key: str, value: Any, message: str) -> None:
    config_from_hf(config)
    with pytest.raises(ConfigError, match=message):
        config_from_hf({**config, key: value})


def test_qwen3_has_heads_of_128_where_the_file_says_nothing(fixtures: Path) -> None:
    assert Qwen3Config.from_hf(QWEN).head_dim == 128
    assert Qwen3Config.from_hf({**QWEN, "head_dim": 32}).head_dim == 32
    config = read_config(fixtures / "qwen3_untied")
    assert isinstance(config, Qwen3Config)
    assert config.head_dim * config.num_heads == 4 * config.hidden_size
    assert (config.rope, config.tied) == (Rope(1_000_000.0), False)


def test_a_window_that_no_layer_uses() -> None:
    types = ["full_attention"] * 2
    unused = {"sliding_window": 4096, "use_sliding_window": False, "layer_types": types}
    assert Qwen3Config.from_hf({**QWEN, **unused}) == Qwen3Config.from_hf(QWEN)


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist; expected a Hugging Face"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        read_config(tmp_path)
