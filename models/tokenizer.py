"""Text to token ids and back, with the `tokenizers` package where it is installed."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# What a decoder puts where bytes are no character, or not yet.
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def load_tokenizer(folder: str | Path) -> "Tokenizer":
    """Load `tokenizer.json` of a checkpoint folder.

    `encode(text).ids` gives ids with the model's start token, `StreamDecoder` text.

    Raises:
        ImportError: The `tokenizers` package is not installed.
        FileNotFoundError: The folder has no `tokenizer.json`.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ImportError(
            "text needs the package 'tokenizers': pip install tokenizers, or pass "
            "token ids instead"
        ) from None
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; pass token ids instead")
    return Tokenizer.from_file(str(path))


class StreamDecoder:
    """Turn ids into text one by one, never printing half a character.

    A character may take several tokens (bytes), and the text of a token may depend on
    its neighbours (blanks). So the last tokens are decoded again together with each
    new one, and what is new is given out once it ends in a whole character.
    """

    def __init__(self, tokenizer: "Tokenizer") -> None:
        """Start a text; special tokens are left out of it."""
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # the last tokens given out, then those held back
        self._given = 0  # how many of them were given out

    def push(self, token: int) -> str:
        """Add a token; returns the text that is now certain, maybe none."""
        self._ids.append(token)
        return self._take(final=False)

    def finish(self) -> str:
        """End the text; returns what was held back, bytes of no character included."""
        return self._take(final=True)

    def stream(self, tokens: Iterable[int]) -> Iterator[str]:
        """Yield the text of tokens piece by piece."""
        for token in tokens:
            if text := self.push(token):
                yield text
        if text := self.finish():
            yield text

    def _take(self, *, final: bool) -> str:
        before = self._decode(self._ids[: self._given])
        text = self._decode(self._ids)
        if not final and text.endswith(_REPLACEMENT):
            return ""
        # Keep what was new as the context of what comes next.
        self._ids = self._ids[self._given :]
        self._given = len(self._ids)
        return text[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)
