"""What tells of the daemon itself, and of its model: probes, models, versions, metrics, keys."""

import logging
import pathlib
import re
import subprocess
import sys
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer

from moed.server.frontend import is_worth_logging
from tests.server.http.checkpoints import CHATML, END, START
from tests.server.http.configs import frontend_config
from tests.server.http.served import Served

PROBES = ("/livez", "/readyz", "/startupz", "/health", "/ready", "/ping")


@pytest.mark.parametrize("path", PROBES)
def test_probes(served: Served, path: str) -> None:
    response = served.get(path)
    assert response.status_code == 200
    assert response.json()["status"] == "ready" and response.json()["reason"] is None
    head = served.http.head(path)
    assert head.status_code == 200 and head.content == b""


def test_models(served: Served) -> None:
    with served.client() as client:
        listed = [model.id for model in client.models.list()]
        assert listed == ["tiny", "org/tiny-moe"]
        for name in listed:
            card = client.models.retrieve(name)
            assert card.id == name and card.object == "model" and card.owned_by == "moed"
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"
    card_body = served.get("/v1/models").json()["data"][0]
    assert card_body["max_model_len"] == 512
    assert card_body["moed"]["num_experts"] == 8 and card_body["moed"]["top_k"] == 2
    assert card_body["moed"]["data_parallel_size"] == 2


def test_version_names_what_it_stands_on(served: Served) -> None:
    body = served.get("/version").json()
    assert body["version"] and re.match(r"\d+\.\d+", body["torch"])


def test_tokenize_and_detokenize(served: Served, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello world").ids
    assert served.post("/tokenize", {"prompt": "hello world"}).json() == {
        "count": len(ids),
        "max_model_len": 512,
        "tokens": ids,
        "token_strs": None,
    }
    named = served.post("/tokenize", {"prompt": "hello world", "return_token_strs": True}).json()
    assert named["token_strs"] == ["hello", "Ġworld"]
    assert served.post("/detokenize", {"tokens": ids}).json() == {"prompt": "hello world"}
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    rendered = served.post("/tokenize", chat).json()["tokens"]
    text = f"{START}user\nhi{END}\n{START}assistant\n"
    assert served.post("/detokenize", {"tokens": rendered}).json() == {"prompt": text}
    bad: list[Any] = [{}, {"prompt": "a", **chat}, {"messages": []}, {"prompt": 5}]
    for body in bad:
        assert served.post("/tokenize", body).status_code == 400
    for tokens in ([400], [-1], ["a"], 5, None):
        assert served.post("/detokenize", {"tokens": tokens}).status_code == 400


def test_tokenizer_info_is_what_a_client_needs_to_tokenize(served: Served) -> None:
    info = served.get("/tokenizer_info").json()
    assert info["chat_template"] == CHATML
    assert info["eos_token"] == END and info["bos_token"] is None


def samples(served: Served) -> dict[tuple[str, str, str], float]:
    """(name, engine, bucket or reason) → value."""
    found = {}
    for family in text_string_to_metric_families(served.get("/metrics").text):
        for sample in family.samples:
            labels = sample.labels
            if sample.name.startswith("http_"):
                continue  # of no model
            assert labels["model_name"] == "tiny"
            extra = labels.get("finished_reason") or labels.get("le") or labels.get("phase", "")
            found[sample.name, labels.get("engine", ""), extra] = sample.value
    return found


def test_metrics_count_what_was_done(served: Served) -> None:
    before = samples(served)
    headers = {"X-data-parallel-rank": "1"}
    body = {"prompt": [1, 2, 3], "max_tokens": 5}
    assert served.post("/v1/completions", body, headers=headers).status_code == 200
    after = samples(served)

    def grown(name: str, engine: str, extra: str = "") -> float:
        key = (f"moed:{name}", engine, extra)
        return after[key] - before[key]

    assert grown("prompt_tokens_total", "1") == 3
    assert grown("generation_tokens_total", "1") == 5
    assert grown("request_success_total", "1", "length") == 1
    assert grown("time_to_first_token_seconds_count", "1") == 1
    assert grown("inter_token_latency_seconds_count", "1") == 4
    assert grown("e2e_request_latency_seconds_count", "1") == 1
    assert grown("engine_steps_total", "1") == 5
    assert grown("iteration_tokens_total_sum", "1") == 8
    for name in ("prompt_tokens_total", "generation_tokens_total"):
        assert grown(name, "0") == 0
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert all((f"moed:{name}", rank, "") in after for rank in "01")
    assert after["moed:rank_up", "0", ""] == after["moed:rank_up", "1", ""] == 1
    assert after["moed:max_step_tokens", "1", ""] == 7
    text = served.get("/metrics").text
    assert 'moed:rank_tokens_total{ep_rank="1",model_name="tiny",phase="decode"} 11.0' in text
    assert ("moed:requests_aborted_total", "0", "") in after
    assert after["moed:startup_phase_seconds", "0", "load"] == 0.5
    assert re.search(r'moed:cache_config_info\{block_size="16",.*num_gpu_blocks="64"\} 1\.0', text)
    assert 'moed:time_to_first_token_seconds_bucket{engine="0",le="0.001"' in text


def test_metrics_content_type(served: Served) -> None:
    assert served.get("/metrics").headers["content-type"].startswith("text/plain; version=0.0.4")


def test_api_keys(checkpoint: pathlib.Path) -> None:
    config = frontend_config(checkpoint, api_keys=("first-key", "second-key"))
    with Served(config) as served:
        for path in PROBES:
            assert served.get(path).status_code == 200
        for path in ("/v1/models", "/metrics", "/version", "/nope", "/openapi.json"):
            for header in (None, "Bearer wrong", "Bearer", "first-key", "Basic first-key", "é"):
                headers = {} if header is None else {"Authorization": header.encode()}
                response = served.get(path, headers=headers)
                assert response.status_code == 401
                assert response.headers["www-authenticate"] == "Bearer"
                assert response.json()["error"]["code"] == "invalid_api_key"
                assert "x-request-id" in response.headers
        for key in ("first-key", "second-key"):
            with served.client().with_options(api_key=key) as client:
                assert [model.id for model in client.models.list()] == ["tiny", "org/tiny-moe"]
        with served.client() as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        lower = served.get("/v1/models", headers={"Authorization": "bearer first-key"})
        assert lower.status_code == 200


def test_strict_parameters(checkpoint: pathlib.Path) -> None:
    with Served(frontend_config(checkpoint, strict_params=True)) as served:
        refused = served.post("/v1/completions", {"prompt": "a", "tempature": 1})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "tempature"
        assert refused.json()["error"]["code"] == "unsupported_parameter"
        nested = {"prompt": "a", "stream": True, "stream_options": {"x": 1}}
        assert served.post("/v1/completions", nested).status_code == 400
        assert served.complete(prompt="a", max_tokens=1, user="u")["choices"]


def test_sampling_defaults_of_the_checkpoint(checkpoint: pathlib.Path) -> None:
    given = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True}
    with Served(frontend_config(checkpoint, generation_config=given)) as served:
        served.complete(prompt="a", max_tokens=1)
        params = served.last_request.params
        assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.95, 20)
        served.complete(prompt="a", max_tokens=1, temperature=1, top_k=-1)
        params = served.last_request.params
        assert (params.temperature, params.top_p, params.top_k) == (1.0, 0.95, 0)


def test_checkpoint_that_is_not_to_be_sampled_from_is_greedy(checkpoint: pathlib.Path) -> None:
    config = frontend_config(checkpoint, generation_config={"do_sample": False})
    with Served(config) as served:
        served.complete(prompt="a", max_tokens=1)
        assert served.last_request.params.temperature == 0


@pytest.mark.parametrize(
    ("path", "is_logged"),
    [("/readyz", False), ("/metrics", False), ("/health?x=1", False), ("/v1/models", True)],
)
def test_probes_stay_out_of_the_access_log(path: str, is_logged: bool) -> None:
    arguments = ("127.0.0.1:5", "GET", path, "1.1", 200)
    record = logging.LogRecord("uvicorn.access", 20, "", 0, "%s", arguments, None)
    assert is_worth_logging(record) == is_logged


def test_front_end_imports_no_torch() -> None:
    program = "import sys, moed.server.frontend; print('torch' in sys.modules)"
    shown = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert shown.stdout.strip() == "False"
