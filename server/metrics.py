"""What /metrics shows, in a registry of its own: counters of the ranks as they report them, and
latencies as this front end sees them.

Names are `moed:` with the suffixes, labels and buckets that dashboards know from vLLM.
"""

from collections.abc import Iterator

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moed.config.engine_config import EngineConfig
from moed.server.expert_loads import ExpertLoads
from moed.server.expert_metrics import expert_families, wire_family
from moed.server.http_metrics import HttpMetrics
from moed.server.messages import ExpertLoad, RankReady, RankStats
from moed.server.metric_buckets import STEP_TOKENS
from moed.server.metrics_compat import with_vllm_names
from moed.server.request_metrics import LABELS, RequestMetrics
from moed.server.step_metrics import StepMetrics
from moed.server.wire_totals import WireTotals

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

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


AT_REST = {
    "num_running": 0,
    "num_waiting": 0,
    "num_kv_blocks_used": 0,
    "num_queued_tokens": 0,
}


def _sum(base: RankStats | None, stats: RankStats) -> RankStats:
    """`stats` with the counters of `base` added."""
    if base is None:
        return stats
    names = [name for _, name, _ in COUNTERS]
    counters = {name: getattr(base, name) + getattr(stats, name) for name in names}
    most = max(base.max_step_tokens, stats.max_step_tokens)
    return msgspec.structs.replace(stats, max_step_tokens=most, **counters)


class Metrics:
    """All series of one front end."""

    def __init__(self, config: EngineConfig) -> None:
        self._model_name = config.model.served_model_names[0]
        self._num_ranks = config.parallel.data_parallel_size
        self._stats: dict[int, RankStats] = {}
        # What a rank had counted in groups of before.
        self._bases: dict[int, RankStats] = {}
        self.expert_loads = ExpertLoads(config)
        self.wire_totals = WireTotals(config.parallel.world_size)
        self._ready: dict[int, RankReady] = {}
        self.registry = CollectorRegistry()
        self.http = HttpMetrics(self.registry)
        self.requests = RequestMetrics(config, self.registry)
        self.steps = StepMetrics(self._model_name)
        step_tokens = Histogram(
            "moed:iteration_tokens_total",
            "Prompt and generated tokens of one step of a rank.",
            LABELS,
            buckets=STEP_TOKENS,
            registry=self.registry,
        )
        self._step_tokens = [step_tokens.labels(*own) for own in self._labels()]
        self.losses = Counter(
            "moed:rank_losses",
            "How often the group was formed anew because of this process.",
            LABELS,
            registry=self.registry,
        )
        for process in range(config.parallel.world_size):
            self.losses.labels(self._model_name, str(process))
        self.registry.register(_RankCollector(self))
        has_vllm_names = config.server.observability.metrics_compat == "vllm"
        self._shown = _WithVllmNames(self.registry) if has_vllm_names else self.registry

    def _labels(self) -> list[tuple[str, str]]:
        return [(self._model_name, str(rank)) for rank in range(self._num_ranks)]

    def on_rank_ready(self, ready: RankReady) -> None:
        self._ready[ready.rank] = ready

    def on_expert_load(self, load: ExpertLoad) -> None:
        self.expert_loads.add(load)
        self.wire_totals.add(load)

    def on_rank_lost(self, rank: int) -> None:
        self._ready.pop(rank, None)

    def on_regroup(self, rank: int | None) -> None:
        """`rank` was lost, and the group with it: ranks count from 0 again, these series do not."""
        if rank is not None:
            self.losses.labels(self._model_name, str(rank)).inc()
        self.expert_loads.start_anew()
        self.wire_totals.start_anew()
        self.steps.start_anew()
        self._ready = {}
        if not self._stats:
            return
        last = max(self._stats.values(), key=lambda stats: stats.num_steps)
        zeros = dict.fromkeys(["max_step_tokens", *(name for _, name, _ in COUNTERS)], 0)
        for own in range(self._num_ranks):
            stats = self._stats.get(own) or msgspec.structs.replace(last, **zeros, rank=own)
            # They all made the same steps, as far as anybody will know.
            stats = msgspec.structs.replace(stats, num_steps=last.num_steps, **AT_REST)
            self._stats[own] = self._bases[own] = stats
            self.steps.on_stats(stats)

    def on_stats(self, stats: RankStats) -> None:
        stats = _sum(self._bases.get(stats.rank), stats)
        before = self._stats.get(stats.rank)
        self._stats[stats.rank] = stats
        self.steps.on_stats(stats)
        step = stats.num_prompt_tokens + stats.num_generation_tokens
        if before is not None:
            step -= before.num_prompt_tokens + before.num_generation_tokens
        if step > 0:
            self._step_tokens[stats.rank].observe(step)

    def stats_of(self, rank: int) -> RankStats | None:
        """What a rank has reported last."""
        return self._stats.get(rank)

    def all_stats(self) -> list[RankStats]:
        """Of the ranks that have reported."""
        return list(self._stats.values())

    def render(self) -> bytes:
        """The page, in Prometheus text format."""
        return generate_latest(self._shown)

    def rank_families(self) -> Iterator[Metric]:
        """What the ranks have reported last; zeros for a rank that has not reported yet."""
        labels = LABELS
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
        yield from self._waiting_by_reason()
        yield from self.steps.families()
        yield from self.requests.families()
        yield from expert_families(self.expert_loads, self._model_name)
        yield wire_family(self.wire_totals, self._model_name)
        yield from self._info_families()

    def _family(
        self, family: GaugeMetricFamily | CounterMetricFamily, name: str
    ) -> GaugeMetricFamily | CounterMetricFamily:
        for rank, own in enumerate(self._labels()):
            stats = self._stats.get(rank)
            family.add_metric(own, float(getattr(stats, name)) if stats else 0.0)
        return family

    def _waiting_by_reason(self) -> Iterator[Metric]:
        waiting = GaugeMetricFamily(
            "moed:num_requests_waiting_by_reason",
            "Requests that wait on the rank: for a place in its steps (capacity), or for their "
            "clients to read what they have been given (deferred).",
            labels=(*LABELS, "reason"),
        )
        for rank, own in enumerate(self._labels()):
            stats = self._stats.get(rank)
            waiting.add_metric((*own, "capacity"), float(stats.num_waiting) if stats else 0.0)
            waiting.add_metric((*own, "deferred"), float(stats.num_paused) if stats else 0.0)
        yield waiting

    def _info_families(self) -> Iterator[Metric]:
        cache = GaugeMetricFamily(
            "moed:cache_config_info",
            "The KV cache of one rank.",
            labels=(*LABELS, "block_size", "num_gpu_blocks"),
        )
        startup = GaugeMetricFamily(
            "moed:startup_phase_seconds",
            "Seconds that each phase of a rank's start took.",
            labels=(*LABELS, "phase"),
        )
        memory = GaugeMetricFamily(
            "moed:memory_bytes",
            "What a rank holds for as long as it runs, by use.",
            labels=(*LABELS, "use"),
        )
        for rank, ready in sorted(self._ready.items()):
            own = (self._model_name, str(rank))
            for use, num_bytes in ready.memory_bytes.items():
                memory.add_metric((*own, use), num_bytes)
            cache.add_metric((*own, str(ready.block_size), str(ready.num_kv_blocks)), 1.0)
            for phase, seconds in ready.startup_s.items():
                startup.add_metric((*own, phase), seconds)
        yield from (cache, startup, memory)


class _RankCollector(Collector):
    """Lets the registry ask for the ranks' series at the moment of a scrape."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return self._metrics.rank_families()


class _WithVllmNames(Collector):
    """A registry with every shared series under both names."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        return with_vllm_names(self._registry.collect())
