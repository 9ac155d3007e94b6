"""One output as it grows: tokens in, text that may be sent out, and how it ended."""

from dataclasses import dataclass, field

from moed.server.detokenizer import Detokenizer
from moed.server.messages import TokenLogprobs, TokenOutput
from moed.server.stop_strings import StopStrings


@dataclass(slots=True)
class Token:
    """One output (or, with echo, prompt) token."""

    token_id: int
    text_offset: int
    """Characters of the choice's text before it."""
    logprobs: TokenLogprobs | None


@dataclass(slots=True)
class Piece:
    """What can be sent: text, and the tokens that it came from."""

    text: str = ""
    tokens: list[Token] = field(default_factory=list)


class ChoiceText:
    """Tokens wait for their text: those of an incomplete character, or of what may become a stop
    string, come with the piece that holds it. Pieces put together are the whole output, whatever
    their sizes.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop_strings: StopStrings,
        *,
        min_tokens: int,
        own_stop_token_ids: frozenset[int],
        include_stop: bool,
        text_offset: int,
    ) -> None:
        """`text_offset`: characters that the choice's text begins with (an echoed prompt)."""
        self._detokenizer = detokenizer
        self._stop_strings = stop_strings
        self._min_tokens = min_tokens
        self._own_stop_token_ids = own_stop_token_ids
        self._include_stop = include_stop
        self._offset = text_offset
        self._pending = Piece()
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def feed(self, output: TokenOutput) -> Piece | None:
        """Take one output of the engine; a piece when there is something to send, or at the end."""
        last = len(output.token_ids) - 1
        for index, token_id in enumerate(output.token_ids):
            logprobs = None if output.logprobs is None else output.logprobs[index]
            is_stop = index == last and output.stop_token_id is not None
            self._add(token_id, logprobs, is_stop)
            if self.finish_reason is not None:
                return self._take()
        if output.finish_reason is not None:
            self._finish(output)
        if self._pending.text or self.finish_reason is not None:
            return self._take()
        return None

    def _add(self, token_id: int, logprobs: TokenLogprobs | None, is_stop: bool) -> None:
        self.num_tokens += 1
        self._pending.tokens.append(Token(token_id, self._offset, logprobs))
        if is_stop and not self._include_stop:
            return
        self._add_text(self._detokenizer.add(token_id))

    def _add_text(self, text: str) -> None:
        if not text:
            return
        self._offset += len(text)
        if self.num_tokens < self._min_tokens:
            self._pending.text += self._stop_strings.skip(text)
            return
        released, hit = self._stop_strings.add(text)
        self._pending.text += released
        if hit is not None:
            self.finish_reason, self.stop_reason = "stop", hit

    def _finish(self, output: TokenOutput) -> None:
        self._add_text(self._detokenizer.flush())
        if self.finish_reason is not None:
            return
        self._pending.text += self._stop_strings.flush()
        self.finish_reason = output.finish_reason
        if output.stop_token_id in self._own_stop_token_ids:
            self.stop_reason = output.stop_token_id

    def _take(self) -> Piece:
        piece, self._pending = self._pending, Piece()
        return piece
