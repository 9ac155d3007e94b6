"""Layers that slide hold what their windows see, and go on from prefixes whose end is there."""

import pytest

from moed.config.kv_layout import KVLayout, kv_layout, max_window_blocks
from moed.config.windows import Window
from tests.server.engine.configs import engine_config
from tests.server.engine.fakes import Harness, expected_output

pytestmark = pytest.mark.usefixtures("any_order")

PROMPT = list(range(20, 60))
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_hidden_layers": 6,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 97,
    "max_position_embeddings": 4096,
    "sliding_window": 8,
}


def held(harness: Harness) -> int:
    assert harness.blocks.window_blocks is not None
    return harness.blocks.window_blocks.num_used_blocks


@pytest.mark.parametrize(("window", "most"), [(1, 1), (4, 2), (5, 2), (6, 2), (8, 3), (9, 3)])
def test_no_more_is_held_than_the_window_sees(window: int, most: int) -> None:
    harness = Harness(budget=64, num_blocks=32, window=Window(window))
    harness.add("a", PROMPT, 20)
    seen = []
    while harness.scheduler.has_requests:
        harness.step()
        seen.append(held(harness))
    # Blocks of 4 tokens; the last step frees the last ones.
    assert max(seen) == most and seen[-1] == 0
    assert harness.tokens("a") == expected_output(PROMPT, 20, [])


def test_prompt_in_pieces_takes_what_a_piece_needs() -> None:
    harness = Harness(budget=8, num_blocks=32, window=Window(4))
    harness.add("a", PROMPT, 3)
    schedule = harness.scheduler.schedule()
    assert held(harness) == 2 and len(schedule.requests[0].request.block_ids) == 10


@pytest.mark.parametrize(
    ("prompt", "expected"), [([*PROMPT, 1], 40), ([*PROMPT[:24], 0, 0], 24), (PROMPT, 36)]
)
def test_prefix_is_found_where_its_last_blocks_still_are(prompt: list[int], expected: int) -> None:
    harness = Harness(budget=64, num_blocks=64, max_num_seqs=8, max_model_len=64, window=Window(6))
    harness.add("first", PROMPT, 1)
    harness.run()
    harness.add("second", prompt, 4)
    harness.run()
    assert harness.outputs["second"][0].num_cached_tokens == expected
    assert harness.tokens("second") == expected_output(prompt, 4, [])


@pytest.mark.parametrize(("length", "expected"), [(17, 16), (16, 12), (15, 12), (25, 24)])
def test_prefix_of_aligned_windows_needs_nothing_of_the_windows_before(
    length: int, expected: int
) -> None:
    harness = Harness(budget=64, num_blocks=64, max_model_len=64, window=Window(8, True))
    harness.add("first", PROMPT[:length], 1)
    harness.run()
    harness.add("second", PROMPT[:length], 4)
    harness.run()
    assert harness.outputs["second"][0].num_cached_tokens == expected
    assert harness.tokens("second") == expected_output(PROMPT[:length], 4, [])


def test_prefix_is_shorter_where_blocks_of_the_window_are_gone() -> None:
    # 13 blocks for the windows: two prompts overwrite what is kept of the first.
    harness = Harness(budget=16, num_blocks=64, max_num_seqs=2, max_model_len=64, window=Window(6))
    harness.add("first", PROMPT, 1)
    harness.run()
    for name, token in (("b", 1), ("c", 2)):
        harness.add(name, [token] * 40, 1)
        harness.run()
    harness.add("again", PROMPT, 3)
    harness.run()
    assert harness.outputs["again"][0].num_cached_tokens == 0
    assert harness.tokens("again") == expected_output(PROMPT, 3, [])


def test_layout_of_a_model_with_both_kinds() -> None:
    config = engine_config(
        hf_config=GPT_OSS, max_num_batched_tokens=16, max_num_seqs=8, block_size=4
    )
    layout = kv_layout(config)
    # A token of a layer: K and V of 2 heads x 8 x 4 bytes.
    assert layout.block_bytes == layout.window_block_bytes == 3 * 4 * 128
    assert layout.max_window_blocks == max_window_blocks(config, 8) == 8 * (2 + 3) + 4
    assert layout.num_bytes(10) == 10 * 2 * 1536
    assert layout.num_bytes(100) == (100 + 44) * 1536
    for num_blocks in (1, 43, 44, 45, 1000):
        num_bytes = layout.num_bytes(num_blocks)
        assert layout.num_blocks(num_bytes) == num_blocks
        assert layout.num_blocks(num_bytes - 1) == num_blocks - 1


def test_layout_of_a_model_of_one_kind() -> None:
    layout = KVLayout(4, 1000, 0, 0, "")
    assert (layout.num_blocks(5999), layout.num_bytes(5), layout.num_tokens(5999)) == (5, 5000, 20)
    assert layout.num_window_blocks(5) == 0 and layout.num_blocks(-1) == 0
