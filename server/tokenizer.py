"""The checkpoint's tokenizer: text to ids, ids to text, and what one token looks like by itself."""

import asyncio
import json
import logging
import pathlib
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

from moed.config.errors import ModelError
from moed.server.detokenizer import ByteLevelDetokenizer, Detokenizer, WindowDetokenizer

logger = logging.getLogger(__name__)

# Longer texts are tokenized in a thread, so that other requests go on meanwhile.
MAX_INLINE_CHARACTERS = 4096
# Tokens of the prompt that a window starts with: more than any decoder looks back.
CONTEXT_TOKENS = 6
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# How much a normalizer may shorten a text before `fits` is wrong about it.
NORMALIZER_SLACK = 4


def _byte_of_character() -> dict[str, int]:
    """GPT-2's printable stand-in characters for the 256 bytes, by character."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_of_character()


class TextTokenizer:
    """Made from tokenizer.json. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # A file may carry settings of its training; a server cuts or fills nothing.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, entry in added.items() if entry.special)
        self._added_ids = frozenset(added)
        self.size: int = 1 + max(tokenizer.get_vocab().values(), default=-1)
        """One more than the largest id."""
        self._is_byte_level = _is_byte_level(json.loads(tokenizer.to_str()).get("decoder"))
        self._max_token_characters = max(map(len, tokenizer.get_vocab()), default=1)
        self._anchor = self._find_anchor()
        self.token_bytes = lru_cache(maxsize=None)(self._token_bytes)
        self.token_text = lru_cache(maxsize=None)(self._token_text)

    @classmethod
    def load(cls, folder: str) -> "TextTokenizer":
        """Read `folder`/tokenizer.json. Raises `ModelError`."""
        path = pathlib.Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise ModelError(
                f"{folder} holds no tokenizer.json, which serving text needs. Convert the "
                "tokenizer with transformers: AutoTokenizer.from_pretrained(MODEL)"
                ".save_pretrained(FOLDER)."
            )
        try:
            return cls(Tokenizer.from_file(str(path)))
        except Exception as error:  # `tokenizers` raises plain Exception
            raise ModelError(f"{path} cannot be read as a tokenizer: {error}") from None

    # Text to ids ---------------------------------------------------------------------------------

    def fits(self, text: str, max_tokens: int) -> bool:
        """False when `text` is certainly longer than `max_tokens`: known without tokenizing it."""
        return len(text) <= max_tokens * self._max_token_characters * NORMALIZER_SLACK

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    async def encode_async(self, text: str, add_special_tokens: bool) -> list[int]:
        """As `encode`, without holding up the event loop."""
        if len(text) <= MAX_INLINE_CHARACTERS:
            return self.encode(text, add_special_tokens)
        return await asyncio.to_thread(self.encode, text, add_special_tokens)

    # Ids to text ---------------------------------------------------------------------------------

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(
        self,
        context: Sequence[int],
        skip_special_tokens: bool,
        shown: frozenset[int] = frozenset(),
    ) -> Detokenizer:
        """For an output that follows the tokens `context` (its last few are enough). The special
        tokens `shown` are never skipped.
        """
        skip = self.special_ids - shown if skip_special_tokens else frozenset()
        if self._is_byte_level:
            return ByteLevelDetokenizer(self.token_bytes, skip)
        before = [token for token in context[-CONTEXT_TOKENS:] if token not in skip]
        return WindowDetokenizer(lambda ids: self.decode(ids, False), before, skip)

    def special_id(self, text: str) -> int | None:
        """The id of a special token; None where the text is none."""
        token_id: int | None = self._tokenizer.token_to_id(text)
        return token_id if token_id in self.special_ids else None

    def token_id(self, text: str) -> int | None:
        """The id of the added token, special or not, that is `text`; None where none is."""
        token_id: int | None = self._tokenizer.token_to_id(text)
        return token_id if token_id in self._added_ids else None

    def token_name(self, token_id: int) -> str:
        """The vocabulary's own spelling."""
        return self._tokenizer.id_to_token(token_id) or ""

    def _token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to an output."""
        name = self._tokenizer.id_to_token(token_id)
        if name is None:
            return b""
        if self._is_byte_level:
            try:
                return bytes([BYTE_OF_CHARACTER[character] for character in name])
            except KeyError:
                return str(name).encode()
        if (match := BYTE_TOKEN.fullmatch(name)) is not None:
            return bytes([int(match.group(1), 16)])
        # Behind another token, so that a decoder which strips the text's first space keeps this
        # one's.
        both = self.decode([*self._anchor, token_id], skip_special_tokens=False)
        return both[len(self.decode(self._anchor, skip_special_tokens=False)) :].encode()

    def _token_text(self, token_id: int) -> str:
        """A token by itself, as logprobs name it: `bytes:\\xe2\\x82` for a part of a character."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _find_anchor(self) -> list[int]:
        ids = [] if self._is_byte_level else self.encode("a", add_special_tokens=False)
        return ids[-1:]


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    if decoder is None:
        return False
    if decoder.get("type") == "Sequence":
        steps = decoder.get("decoders", [])
        return len(steps) == 1 and _is_byte_level(steps[0])
    return decoder.get("type") == "ByteLevel"
