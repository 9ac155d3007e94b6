"""Both orders of the loop give the same tokens, whatever is asked of sampling."""

from typing import Any

import pytest
import torch

from moed.config.graphs import GraphShape
from moed.config.model import bundled_checkpoint, load_model_config
from moed.server.grammar_library import to_llguidance
from moed.server.grammar_masks import GrammarMasks
from moed.server.messages import (
    AbortRequests,
    AddRequest,
    ForgetPrefixes,
    PauseRequests,
    ResumeRequests,
    ToEngine,
    TokenOutput,
    Wake,
)
from tests.server.engine.fakes import make_request
from tests.server.engine.test_engine_loop import FakeRunner, Rank, StepBatch, Table, stop

VOCAB_SIZE = 768
ENDS = [765, 763]
GRAMMAR = to_llguidance("regex", "(yes|no)( [a-z]{2,9}){3}", outer="", calls="")


class NoisyRunner(FakeRunner):
    """Logits that are a pure function of the whole prefix, wide open to what sampling does."""

    def run(self, batch: StepBatch, dp_metadata: object, graph: GraphShape) -> torch.Tensor:
        self.steps.append(batch.num_tokens)
        rows = [torch.empty(0, VOCAB_SIZE)]
        for prefix in batch.prefixes:
            generator = torch.Generator().manual_seed(hash(tuple(prefix)) % 2**63)
            rows.append(torch.randn(1, VOCAB_SIZE, generator=generator))
        return torch.cat(rows)


ASKED: list[dict[str, Any]] = [
    {},
    {"logprobs": 3},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.7, "seed": 6, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.7, "presence_penalty": 0.3},
    {"stop_token_ids": list(range(0, VOCAB_SIZE, 5)), "min_tokens": 3},
    {"bad_words": [[3], [9, 4]], "logit_bias": {17: 4.0, 19: 4.0}},
    {"allowed_token_ids": [3, 4, 5, 6], "frequency_penalty": 2.0},
    {"grammar": GRAMMAR, "stop_token_ids": ENDS},
    {"grammar": GRAMMAR, "stop_token_ids": ENDS, "temperature": 1.0, "seed": 8, "logprobs": 0},
    {"prompt_logprobs": 1},
    {"stop_token_ids": list(range(0, VOCAB_SIZE, 3)), "temperature": 1.0, "seed": 9},
]


def requests() -> list[AddRequest]:
    return [
        make_request(str(number), [number, 2, 3] * (1 + number % 4), 15, **asked)
        for number, asked in enumerate(ASKED)
    ]


@pytest.fixture(scope="module")
def masks() -> GrammarMasks:
    model = load_model_config(
        bundled_checkpoint(),
        model="demo",
        revision=None,
        served_model_names=("demo",),
        dtype="auto",
        load_format="auto",
        seed=0,
    )
    return GrammarMasks(model, num_threads=1)


def serve(
    masks: GrammarMasks, step_ahead: bool, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> Rank:
    monkeypatch.setattr(Rank, "step_ahead", step_ahead)
    monkeypatch.setattr(Rank, "num_blocks", num_blocks)
    monkeypatch.setattr(Rank, "vocab_size", VOCAB_SIZE)
    script: list[tuple[int, ToEngine]] = [(1, request) for request in requests()]
    slow = ["0", "1", "4"]
    script += [(1, Wake(1)), (4, PauseRequests(slow)), (9, ResumeRequests(slow))]
    script += [(12, AbortRequests(["3"])), (14, ForgetPrefixes()), *stop(400, 2)]
    rank = Rank(script, Table(1), 0, None)
    rank.loop._grammars = masks
    rank.loop._runner = NoisyRunner()  # type: ignore[assignment]
    rank.loop.run()
    assert rank.blocks.num_used_blocks == 0
    return rank


def whole(rank: Rank, request_id: str) -> list[TokenOutput]:
    return [o for r in rank.channel.reports for o in r.outputs if o.request_id == request_id]


# With 9 blocks of 4 tokens, four requests of up to 27 are preempted again and again.
@pytest.mark.parametrize("num_blocks", [32, 9])
def test_both_orders_give_the_same(
    masks: GrammarMasks, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = serve(masks, False, num_blocks, monkeypatch)
    ahead = serve(masks, True, num_blocks, monkeypatch)
    preemptions = [rank.scheduler.counters.num_preemptions for rank in (plain, ahead)]
    assert all(count > 0 for count in preemptions) == (num_blocks == 9)
    for number, asked in enumerate(ASKED):
        name = str(number)
        first, second = plain.channel.tokens(name), ahead.channel.tokens(name)
        if name == "3":
            # Aborted, with fewer tokens taken in.
            assert second == first[: len(second)]
            continue
        assert first and second == first, asked
        outputs, others = whole(plain, name), whole(ahead, name)
        assert [o.finish_reason for o in others] == [o.finish_reason for o in outputs]
        assert outputs[-1].finish_reason in ("stop", "length")
        assert [o.logprobs for o in others] == [o.logprobs for o in outputs]
        assert [o.prompt_logprobs for o in others] == [o.prompt_logprobs for o in outputs]
