"""Long texts are tokenized aside, to the same tokens, while others are served."""

from tokenizers import Tokenizer

from moed.server.tokenizer import MAX_INLINE_CHARACTERS, TextTokenizer
from tests.server.http.checkpoints import START, sentencepiece_tokenizer


async def test_a_long_text_has_the_same_tokens_as_in_one_piece(tokenizer: Tokenizer) -> None:
    text = f"The quick brown fox {START} jumps 😀 " * (MAX_INLINE_CHARACTERS // 20)
    for own in (TextTokenizer(tokenizer), TextTokenizer(sentencepiece_tokenizer())):
        for add_special in (True, False):
            expected = own.encode(text, add_special)
            assert await own.encode_async(text, add_special) == expected
