"""What a front end tells of its work: series under both names, a JSON line for each request, a line
for people while there is something to tell.
"""

import dataclasses
import json
import logging
import pathlib
import re
import sys
from collections.abc import Iterator

import pytest

from moed.config.engine_config import ObservabilityConfig
from moed.server import metric_buckets
from moed.server import status_line as status_line_module
from moed.server.logs import REQUEST_LOGGER, JsonFormatter
from moed.server.metric_buckets import token_counts
from moed.server.metrics_compat import OLDER_NAMES, SHARED
from moed.server.status_line import Totals, status_line
from tests.server.http.configs import frontend_config
from tests.server.http.fake_engine import NUM_CACHED, NUM_PREEMPTIONS, QUEUE_S
from tests.server.http.served import Served

RANK_1 = {"X-data-parallel-rank": "1"}
SAMPLE = re.compile(r"^([a-z_:0-9]+)(?:\{(.*)\})? (\S+)$", re.M)
AT_REST = Totals(0, 0, 100, 50, 40, 10, 0.0)


@pytest.fixture(scope="module")
def telling(checkpoint: pathlib.Path) -> Iterator[Served]:
    told = ObservabilityConfig(
        log_format="text", log_requests=True, metrics_compat="none", otlp_traces_endpoint=None
    )
    with Served(frontend_config(checkpoint, observability=told)) as served:
        yield served


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """Of the request log."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logger, keep = logging.getLogger(REQUEST_LOGGER), Keep()
    level = logger.level
    logger.addHandler(keep)
    logger.setLevel(logging.INFO)
    yield found
    logger.removeHandler(keep)
    logger.setLevel(level)


def samples(served: Served) -> dict[tuple[str, str], float]:
    """By name and labels as shown."""
    text = served.get("/metrics").text
    return {(name, labels): float(value) for name, labels, value in SAMPLE.findall(text)}


def of_rank_1(served: Served, name: str, extra: str = "") -> float:
    labels = ('engine="1"', *([extra] if extra else []))
    found = [
        value
        for key, value in samples(served).items()
        if key[0] == name and all(label in key[1] for label in labels)
    ]
    return sum(found)


def test_each_end_of_a_request_is_counted_once(served: Served) -> None:
    expected = {
        "request_prompt_tokens_sum": 8,
        "request_generation_tokens_sum": 6,
        "request_prefill_kv_computed_tokens_sum": 2 * (4 - NUM_CACHED),
        "prompt_tokens_cached_total": 2 * NUM_CACHED,
        "request_params_max_tokens_sum": 6,
        "request_params_n_sum": 2,
        "request_max_num_generation_tokens_sum": 3,
        "request_queue_time_seconds_sum": 2 * QUEUE_S,
        "request_prefill_time_seconds_count": 2,
        "request_decode_time_seconds_count": 2,
        "request_inference_time_seconds_count": 2,
        "request_time_per_output_token_seconds_count": 2,
        "e2e_request_latency_seconds_count": 2,
        "request_num_preemptions_count": 2,
        "request_num_preemptions_sum": 2 * NUM_PREEMPTIONS,
    }
    before = {name: of_rank_1(served, f"moed:{name}") for name in expected}
    body = {"prompt": [1, 2, 3, 4], "max_tokens": 3, "n": 2}
    assert served.post("/v1/completions", body, headers=RANK_1).status_code == 200
    grown = {name: of_rank_1(served, f"moed:{name}") - before[name] for name in expected}
    assert grown == pytest.approx(expected)


def test_every_shared_series_has_vllms_name_and_the_same_value(served: Served) -> None:
    served.complete(prompt=[1, 2, 3], max_tokens=2)
    found = samples(served)
    families = re.findall(r"^# TYPE (\S+)", served.get("/metrics").text, re.M)
    for suffix in SHARED:
        for name in (suffix, *OLDER_NAMES.get(suffix, ())):
            assert {f"vllm:{name}", f"vllm:{name}_total"} & set(families), name
    copies = {key: value for key, value in found.items() if key[0].startswith("vllm:")}
    older = {name: new for new, names in OLDER_NAMES.items() for name in names}
    for (name, labels), value in copies.items():
        suffix = name.removeprefix("vllm:")
        for old, new in older.items():
            suffix = suffix.replace(old, new) if suffix.startswith(old) else suffix
        assert found[f"moed:{suffix}", labels] == value or "_created" in name


def test_vllms_names_can_be_left_out(telling: Served) -> None:
    text = telling.get("/metrics").text
    assert "vllm:" not in text and "moed:num_requests_running" in text


def test_http_series_name_routes_and_never_what_a_client_made_up(served: Served) -> None:
    def count(**labels: str) -> float:
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(
            value
            for key, value in samples(served).items()
            if key[0] == "http_requests_total" and all(label in key[1] for label in wanted)
        )

    good = {"handler": "/v1/completions", "method": "POST", "status": "2xx"}
    bad, made_up = {**good, "status": "4xx"}, {"handler": "none", "status": "4xx"}
    before = [count(**labels) for labels in (good, bad, made_up)]
    served.complete(prompt=[1], max_tokens=1)
    served.post("/v1/completions", {})
    served.get("/v1/made-up-by-a-client")
    served.http.request("MADEUP", "/v1/completions")
    grown = [
        count(**labels) - old for labels, old in zip((good, bad, made_up), before, strict=True)
    ]
    assert grown[:2] == [1, 1] and grown[2] >= 1
    text = served.get("/metrics").text
    assert "made-up" not in text and "MADEUP" not in text
    assert "http_request_duration_highr_seconds_bucket" in text


def test_a_request_that_ends_is_one_json_line_without_its_text(
    telling: Served, lines: list[str]
) -> None:
    secret = "hello hello hello"
    body = {"prompt": secret, "max_tokens": 4, "n": 2, "temperature": 0.5}
    headers = {**RANK_1, "X-Request-Id": "mine-1"}
    assert telling.post("/v1/completions", body, headers=headers).status_code == 200
    chat = {"messages": [{"role": "user", "content": secret}], "max_tokens": 1, "stream": True}
    assert telling.post("/v1/chat/completions", chat).status_code == 200
    telling.wait(lambda: len(lines) == 2)
    first, second = map(json.loads, lines)
    assert first["request_id"] == "mine-1" and first["operation"] == "text_completion"
    assert first["ranks"] == [1] and first["finish_reasons"] == ["length", "length"]
    assert first["completion_tokens"] == 8 and first["cached_tokens"] == NUM_CACHED
    assert first["queue_ms"] == 1000 * QUEUE_S
    assert 0 < first["ttft_ms"] <= first["e2e_ms"] and first["tpot_ms"] > 0
    assert second["operation"] == "chat" and second["tpot_ms"] is None
    assert "hello" not in "".join(lines)


def test_a_client_that_leaves_is_one_line_too(telling: Served, lines: list[str]) -> None:
    for engine in telling.engines:
        engine.step_s = 0.05
    body = {"prompt": [1], "max_tokens": 400, "stream": True}
    with telling.http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    telling.wait(lambda: len(lines) == 1)
    assert json.loads(lines[0])["finish_reasons"] == ["abort"]
    for engine in telling.engines:
        engine.step_s = 0.0


def test_status_line_only_while_there_is_something_to_tell() -> None:
    assert status_line(AT_REST, AT_REST, 10) is None
    busy = Totals(3, 1, 1100, 250, 140, 60, 0.254)
    assert status_line(AT_REST, busy, 10) == (
        "3 running, 1 waiting; 100.0 prompt and 20.0 output tokens/s; KV cache 25% used, "
        "50% of prompts found there"
    )
    stuck = dataclasses.replace(AT_REST, num_waiting=2)
    assert status_line(stuck, stuck, 10) is not None


def test_the_status_line_is_told_while_requests_run(
    checkpoint: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(status_line_module, "INTERVAL_S", 0.2)
    caplog.set_level(logging.INFO)
    with Served(frontend_config(checkpoint)) as served:
        for engine in served.engines:
            engine.step_s = 0.01
        served.complete(prompt=[1], max_tokens=60)
        served.wait(lambda: "output tokens/s" in caplog.text)
    told = [r.getMessage() for r in caplog.records if "output tokens/s" in r.getMessage()]
    assert any(line.startswith("1 running, 0 waiting; ") for line in told)


def test_json_log_lines_hold_the_traceback_in_one_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.LogRecord("a.b", 30, "f", 1, "%s says", ("x",), sys.exc_info())
    line = JsonFormatter("rank 1").format(record)
    assert "\n" not in line
    told = json.loads(line)
    assert (told["level"], told["process"], told["message"]) == ("warning", "rank 1", "x says")
    assert "ValueError: two" in told["exception"]


def test_buckets_rise() -> None:
    assert token_counts(250) == (1, 2, 5, 10, 20, 50, 100, 200)
    for name in ("FIRST_TOKEN_S", "BETWEEN_TOKENS_S", "LATENCY_S", "STEP_S", "HTTP_HIGHR_S"):
        limits = getattr(metric_buckets, name)
        assert list(limits) == sorted(set(limits))
