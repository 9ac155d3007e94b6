"""Long texts are tokenized aside, to the same tokens, while others are served."""

import concurrent.futures
import pathlib
import threading
from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer

from moed.server.tokenizer import MAX_INLINE_CHARACTERS, TextTokenizer
from tests.server.http.checkpoints import START, sentencepiece_tokenizer
from tests.server.http.configs import frontend_config
from tests.server.http.served import Served

MEGABYTE = 1_000_000


async def test_a_long_text_has_the_same_tokens_as_in_one_piece(tokenizer: Tokenizer) -> None:
    text = f"The quick brown fox {START} jumps 😀 " * (MAX_INLINE_CHARACTERS // 20)
    for own in (TextTokenizer(tokenizer), TextTokenizer(sentencepiece_tokenizer())):
        for add_special in (True, False):
            expected = own.encode(text, add_special)
            assert await own.encode_async(text, add_special) == expected


@pytest.fixture(scope="module")
def roomy(checkpoint: pathlib.Path) -> Iterator[Served]:
    """Takes a megabyte as a prompt: what can never fit is not tokenized at all."""
    with Served(frontend_config(checkpoint, max_request_bytes=2 * MEGABYTE)) as served:
        served.state.engine.context_length = MEGABYTE
        yield served


def test_a_probe_is_answered_while_a_megabyte_is_tokenized(
    roomy: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer waits here until the probes have been answered: it is not in their way."""
    started, probed = threading.Event(), threading.Event()
    encode = TextTokenizer._encode_long

    def watched(self: TextTokenizer, text: str, add_special_tokens: bool) -> list[int]:
        started.set()
        assert probed.wait(20), "no probe was answered meanwhile"
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(TextTokenizer, "_encode_long", watched)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        text = "lorem ipsum " * (MEGABYTE // 12)
        answer = pool.submit(roomy.post, "/tokenize", {"prompt": text})
        assert started.wait(20)
        for _ in range(20):
            assert roomy.get("/livez").status_code == 200
        probed.set()
        assert answer.result(20).json()["count"] > len(text) // 12
