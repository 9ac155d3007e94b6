"""Token ids to text, one at a time: never half a character, and the same text as all at once."""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
# A character has at most four bytes: what is incomplete after more tokens than this never will be
# complete.
MAX_HELD_TOKENS = 8


class Detokenizer(Protocol):
    """Text of one output as it grows."""

    def add(self, token_id: int) -> str:
        """Text that is now certain; empty while a character is incomplete."""
        ...

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an incomplete character."""
        ...


class ByteLevelDetokenizer:
    """For tokenizers whose tokens are bytes: exact, and each token costs its own bytes only."""

    def __init__(self, token_bytes: Callable[[int], bytes], skip: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._skip = skip
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        return self._decoder.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For any other tokenizer: decodes a short window, and gives what it adds to the one before.

    The window starts with tokens whose text is out already, so that a decoder which treats the
    first token differently (leading spaces) sees it where it is.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], context: Sequence[int], skip: frozenset[int]
    ) -> None:
        """`context`: the last tokens before the output (of the prompt), or none."""
        self._decode = decode
        self._skip = skip
        self._window = list(context)
        self._num_out = len(self._window)
        self._out = decode(self._window) if self._window else ""

    def add(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        is_incomplete = text.endswith(REPLACEMENT) and self._num_held <= MAX_HELD_TOKENS
        if is_incomplete or len(text) <= len(self._out):
            return ""
        return self._emit(text)

    @property
    def _num_held(self) -> int:
        return len(self._window) - self._num_out

    def flush(self) -> str:
        text = self._decode(self._window)
        return self._emit(text) if len(text) > len(self._out) else ""

    def _emit(self, text: str) -> str:
        new = text[len(self._out) :]
        # What was out before this piece is needed no more; this piece becomes the context.
        del self._window[: self._num_out]
        self._num_out = len(self._window)
        self._out = self._decode(self._window)
        return new
