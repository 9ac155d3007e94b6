"""The tensors of a step, worked out by hand."""

from array import array

import pytest
import torch

from moed.server.model_runner import make_batch
from moed.server.request import Request
from moed.server.scheduler import Schedule, ScheduledRequest
from tests.server.engine.fakes import make_request

CPU = torch.device("cpu")


def request(tokens: list[int], num_computed: int, blocks: list[int]) -> Request:
    made = Request.from_message(make_request("r", tokens, 9), 0, 100)
    made.num_computed_tokens = num_computed
    made.block_ids = array("q", blocks)
    return made


def test_prompt_piece_and_decode_together() -> None:
    # Blocks of 2 tokens. The piece: tokens 1, 2, 3 of six, in blocks 5 and 1. The decode: token 4.
    piece = ScheduledRequest(request([10, 11, 12, 13, 14, 15], 1, [5, 1, 7]), 3, range(1, 4), False)
    decode = ScheduledRequest(request([20, 21, 22, 23, 24], 4, [0, 3, 2]), 1, range(0), True)
    batch = make_batch(Schedule((piece, decode), 4), 2, False, CPU)
    assert batch.token_ids.tolist() == [11, 12, 13, 24]
    assert batch.positions.tolist() == [1, 2, 3, 4]
    # 5 * 2 + 1; 1 * 2; 1 * 2 + 1; 2 * 2.
    assert batch.slot_mapping.tolist() == [11, 2, 3, 4]
    assert (batch.query_lens, batch.context_lens) == ((3, 1), (4, 5))
    assert batch.block_tables.tolist() == [[5, 1, 7], [0, 3, 2]]
    # Prompt positions 1, 2, 3 lie in rows 0, 1, 2; the decode's only one in row 3.
    assert batch.logits_indices.tolist() == [0, 1, 2, 3]


def test_tables_are_padded_and_only_last_rows_are_wanted() -> None:
    first = ScheduledRequest(request([1, 2, 3], 0, [4, 6]), 3, range(0), True)
    second = ScheduledRequest(request([5, 6], 0, [9]), 2, range(0), True)
    batch = make_batch(Schedule((first, second), 5), 2, False, CPU)
    assert batch.block_tables.tolist() == [[4, 6], [9, 0]]
    assert batch.logits_indices.tolist() == [2, 4]


@pytest.mark.parametrize("field", ["token_ids", "positions", "slot_mapping", "logits_indices"])
def test_no_work(field: str) -> None:
    batch = make_batch(Schedule((), 0), 2, False, CPU)
    assert getattr(batch, field).shape == (0,)
    assert getattr(batch, field).dtype == torch.int64
    assert batch.block_tables.shape == (0, 0)
    assert batch.query_lens == () == batch.context_lens
