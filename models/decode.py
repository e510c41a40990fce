"""Decode token by token: the names that a user needs, from one place.

`step.py` has one step of a batch, `generate.py` texts, `scores.py` the scores of texts
that are given, `cache.py` the cache.
"""

from models.cache import KVCache, export_cache, import_cache, init_cache
from models.generate import generate
from models.prompts import PAD, pad
from models.scores import teacher_forced
from models.step import DecodeStep, argument_shapes, decode_params, prefill

__all__ = [
    "PAD",
    "DecodeStep",
    "KVCache",
    "argument_shapes",
    "decode_params",
    "export_cache",
    "generate",
    "import_cache",
    "init_cache",
    "pad",
    "prefill",
    "teacher_forced",
]
