"""Series about HTTP, under the names that dashboards know from vLLM."""

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary

from moed.server import metric_buckets as buckets

# Requests that no route takes, whatever path they name: paths are for anybody to make up.
NO_HANDLER = "none"


class HttpMetrics:
    """One observation per answer, at its end."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "http_requests",
            "Answers, by route, method and hundreds of the status.",
            ("handler", "method", "status"),
            registry=registry,
        )
        self._seconds = Histogram(
            "http_request_duration_seconds",
            "From a request's head to its answer's end, by route.",
            ("handler", "method"),
            buckets=buckets.HTTP_S,
            registry=registry,
        )
        self._highr_seconds = Histogram(
            "http_request_duration_highr_seconds",
            "From a request's head to its answer's end, in finer steps.",
            buckets=buckets.HTTP_HIGHR_S,
            registry=registry,
        )
        self._request_bytes = Summary(
            "http_request_size_bytes", "Bodies of requests.", ("handler",), registry=registry
        )
        self._response_bytes = Summary(
            "http_response_size_bytes", "Bodies of answers.", ("handler",), registry=registry
        )

    def on_answer(
        self,
        handler: str | None,
        method: str,
        status: int,
        seconds: float,
        num_request_bytes: int,
        num_response_bytes: int,
    ) -> None:
        """`handler`: the route's path as declared; None where there is none."""
        name = handler or NO_HANDLER
        # A client may send any word as its method.
        method = method if handler else NO_HANDLER
        self._requests.labels(name, method, f"{status // 100}xx").inc()
        self._seconds.labels(name, method).observe(seconds)
        self._highr_seconds.observe(seconds)
        self._request_bytes.labels(name).observe(num_request_bytes)
        self._response_bytes.labels(name).observe(num_response_bytes)
