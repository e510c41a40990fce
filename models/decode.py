"""Decode token by token: the names that a user needs, from one place.

`step.py` has one step of a batch, `batches.py` batches of any number of rows,
`sampling.py` draws, `generate.py` texts, `scores.py` the scores of given texts, and
`cache.py` the cache. docs/decode.md shows them.
"""

from models.batches import CLASSES, Decoder, class_of
from models.cache import KVCache, export_cache, import_cache, init_cache
from models.generate import Generation, generate
from models.prompts import PAD, pad
from models.sampling import sample
from models.scores import teacher_forced
from models.step import DecodeStep, argument_shapes, decode_params, prefill

__all__ = [
    "CLASSES",
    "PAD",
    "DecodeStep",
    "Decoder",
    "Generation",
    "KVCache",
    "argument_shapes",
    "class_of",
    "decode_params",
    "export_cache",
    "generate",
    "import_cache",
    "init_cache",
    "pad",
    "prefill",
    "sample",
    "teacher_forced",
]
