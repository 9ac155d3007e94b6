"""A span for each request: in the caller's trace, with what it cost, sent where it was asked."""

import concurrent.futures
import http.server
import pathlib
import threading
import time
from collections.abc import Iterator

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.trace import SpanKind, StatusCode

from moed.config import tracing as checks
from moed.config.errors import ConfigError
from moed.server import tracing
from moed.server.ended_requests import EndedRequest
from moed.server.tracing import Tracing
from tests.server.http.fake_engine import NUM_CACHED
from tests.server.http.served import Served

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CONTEXT = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


@pytest.fixture
def spans(served: Served) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    listener = Tracing(SimpleSpanProcessor(exporter)).on_request_end
    served.request_listeners.append(listener)
    yield exporter
    served.request_listeners.remove(listener)


def only_span(exporter: InMemorySpanExporter) -> ReadableSpan:
    deadline = time.monotonic() + 5
    while not (found := exporter.get_finished_spans()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (span,) = found
    return span


@pytest.mark.parametrize("stream", [False, True])
def test_span_of_a_request(served: Served, spans: InMemorySpanExporter, stream: bool) -> None:
    before = time.time_ns()
    body = {"prompt": [1, 2, 3], "n": 2, "max_tokens": 5, "temperature": 0.5, "stream": stream}
    answer = served.post("/v1/completions", {**body, "ignore_eos": True}, headers=CONTEXT)
    assert answer.status_code == 200
    span = only_span(spans)
    assert span.context is not None and span.parent is not None
    assert f"{span.context.trace_id:032x}" == TRACE and f"{span.parent.span_id:016x}" == PARENT
    assert span.kind is SpanKind.SERVER and span.name == "text_completion tiny"
    assert span.status.status_code is StatusCode.UNSET
    assert span.start_time is not None and span.end_time is not None
    assert before - 10**7 <= span.start_time <= span.end_time <= time.time_ns() + 10**7
    found = dict(span.attributes or {})
    assert found["gen_ai.request.id"] == answer.headers["x-request-id"]
    assert found["gen_ai.request.model"] == "tiny"
    assert (found["gen_ai.usage.input_tokens"], found["gen_ai.usage.output_tokens"]) == (3, 10)
    assert found["gen_ai.request.max_tokens"] == 5 and found["gen_ai.request.temperature"] == 0.5
    assert found["gen_ai.response.finish_reasons"] == ("length", "length")
    first, whole = (found[f"gen_ai.latency.{name}"] for name in ("time_to_first_token", "e2e"))
    assert isinstance(first, float) and isinstance(whole, float) and 0 < first <= whole
    assert not any("prompt" in name for name in found)


def test_names_are_those_of_the_conventions(served: Served, spans: InMemorySpanExporter) -> None:
    """`gen_ai.latency.*` and the request's id are vLLM's; all others are OpenTelemetry's own."""
    known = {value for value in vars(gen_ai_attributes).values() if isinstance(value, str)}
    assert served.post("/v1/completions", {"prompt": [1, 2]}).status_code == 200
    found = dict(only_span(spans).attributes or {})
    others = {name for name in found if not name.startswith("gen_ai.latency.")} - known
    assert others == {"gen_ai.request.id"}
    assert found["gen_ai.usage.cache_read.input_tokens"] == NUM_CACHED
    assert found["gen_ai.provider.name"] == "moed"


def test_a_request_that_nobody_samples_costs_no_attributes(
    served: Served, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[EndedRequest] = []

    def attributes(request: EndedRequest) -> dict[str, str]:
        made.append(request)
        return {}

    monkeypatch.setattr(tracing, "attributes", attributes)
    unsampled = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    with served.client() as client:
        for headers in (unsampled, CONTEXT):
            client.completions.create(model="tiny", prompt="a", extra_headers=headers)
    only_span(spans)
    assert len(made) == 1


def test_the_service_is_named_by_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    found = tracing.resource().attributes
    assert found["service.name"] == "moed" and found["deployment.environment.name"] == "test"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat-eu")
    assert tracing.resource().attributes["service.name"] == "chat-eu"


def test_a_failed_request_says_so(served: Served, spans: InMemorySpanExporter) -> None:
    for engine in served.engines:
        engine.is_paused = True
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(served.post, "/v1/completions", {"prompt": [1]})
        served.wait(lambda: served.num_running == 1)
        served.fail_all()
        assert answer.result(10).status_code == 500
    span = only_span(spans)
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes is not None and span.attributes["error.type"] == "error"
    for engine in served.engines:
        engine._running.clear()


def test_without_a_context_a_trace_begins(served: Served, spans: InMemorySpanExporter) -> None:
    bad = {"traceparent": "00-nonsense"}
    assert served.post("/v1/completions", {"prompt": [1]}, headers=bad).status_code == 200
    assert only_span(spans).parent is None


def test_spans_reach_a_collector() -> None:
    from tests.daemon import Daemon

    received: list[bytes] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # noqa: N802
            received.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{collector.server_port}/v1/traces"
        with Daemon("--otlp-traces-endpoint", url, ranks=1) as daemon:
            daemon.wait_ready()
            daemon.complete([65], 3)
            daemon.process.terminate()
            assert daemon.wait_exit(30) == 0
        collector.shutdown()
    found = [ExportTraceServiceRequest.FromString(body) for body in received]
    scopes = [scope for f in found for r in f.resource_spans for scope in r.scope_spans]
    names = [span.name for scope in scopes for span in scope.spans]
    assert names == ["text_completion moed-demo"]


def test_collector_that_is_gone_costs_no_request_and_a_short_end() -> None:
    from tests.daemon import Daemon

    with Daemon("--otlp-traces-endpoint", "http://127.0.0.1:9/v1/traces", ranks=1) as daemon:
        daemon.wait_ready()
        daemon.complete([65], 3)
        daemon.process.terminate()
        assert daemon.wait_exit(30) == 0


def test_what_cannot_be_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.traces_endpoint(None) is None
    with pytest.raises(ConfigError, match="http://collector"):
        checks.traces_endpoint("collector:4317")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS") as refused:
        checks.traces_endpoint("https://user:secret@collector/v1/traces")
    assert "secret" not in str(refused.value)
    monkeypatch.setattr(checks, "PACKAGES", ("no_such_package.sdk",))
    with pytest.raises(ConfigError, match=r"pip install 'moed\[otel\]'"):
        checks.traces_endpoint("http://127.0.0.1:9")


def test_nothing_of_the_package_is_imported_unless_asked(tmp_path: pathlib.Path) -> None:
    import subprocess
    import sys

    code = (
        f"import sys; sys.path[:] = {sys.path!r}; import moed.server.frontend; "
        "sys.exit('opentelemetry.sdk' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, cwd=tmp_path).returncode == 0
