"""Two real ranks against `transformers`: a random checkpoint, mixed load, too few blocks."""

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moed.config.engine_config import EngineConfig
from moed.dist.registry import capabilities
from moed.server.messages import TokenLogprobs
from tests.server.engine.configs import engine_config
from tests.server.engine.fakes import make_request
from tests.server.engine.group import RankGroup

VOCAB_SIZE = 97
L = 64
B = 16
BLOCK_SIZE = 4
NUM_BLOCKS = 24


@pytest.fixture(scope="module")
def model() -> Any:
    """Weights large enough that greedy choices are decisive and depend on the whole context."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "intermediate_size": 16,
        "max_position_embeddings": 256,
        "initializer_range": 0.4,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    }
    made: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))
    return made.to(torch.float32).eval()


@pytest.fixture(scope="module")
def checkpoint(model: Any, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(folder)
    return folder


def two_ranks(checkpoint: pathlib.Path, **more: Any) -> EngineConfig:
    return engine_config(
        backend=capabilities()["all2allv"],
        ranks=2,
        path=str(checkpoint),
        hf_config=json.loads((checkpoint / "config.json").read_text()),
        **{
            "max_num_batched_tokens": B,
            "max_num_seqs": 8,
            "max_model_len": L,
            "block_size": BLOCK_SIZE,
            "num_kv_blocks": NUM_BLOCKS,
            **more,
        },
    )


@pytest.fixture(scope="module")
def group(checkpoint: pathlib.Path) -> Iterator[RankGroup]:
    # Rank 0 alone would have had 64 blocks.
    config = two_ranks(
        checkpoint,
        num_kv_blocks=64,
        fault_injection=f"kv_blocks:rank=1:blocks={NUM_BLOCKS}",
    )
    with RankGroup(config) as started:
        started.wait_ready()
        yield started
        assert started.stop() == [0, 0], started.failures()


@torch.inference_mode()
def logits_of(model: Any, tokens: list[int]) -> torch.Tensor:
    """[tokens, V] float32."""
    logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits.float()


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_of(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def prompt_of(number: int, length: int) -> list[int]:
    return [(number * 13 + 5 * i) % VOCAB_SIZE for i in range(length)]


def test_block_count_is_the_minimum_and_known_to_all(group: RankGroup) -> None:
    assert {ready.num_kv_blocks for ready in group.ready.values()} == {NUM_BLOCKS}
    assert {ready.max_model_len for ready in group.ready.values()} == {L}
    assert set(group.ready[0].startup_s) == {"import", "rendezvous", "load", "warm_up"}


def test_mixed_load_equals_transformers(group: RankGroup, model: Any) -> None:
    """Prompts below, at and above B on both ranks, arriving while others decode."""
    lengths = [1, B, B + 1, 2, 3 * B, 7, B - 1, 33]
    for number, length in enumerate(lengths):
        group.add(number % 2, make_request(f"mixed-{number}", prompt_of(number, length), 10))
        group.wake()
        if number == 3:
            group.finish(["mixed-0"])
    group.finish([f"mixed-{number}" for number in range(len(lengths))])
    for number, length in enumerate(lengths):
        assert group.tokens(f"mixed-{number}") == greedy(model, prompt_of(number, length), 10)
        assert group.reason(f"mixed-{number}") == "length"
    group.settle()
    assert all(0 < stats.max_step_tokens <= B for stats in group.stats.values())
    # Both ranks' experts had rows to compute.
    group.wait_expert_loads()


def test_preemption_changes_nothing(group: RankGroup, model: Any) -> None:
    """Four requests of 40 tokens each need 40 blocks of 24, and all of them on one rank."""
    before = group.stats[1].num_preemptions if 1 in group.stats else 0
    for number in range(4):
        message = make_request(
            f"tight-{number}", prompt_of(number, 8), 32, prompt_logprobs=0, logprobs=1
        )
        group.add(1, message)
    group.wake()
    names = [f"tight-{number}" for number in range(4)]
    group.finish(names)
    group.settle()
    assert group.stats[1].num_preemptions > before
    for number, name in enumerate(names):
        prompt = prompt_of(number, 8)
        output = greedy(model, prompt, 32)
        assert group.tokens(name) == output
        raw = torch.log_softmax(logits_of(model, [*prompt, *output]), dim=1)
        found = [entry.logprob for o in group.outputs[name] for entry in o.logprobs or []]
        expected = [float(raw[7 + i, token]) for i, token in enumerate(output)]
        assert found == pytest.approx(expected, abs=1e-4)
        scored = [o for o in group.outputs[name] if o.prompt_logprobs is not None]
        assert len(scored) == 1 and scored[0].output_index == 0


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_prompt_logprobs_in_pieces_equal_transformers(
    group: RankGroup, model: Any, max_tokens: int
) -> None:
    prompt = prompt_of(3, 3 * B + 1)
    name = f"scored-{max_tokens}"
    group.add(0, make_request(name, prompt, max_tokens, prompt_logprobs=2))
    group.wake()
    group.finish([name])
    first = group.outputs[name][0]
    assert len(group.tokens(name)) == max_tokens and first.finish_reason == "length"
    assert first.prompt_logprobs is not None and len(first.prompt_logprobs) == len(prompt)
    assert first.prompt_logprobs[0] is None
    raw = torch.log_softmax(logits_of(model, prompt), dim=1)
    for position, entry in enumerate(first.prompt_logprobs[1:]):
        assert isinstance(entry, TokenLogprobs)
        row = raw[position]
        chosen = float(row[prompt[position + 1]])
        assert entry.logprob == pytest.approx(chosen, abs=1e-4)
        assert entry.rank == int((row > chosen).sum()) + 1
        assert entry.top_ids == row.topk(2).indices.tolist()


def test_seeded_draws_do_not_depend_on_rank_or_company(group: RankGroup) -> None:
    prompt = prompt_of(1, 9)
    drawn = {"temperature": 0.9, "seed": 1234, "top_p": 0.95}
    group.add(0, make_request("alone", prompt, 12, **drawn))
    group.wake()
    group.finish(["alone"])
    group.add(1, make_request("company", prompt, 12, **drawn))
    for number in range(3):
        noise = {"temperature": 1.5, "seed": number}
        group.add(number % 2, make_request(f"noise-{number}", prompt_of(number, 5), 20, **noise))
    group.wake()
    group.finish(["company", *(f"noise-{number}" for number in range(3))])
    assert group.tokens("company") == group.tokens("alone")
    # Taken over by another rank in the middle, as after a failure.
    message = make_request(
        "resumed", prompt, 12, output_token_ids=group.tokens("alone")[:5], epoch=1, **drawn
    )
    group.add(1, message)
    group.wake()
    group.finish(["resumed"])
    rest = [token for output in group.outputs["resumed"] for token in output.token_ids]
    assert rest == group.tokens("alone")[5:]


def test_aborts_and_bad_requests_leave_nothing_behind(group: RankGroup, model: Any) -> None:
    for number in range(12):
        group.add(number % 2, make_request(f"gone-{number}", prompt_of(number, 20), 40))
    group.add(0, make_request("bad", [VOCAB_SIZE], 1))
    group.add(1, make_request("long", prompt_of(0, L), 1))
    group.add(1, make_request("longest", prompt_of(0, L - 1), 5))
    group.wake()
    group.finish(["bad", "long"])
    for rank in range(2):
        group.abort(rank, [f"gone-{number}" for number in range(12)])
    group.finish(["longest"])
    assert (group.reason("bad"), group.reason("long")) == ("error", "error")
    assert group.tokens("longest") == greedy(model, prompt_of(0, L - 1), 1)
    group.settle()


def test_failed_load_is_one_rank_s_own_error_and_a_consequence_elsewhere(
    checkpoint: pathlib.Path,
) -> None:
    with RankGroup(two_ranks(checkpoint, fault_injection="fail_load:rank=1")) as group:
        codes = group.exit_codes()
        assert codes[1] == 65 and codes[0] not in (0, None)
        failures = group.failures()
        assert "fail_load" in failures[1].error and not failures[1].is_consequence
        assert failures[0].is_consequence
