"""Tokenizer files, streaming, and the tokenizer rebuilt from a GGUF vocabulary."""

import sys
from pathlib import Path
from typing import Any

import pytest

from models.gguf_tokenizer import build_tokenizer
from models.tokenizer import StreamDecoder, load_tokenizer

CONTROL, USER, BYTE, NORMAL = 3, 4, 6, 1


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    pytest.importorskip("tokenizers")
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    data = [f"<0x{byte:02X}>" for byte in range(256)]
    user = ["  ", "   "]
    words = ["\u2581", "a", "b", "ab", "ba", "\u2581ab", "\u2581a", "c", "bc", "é"]
    tokens = special + data + user + words
    types = [CONTROL] * 4 + [BYTE] * 256 + [USER] * 2 + [NORMAL] * len(words)
    # "ba" merges before "ab", and both before anything longer.
    best = {"ba": -1.0, "ab": -2.0, "bc": -3.0, "\u2581ab": -4.0, "\u2581a": -5.0}
    scores = [best.get(token, -100.0) for token in tokens]
    return build_tokenizer(tokens, scores, types, bos_id=2)


def pieces(tokenizer: Any, text: str) -> list[str]:
    return tokenizer.encode(text).tokens


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("ab", ["ab"]),
        ("aba", ["a", "ba"]),
        ("abc", ["ab", "c"]),
        (" ab", ["\u2581ab"]),
        ("a   b", ["a", "\u2581\u2581\u2581", "b"]),
        ("a\u20ac", ["a", "<0xE2>", "<0x82>", "<0xAC>"]),
    ],
)
def test_merges_follow_the_scores(tokenizer: Any, text: str, tokens: list[str]) -> None:
    assert pieces(tokenizer, text) == ["<bos>", *tokens]
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_whole_characters_only(tokenizer: Any) -> None:
    text = "a \u20ac\U0001f600 b"
    ids = tokenizer.encode(text).ids
    given = list(StreamDecoder(tokenizer).stream(ids))
    assert "".join(given) == text
    assert "\u20ac" in given
    assert "\U0001f600" in given
    assert len(given) > 4


def test_blanks_between_tokens_survive(tokenizer: Any) -> None:
    ids = tokenizer.encode(" ab ab   ab").ids
    decoder = StreamDecoder(tokenizer)
    text = "".join(decoder.push(token) for token in ids) + decoder.finish()
    assert text == " ab ab   ab"


def test_half_a_character_is_given_at_the_end(tokenizer: Any) -> None:
    decoder = StreamDecoder(tokenizer)
    a, *rest = tokenizer.encode("a\u20ac").ids[1:]
    assert decoder.push(a) == "a"
    assert [decoder.push(token) for token in rest[:2]] == ["", ""]
    assert decoder.finish().strip("\N{REPLACEMENT CHARACTER}") == ""


def test_load_tokenizer(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json does not exist"):
        load_tokenizer(tmp_path)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("ab").ids == tokenizer.encode("ab").ids


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match="pip install tokenizers"):
        load_tokenizer(tmp_path)
