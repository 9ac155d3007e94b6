"""What /metrics shows, in a registry of its own: counters of the ranks as they report them, and
latencies as this front end sees them.

Names are `moed:` with the suffixes, labels and buckets that dashboards know from vLLM.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from moed.config.engine_config import EngineConfig
from moed.server.expert_loads import ExpertLoads
from moed.server.expert_metrics import expert_families
from moed.server.messages import RankReady, RankStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

FIRST_TOKEN_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
BETWEEN_TOKENS_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
LATENCY_BUCKETS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKENS_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

# A gauge or counter that a rank reports: its suffix, its field of `RankStats`, its help.
GAUGES = (
    ("num_requests_running", "num_running", "Requests that the rank is running."),
    ("num_requests_waiting", "num_waiting", "Requests that wait on the rank."),
    ("num_queued_tokens", "num_queued_tokens", "Prompt tokens that the rank still has to compute."),
    ("max_step_tokens", "max_step_tokens", "Most tokens that any step of the rank ran."),
)
COUNTERS = (
    ("prompt_tokens", "num_prompt_tokens", "Prompt tokens computed."),
    ("generation_tokens", "num_generation_tokens", "Tokens generated."),
    ("num_preemptions", "num_preemptions", "Requests put back to make room in the KV cache."),
    ("engine_steps", "num_steps", "Steps that the rank made together with all others."),
    (
        "prefix_cache_queries",
        "num_prefix_queries",
        "Prompt tokens of requests that looked for their prefix in the KV cache.",
    ),
    ("prefix_cache_hits", "num_prefix_hits", "Prompt tokens that were found there."),
    ("requests_finished", "num_finished", "Requests that ended by themselves."),
    ("requests_aborted", "num_aborted", "Requests that were aborted."),
)


class Metrics:
    """All series of one front end."""

    def __init__(self, config: EngineConfig) -> None:
        self._model_name = config.model.served_model_names[0]
        self._num_ranks = config.parallel.data_parallel_size
        self._stats: dict[int, RankStats] = {}
        self.expert_loads = ExpertLoads(config)
        self._ready: dict[int, RankReady] = {}
        self._max_step_tokens_seen = 0
        self.registry = CollectorRegistry()
        labels = ("model_name", "engine")
        self._finished = Counter(
            "moed:request_success",
            "Requests that ended, by reason.",
            (*labels, "finished_reason"),
            registry=self.registry,
        )
        self._first_token_s = Histogram(
            "moed:time_to_first_token_seconds",
            "From the request's arrival to its first token.",
            labels,
            buckets=FIRST_TOKEN_BUCKETS_S,
            registry=self.registry,
        )
        self._between_tokens_s = Histogram(
            "moed:inter_token_latency_seconds",
            "Between two tokens of a request.",
            labels,
            buckets=BETWEEN_TOKENS_BUCKETS_S,
            registry=self.registry,
        )
        self._latency_s = Histogram(
            "moed:e2e_request_latency_seconds",
            "From the request's arrival to its end.",
            labels,
            buckets=LATENCY_BUCKETS_S,
            registry=self.registry,
        )
        self._step_tokens = Histogram(
            "moed:iteration_tokens_total",
            "Prompt and generated tokens of one step of a rank.",
            labels,
            buckets=STEP_TOKENS_BUCKETS,
            registry=self.registry,
        )
        self._first_token = [self._first_token_s.labels(*own) for own in self._labels()]
        self._between_tokens = [self._between_tokens_s.labels(*own) for own in self._labels()]
        self._latency = [self._latency_s.labels(*own) for own in self._labels()]
        self._steps = [self._step_tokens.labels(*own) for own in self._labels()]
        for own in self._labels():
            for reason in ("stop", "length", "abort", "error"):
                self._finished.labels(*own, reason)
        self.registry.register(_RankCollector(self))

    def _labels(self) -> list[tuple[str, str]]:
        return [(self._model_name, str(rank)) for rank in range(self._num_ranks)]

    def on_rank_ready(self, ready: RankReady) -> None:
        self._ready[ready.rank] = ready

    def on_rank_lost(self, rank: int) -> None:
        self._ready.pop(rank, None)

    def on_stats(self, stats: RankStats) -> None:
        before = self._stats.get(stats.rank)
        self._stats[stats.rank] = stats
        step = stats.num_prompt_tokens + stats.num_generation_tokens
        if before is not None:
            step -= before.num_prompt_tokens + before.num_generation_tokens
        if step > 0:
            self._steps[stats.rank].observe(step)

    def on_tokens(
        self, rank: int, submitted_at: float, last_token_at: float | None, num: int, now: float
    ) -> None:
        """`num` tokens of a request have come; times are `time.monotonic()` seconds."""
        if last_token_at is None:
            self._first_token[rank].observe(now - submitted_at)
        else:
            self._between_tokens[rank].observe((now - last_token_at) / num)

    def on_finish(self, rank: int, reason: str, submitted_at: float, now: float) -> None:
        self._finished.labels(self._model_name, str(rank), reason).inc()
        self._latency[rank].observe(now - submitted_at)

    def stats_of(self, rank: int) -> RankStats | None:
        """What a rank has reported last."""
        return self._stats.get(rank)

    def render(self) -> bytes:
        """The page, in Prometheus text format."""
        return generate_latest(self.registry)

    def rank_families(self) -> Iterator[Metric]:
        """What the ranks have reported last; zeros for a rank that has not reported yet."""
        labels = ("model_name", "engine")
        for suffix, name, text in GAUGES:
            yield self._family(GaugeMetricFamily(f"moed:{suffix}", text, labels=labels), name)
        for suffix, name, text in COUNTERS:
            yield self._family(CounterMetricFamily(f"moed:{suffix}", text, labels=labels), name)
        usage = GaugeMetricFamily(
            "moed:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", labels=labels
        )
        up = GaugeMetricFamily(
            "moed:rank_up", "1 while the rank is part of the group.", labels=labels
        )
        for rank, own in enumerate(self._labels()):
            stats = self._stats.get(rank)
            used = stats.num_kv_blocks_used / stats.num_kv_blocks if stats else 0.0
            usage.add_metric(own, used)
            up.add_metric(own, float(rank in self._ready))
        yield usage
        yield up
        yield from expert_families(self.expert_loads, self._model_name)
        yield from self._info_families()

    def _family(
        self, family: GaugeMetricFamily | CounterMetricFamily, name: str
    ) -> GaugeMetricFamily | CounterMetricFamily:
        for rank, own in enumerate(self._labels()):
            stats = self._stats.get(rank)
            family.add_metric(own, float(getattr(stats, name)) if stats else 0.0)
        return family

    def _info_families(self) -> Iterator[Metric]:
        cache = GaugeMetricFamily(
            "moed:cache_config_info",
            "The KV cache of one rank.",
            labels=("model_name", "engine", "block_size", "num_gpu_blocks"),
        )
        startup = GaugeMetricFamily(
            "moed:startup_phase_seconds",
            "Seconds that each phase of a rank's start took.",
            labels=("model_name", "engine", "phase"),
        )
        for rank, ready in sorted(self._ready.items()):
            own = (self._model_name, str(rank))
            cache.add_metric((*own, str(ready.block_size), str(ready.num_kv_blocks)), 1.0)
            for phase, seconds in ready.startup_s.items():
                startup.add_metric((*own, phase), seconds)
        yield cache
        yield startup


class _RankCollector:
    """Lets the registry ask for the ranks' series at the moment of a scrape."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return self._metrics.rank_families()
