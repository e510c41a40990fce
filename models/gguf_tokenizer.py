"""Rebuild the tokenizer of Gemma 3 from the vocabulary in a GGUF file.

The file has tokens, scores and types, but not the merges that byte-pair encoding needs.
They follow from the scores: a pair of tokens merges if its concatenation is a token,
and better-scored ones merge first.
"""

# pyright: reportUnknownMemberType=false

from collections.abc import Iterator, Sequence
from typing import Any

# Token types of GGUF (llama.cpp, enum llama_token_type).
_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6
# SentencePiece writes a blank as this character.
_BLANK = "\u2581"
_SPECIAL = frozenset(
    {
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        "<start_of_turn>",
        "<end_of_turn>",
        "<start_of_image>",
        "<end_of_image>",
    }
)


def build_tokenizer(
    tokens: Sequence[str],
    scores: Sequence[float],
    types: Sequence[int],
    *,
    bos_id: int,
) -> Any:
    """Make a `tokenizers.Tokenizer`.

    Args:
        tokens: Text of every id.
        scores: Score of every id; the higher, the earlier it merges.
        types: GGUF token type of every id.
        bos_id: Token that starts every text.
    """
    from tokenizers import (
        AddedToken,
        Tokenizer,
        decoders,
        models,
        normalizers,
        processors,
    )

    texts = [token.replace(" ", _BLANK) for token in tokens]
    vocabulary = {text: index for index, text in enumerate(texts)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(vocabulary, texts, scores, types),
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", _BLANK)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=token in _SPECIAL)
            for token, kind in zip(texts, types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    bos = texts[bos_id]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos} $B",
        special_tokens=[(bos, bos_id)],
    )
    return tokenizer


def _merges(
    vocabulary: dict[str, int],
    texts: Sequence[str],
    scores: Sequence[float],
    types: Sequence[int],
) -> list[tuple[str, str]]:
    """List every split of a token into two tokens, in the order in which they merge.

    User-defined tokens come first, longest first and then with the longer left part;
    then the others by falling score, then with the shorter left part.
    """

    def splits() -> Iterator[tuple[tuple[int, float, int], str, str]]:
        for text, score, kind in zip(texts, scores, types, strict=True):
            if kind in (_CONTROL, _BYTE):
                continue
            for cut in range(1, len(text)):
                left, right = text[:cut], text[cut:]
                if left not in vocabulary or right not in vocabulary:
                    continue
                if kind == _USER_DEFINED:
                    yield (0, -len(text), -cut), left, right
                else:
                    yield (1, -score, cut), left, right

    # A stable sort on the order alone: pairs of equal rank stay in vocabulary order.
    ranked = sorted(splits(), key=lambda split: split[0])
    return [(left, right) for _, left, right in ranked]
