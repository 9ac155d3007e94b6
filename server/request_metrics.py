"""Series about requests, as this front end sees them: latencies, sizes, and how they ended."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import HistogramMetricFamily, Metric

from moed.config.engine_config import EngineConfig
from moed.server import histogram
from moed.server import metric_buckets as buckets
from moed.server.ended_requests import EndedChoice, EndedRequest

LABELS = ("model_name", "engine")
REASONS = ("stop", "length", "abort", "error")
SOURCES = ("local_compute", "local_cache_hit")

# Latencies of one choice at its end: suffix, property of `EndedChoice`, buckets, help.
TIMES = (
    (
        "e2e_request_latency_seconds",
        "e2e_s",
        buckets.LATENCY_S,
        "From the request's arrival to its end.",
    ),
    (
        "request_queue_time_seconds",
        "queue_s",
        buckets.LATENCY_S,
        "Between a request's arrival at its rank and its first step.",
    ),
    (
        "request_prefill_time_seconds",
        "prefill_s",
        buckets.LATENCY_S,
        "From a request's first step to its first token.",
    ),
    (
        "request_decode_time_seconds",
        "decode_s",
        buckets.LATENCY_S,
        "From a request's first token to its last.",
    ),
    (
        "request_time_per_output_token_seconds",
        "per_token_s",
        buckets.BETWEEN_TOKENS_S,
        "Mean over a request's tokens after the first.",
    ),
)


class RequestMetrics:
    """Made once, in a registry; every series exists from the first scrape on."""

    def __init__(self, config: EngineConfig, registry: CollectorRegistry) -> None:
        self._model_name = config.model.served_model_names[0]
        self._registry = registry
        ranks = range(config.parallel.data_parallel_size)
        most = config.scheduler.max_model_len or config.model.max_position_embeddings
        counts = buckets.token_counts(most)
        self._ranks = [(self._model_name, str(rank)) for rank in ranks]
        self._finished = Counter(
            "moed:request_success",
            "Requests that ended, by reason.",
            (*LABELS, "finished_reason"),
            registry=registry,
        )
        self._first_token = self._histogram(
            "time_to_first_token_seconds",
            "From the request's arrival to its first token.",
            buckets.FIRST_TOKEN_S,
        )
        self._between_tokens = [histogram.Histogram(buckets.BETWEEN_TOKENS_S) for _ in ranks]
        self._times = [
            (name, self._histogram(suffix, text, limits)) for suffix, name, limits, text in TIMES
        ]
        self._inference = self._histogram(
            "request_inference_time_seconds",
            "From a request's first step to its end.",
            buckets.LATENCY_S,
        )
        self._prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", counts
        )
        self._generation_tokens = self._histogram(
            "request_generation_tokens", "Output tokens of a request.", counts
        )
        self._computed_tokens = self._histogram(
            "request_prefill_kv_computed_tokens",
            "Prompt tokens that no cache had, of a request.",
            counts,
        )
        self._max_tokens = self._histogram(
            "request_params_max_tokens", "Output tokens that a request may have.", counts
        )
        self._max_generation_tokens = self._histogram(
            "request_max_num_generation_tokens",
            "Output tokens of the longest choice of a request.",
            counts,
        )
        self._preemptions = self._histogram(
            "request_num_preemptions",
            "How often a request has given its KV blocks to others.",
            buckets.PREEMPTIONS,
        )
        self._num_choices = self._histogram(
            "request_params_n", "Choices for each prompt of a request.", buckets.NUM_CHOICES
        )
        self._by_source = Counter(
            "moed:prompt_tokens_by_source",
            "Prompt tokens of requests, computed or found in the prefix cache.",
            (*LABELS, "source"),
            registry=registry,
        )
        self._cached = Counter(
            "moed:prompt_tokens_cached",
            "Prompt tokens that were found in the prefix cache.",
            LABELS,
            registry=registry,
        )
        self._rejections = Counter(
            "moed:admission_rejections",
            "Requests that were sent away before they were taken in.",
            ("model_name", "reason"),
            registry=registry,
        )
        for own in self._ranks:
            self._cached.labels(*own)
            for reason in REASONS:
                self._finished.labels(*own, reason)
            for source in SOURCES:
                self._by_source.labels(*own, source)
        self._rejections.labels(self._model_name, "queue_full")

    def _histogram(
        self, suffix: str, text: str, limits: tuple[float, ...] | tuple[int, ...]
    ) -> list[Histogram]:
        """By rank."""
        name = f"moed:{suffix}"
        made = Histogram(name, text, LABELS, buckets=limits, registry=self._registry)
        return [made.labels(*own) for own in self._ranks]

    def on_tokens(
        self, rank: int, submitted_at: float, last_token_at: float | None, num: int, now: float
    ) -> None:
        """`num` tokens of a request have come; times are `time.monotonic()` seconds."""
        if last_token_at is None:
            self._first_token[rank].observe(now - submitted_at)
        else:
            self._between_tokens[rank].add((now - last_token_at) / num)

    def families(self) -> Iterator[Metric]:
        """What is counted here and not by the registry."""
        between = HistogramMetricFamily(
            "moed:inter_token_latency_seconds", "Between two tokens of a request.", labels=LABELS
        )
        for own, counted in zip(self._ranks, self._between_tokens, strict=True):
            told = histogram.cumulated(buckets.BETWEEN_TOKENS_S, counted.counts)
            between.add_metric(own, told, counted.sum)
        yield between

    def on_choice_end(self, choice: EndedChoice) -> None:
        rank = choice.rank
        self._finished.labels(*self._ranks[rank], choice.reason).inc()
        for name, by_rank in self._times:
            if (seconds := getattr(choice, name)) is not None:
                by_rank[rank].observe(seconds)
        self._inference[rank].observe(max(0.0, choice.e2e_s - choice.queue_s))
        self._prompt_tokens[rank].observe(choice.num_prompt_tokens)
        self._generation_tokens[rank].observe(choice.num_output_tokens)
        self._max_tokens[rank].observe(choice.max_tokens)
        self._preemptions[rank].observe(choice.num_preemptions)
        if choice.first_token_at is None:
            return  # whether a cache had its prompt was never known
        computed = max(0, choice.num_prompt_tokens - choice.num_cached_tokens)
        self._computed_tokens[rank].observe(computed)
        self._cached.labels(*self._ranks[rank]).inc(choice.num_cached_tokens)
        for source, num in zip(SOURCES, (computed, choice.num_cached_tokens), strict=True):
            self._by_source.labels(*self._ranks[rank], source).inc(num)

    def on_request_end(self, request: EndedRequest) -> None:
        rank = request.choices[0].rank
        longest = max(choice.num_output_tokens for choice in request.choices)
        self._max_generation_tokens[rank].observe(longest)
        self._num_choices[rank].observe(request.origin.num_per_prompt)

    def on_rejection(self, reason: str) -> None:
        self._rejections.labels(self._model_name, reason).inc()
