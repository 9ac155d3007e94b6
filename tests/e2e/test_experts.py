"""Experts over HTTP: their load, where each token was routed, and a placement made from both."""

import base64
import io
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from moed.config.model import bundled_checkpoint
from tests.daemon import Daemon, events

PROMPT = [65, 70, 81, 92, 33, 47, 58, 101, 77]
OPERATIONS, PHASES = ("dispatch", "combine"), ("prefill", "decode")


@pytest.fixture(scope="module")
def oracle() -> Any:
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(
        str(bundled_checkpoint()), dtype=torch.float32
    )
    return model.eval()


def routed(oracle: Any, tokens: list[int]) -> list[torch.Tensor]:
    """By layer: [tokens, K], sorted, the experts that `transformers` takes."""
    with torch.inference_mode():
        out = oracle(input_ids=torch.tensor([tokens]), output_router_logits=True)
    top_k = oracle.config.num_experts_per_tok
    return [layer.topk(top_k).indices.sort(dim=-1).values for layer in out.router_logits]


def decoded(text: str) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint16]]":
    found: np.ndarray[tuple[int, ...], np.dtype[np.uint16]] = np.load(
        io.BytesIO(base64.b64decode(text)), allow_pickle=False
    )
    return found


def load_of(daemon: Daemon) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{daemon.url}/v1/moe/experts").raise_for_status().json()
    return found


def total(load: dict[str, Any]) -> int:
    return sum(sum(layer["rows"]) for layer in load["layers"])


def wait_total(daemon: Daemon, expected: int) -> dict[str, Any]:
    """Ranks report when they go to sleep."""
    deadline = time.monotonic() + 10
    while total(load := load_of(daemon)) != expected:
        assert time.monotonic() < deadline, (total(load), expected)
        time.sleep(0.05)
    return load


@pytest.mark.parametrize("rank", [0, 1])
def test_routed_experts_are_those_of_the_reference(daemon: Daemon, oracle: Any, rank: int) -> None:
    choice = daemon.complete(PROMPT, 6, rank, return_routed_experts=True)["choices"][0]
    tokens = [*PROMPT, *choice["token_ids"]][:-1]
    found = decoded(choice["routed_experts"])
    expected = routed(oracle, tokens)
    assert found.shape == (len(tokens), len(expected), oracle.config.num_experts_per_tok)
    assert found.dtype == np.uint16
    for index, layer in enumerate(expected):
        assert np.sort(found[:, index], axis=-1).tolist() == layer.tolist()


def test_a_stream_ends_with_them(daemon: Daemon) -> None:
    body = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0, "return_routed_experts": True}
    whole = daemon.post("/v1/completions", body, 0).json()["choices"][0]["routed_experts"]
    chunks = [
        chunk["choices"][0].get("routed_experts")
        for chunk in events(daemon.post("/v1/completions", {**body, "stream": True}, 1))
        if chunk != "[DONE]"
    ]
    assert chunks[-1] == whole and set(chunks[:-1]) <= {None}
    messages = {"messages": [{"role": "user", "content": "12 + 30"}], "max_tokens": 3}
    asked = {**messages, "temperature": 0, "return_routed_experts": True}
    chat = daemon.post("/v1/chat/completions", asked, 0).json()
    usage = chat["usage"]
    assert len(decoded(chat["choices"][0]["routed_experts"])) == usage["total_tokens"] - 1
    assert "routed_experts" not in daemon.post("/v1/chat/completions", messages, 0).json()


def test_every_row_is_counted_once(daemon: Daemon) -> None:
    daemon.complete(PROMPT, 1, 0)
    time.sleep(0.5)
    before = total(load_of(daemon))
    daemon.complete(PROMPT, 4, 1)
    # Of 9 + 4 tokens the last is never an input.
    model = json.loads((bundled_checkpoint() / "config.json").read_text())
    per_token = model["num_experts_per_tok"] * model["num_hidden_layers"]
    load = wait_total(daemon, before + (len(PROMPT) + 3) * per_token)
    assert load["num_experts"] == model["num_experts"] and load["num_ranks"] == 2
    for layer in load["layers"]:
        assert [len(held) for held in layer["experts_by_rank"]] == [4, 4]
        assert len(layer["rows"]) == model["num_experts"] and layer["imbalance"] >= 1
        assert sum(layer["window_rank_rows"]) == sum(layer["window_rows"])
    assert sum(map(daemon.rank_tokens, (0, 1))) == total(load)
    assert [value for _, value in daemon.series("moed:dropped_tokens_total")] == [0]


def wire_bytes(daemon: Daemon) -> dict[tuple[str, str, str], int]:
    return {
        (labels["op"], labels["scope"], labels["phase"]): int(value)
        for labels, value in daemon.series("moed:all2all_bytes_total")
    }


def computed(daemon: Daemon) -> dict[str, float]:
    """Rows by phase."""
    found = dict.fromkeys(PHASES, 0.0)
    for labels, value in daemon.series("moed:rank_tokens_total"):
        found[labels["phase"]] += value
    return found


def test_bytes_between_ranks_are_those_of_the_rows_that_had_to_go(daemon: Daemon) -> None:
    daemon.complete(PROMPT, 1, 0)
    time.sleep(0.5)
    before, rows_before = wire_bytes(daemon), total(load_of(daemon))
    computed_before = computed(daemon)
    answer = daemon.complete(PROMPT, 6, 0, return_routed_experts=True)["choices"][0]
    model = json.loads((bundled_checkpoint() / "config.json").read_text())
    top_k, num_layers = model["num_experts_per_tok"], model["num_hidden_layers"]
    num_rows = len(PROMPT) + 5
    load = wait_total(daemon, rows_before + num_rows * top_k * num_layers)
    chosen = decoded(answer["routed_experts"])
    # Rows of rank 0 with an expert on rank 1, by whether they are of the prompt.
    num_sent = {"prefill": 0, "decode": 0}
    for index, layer in enumerate(load["layers"]):
        far = set(layer["experts_by_rank"][1])
        for position in range(num_rows):
            goes = bool(far & set(chosen[position, index].tolist()))
            num_sent["prefill" if position < len(PROMPT) else "decode"] += goes
    assert min(num_sent.values()) > 0
    # The model computes in float32; an id of 64 bits and a weight of 32 go with each choice.
    result_bytes = model["hidden_size"] * 4
    after = wire_bytes(daemon)
    # Rank 1 has no tokens of its own: it computes in the phase of all.
    grown = {phase: count - computed_before[phase] for phase, count in computed(daemon).items()}
    per_row = top_k * num_layers
    assert grown == {"prefill": len(PROMPT) * per_row, "decode": 5 * per_row}
    for phase, count in num_sent.items():
        sent = {op: after[op, "intra", phase] - before[op, "intra", phase] for op in OPERATIONS}
        assert sent == {
            "dispatch": count * (result_bytes + 12 * top_k),
            "combine": count * result_bytes,
        }
        assert all(after[op, "inter", phase] == 0 for op in OPERATIONS)


def test_parts_of_layers_are_timed_in_both_phases(daemon: Daemon) -> None:
    daemon.complete(PROMPT, 4, 1)
    daemon.assert_at_rest()
    expected = {(op, phase) for op in OPERATIONS for phase in PHASES}
    exchanges = daemon.series("moed:all2all_seconds_count")
    assert {(labels["op"], labels["phase"]) for labels, count in exchanges if count} == expected
    for name in ("moe_gemm", "attention"):
        counts = daemon.series(f"moed:{name}_seconds_count")
        assert {labels["phase"] for labels, count in counts if count} == set(PHASES)
        (seconds,) = (
            value
            for labels, value in daemon.series(f"moed:{name}_seconds_sum")
            if labels["phase"] == "decode"
        )
        assert 0 < seconds < 60
    balanced = daemon.series("moed:expert_balancedness")
    assert {labels["phase"] for labels, value in balanced if 0 < value <= 1} == set(PHASES)


def test_a_placement_with_copies_serves_the_same_answers(daemon: Daemon, tmp_path: Path) -> None:
    """From a daemon's load to `moed place` to a daemon that is started with its file."""
    prompts = [[65 + seed, 70, 81, 92 + seed] * (seed + 1) for seed in range(6)]
    answers = [daemon.complete(prompt, 8, 0)["choices"][0]["token_ids"] for prompt in prompts]
    file = tmp_path / "placement.json"
    command = [sys.executable, "-m", "moed.server", "place", daemon.url, "--copies", "4"]
    subprocess.run([*command, "--output", str(file)], check=True, timeout=60)
    written = json.loads(file.read_text())
    assert written["imbalance"]["placed"] <= written["imbalance"]["linear"]
    for held in written["layers"].values():
        assert [len(experts) for experts in held] == [6, 6]
    with Daemon("--expert-placement", str(file)) as placed:
        placed.wait_ready()
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            choice = placed.complete(prompt, 8, number % 2)["choices"][0]
            assert choice["token_ids"] == answer
        layers = load_of(placed)["layers"]
        for layer in layers:
            assert layer["experts_by_rank"] == written["layers"][str(layer["layer"])]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["http://127.0.0.1:9"], "cannot reach http://127.0.0.1:9"),
        (["{here}/nothing.json"], "cannot read"),
        (["{here}/bad.json"], "is not an answer of /v1/moe/experts"),
        (["{here}/idle.json"], "has counted no rows yet"),
        (["{here}/good.json", "--copies", "9"], "9 copies are more than 2 ranks can use"),
        (["{here}/good.json", "--ranks", "0"], "at least 1 expert, 0 copies and 1 rank"),
        (["{here}/good.json", "--rank", "2"], "unrecognized arguments"),
        ([], "the following arguments are required: SOURCE"),
    ],
)
def test_what_cannot_be_placed(tmp_path: Path, words: list[str], message: str) -> None:
    layer = {"layer": 0, "rows": [3, 1], "window_rows": [0, 0]}
    contents: dict[str, Any] = {
        "bad": [],
        "idle": {"num_ranks": 2, "layers": [{**layer, "rows": [0, 0]}]},
        "good": {"num_ranks": 2, "layers": [layer]},
    }
    for name, content in contents.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    given = [word.format(here=tmp_path) for word in words]
    command = [sys.executable, "-m", "moed.server", "place", *given]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode in (64, 78) and message in result.stderr
    assert "Traceback" not in result.stderr
