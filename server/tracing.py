"""One OpenTelemetry span for each HTTP request, when asked for: the package comes with the extra
`otel`, and nothing of it is imported otherwise. Spans hold no prompt and no output.

Attributes are those of OpenTelemetry's conventions for generative AI, and vLLM's for latencies.
"""

import time
from collections.abc import Mapping
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from moed.server.ended_requests import EndedRequest

SERVICE = "moed"
# What the SDK calls a service that nobody has named.
UNKNOWN = "unknown_service"
FAILED = "error"
# Of one batch. It also bounds what a collector that is gone costs the shutdown.
EXPORT_S = 2.0


class Tracing:
    """Gives spans to a processor: exported in batches, by a thread of their own."""

    def __init__(self, processor: SpanProcessor) -> None:
        self._provider = TracerProvider(resource=resource())
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("moed.server")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to_endpoint(cls, endpoint: str) -> "Tracing":
        """`endpoint`: where a collector takes OTLP over HTTP."""
        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_S)))

    def on_request_end(self, request: EndedRequest) -> None:
        """A span from its submission to the end of its last choice, in the caller's trace."""
        origin, choices = request.origin, request.choices
        # Spans tell the time of day; choices, a clock that never jumps.
        offset = time.time() - time.monotonic()
        span = self._tracer.start_span(
            f"{origin.operation} {origin.model}",
            context=self._propagator.extract(origin.headers),
            kind=SpanKind.SERVER,
            start_time=_nanoseconds(min(choice.submitted_at for choice in choices) + offset),
        )
        if not span.is_recording():
            return  # the caller, or the sampler of `OTEL_TRACES_SAMPLER`, does not want it
        span.set_attributes(attributes(request))
        if any(choice.reason == FAILED for choice in choices):
            span.set_status(Status(StatusCode.ERROR))
            span.set_attribute("error.type", FAILED)
        span.end(_nanoseconds(max(choice.ended_at for choice in choices) + offset))

    def close(self) -> None:
        """Send what is left, within the exporter's own bound."""
        self._provider.shutdown()


def resource() -> Resource:
    """What the spans are of: as `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` say."""
    found = Resource.create()
    if str(found.attributes.get(SERVICE_NAME, UNKNOWN)).startswith(UNKNOWN):
        found = found.merge(Resource({SERVICE_NAME: SERVICE}))
    return found


def attributes(request: EndedRequest) -> Mapping[str, Any]:
    """Of the span. Latencies in seconds, of several choices the longest."""
    origin, choices = request.origin, request.choices
    prompts = choices[:: origin.num_per_prompt]
    found: dict[str, Any] = {
        "gen_ai.operation.name": origin.operation,
        "gen_ai.provider.name": SERVICE,
        "gen_ai.request.model": origin.model,
        "gen_ai.response.model": origin.model,
        "gen_ai.request.id": origin.request_id,
        "gen_ai.request.choice.count": origin.num_per_prompt,
        "gen_ai.request.max_tokens": origin.max_tokens,
        "gen_ai.request.temperature": origin.temperature,
        "gen_ai.request.top_p": origin.top_p,
        "gen_ai.response.finish_reasons": [choice.reason for choice in choices],
        "gen_ai.usage.input_tokens": sum(choice.num_prompt_tokens for choice in prompts),
        "gen_ai.usage.cache_read.input_tokens": sum(choice.num_cached_tokens for choice in prompts),
        "gen_ai.usage.output_tokens": sum(choice.num_output_tokens for choice in choices),
        "gen_ai.latency.time_in_queue": max(choice.queue_s for choice in choices),
        "gen_ai.latency.time_to_first_token": max(
            (c.first_token_s for c in choices if c.first_token_s is not None), default=None
        ),
        "gen_ai.latency.e2e": max(choice.e2e_s for choice in choices),
    }
    return {name: value for name, value in found.items() if value is not None}


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
