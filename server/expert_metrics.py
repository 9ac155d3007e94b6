"""The series of /metrics about experts. Per expert there is one only below a cap; the whole table
is at `/v1/moe/experts` whatever its size.
"""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from moed.server.expert_loads import ExpertLoads
from moed.server.phases import GROUP_PHASES
from moed.server.wire_totals import WireTotals

# Layers x experts; above, a scrape would cost more than it tells.
MAX_EXPERT_SERIES = 2048
HOT_COUNTS = (1, 4)


def expert_families(loads: ExpertLoads, model_name: str) -> Iterator[Metric]:
    """Gauges are of the last minute. By layer, since means over layers hide the busy one."""
    rows = CounterMetricFamily(
        "moed:rank_tokens",
        "(token, choice) pairs that the process's experts computed, all layers together.",
        labels=("model_name", "ep_rank", "phase"),
    )
    for phase, by_rank in loads.rank_rows().items():
        for rank, num_rows in enumerate(by_rank):
            rows.add_metric((model_name, str(rank), phase), num_rows)
    yield rows
    dropped = CounterMetricFamily(
        "moed:dropped_tokens",
        "(token, choice) pairs that were routed and that no expert computed, compared whenever all "
        "ranks rest: 0 unless rows get lost.",
        labels=("model_name", "reason"),
    )
    dropped.add_metric((model_name, "not_computed"), loads.num_dropped)
    yield dropped
    layers = loads.layers()
    by_layer = ("model_name", "layer")
    imbalance = GaugeMetricFamily(
        "moed:expert_load_imbalance",
        "Rows of the busiest rank over the mean of all, at least 1, over the last minute.",
        labels=by_layer,
    )
    dead = GaugeMetricFamily(
        "moed:dead_experts", "Experts without a row in the last minute.", labels=by_layer
    )
    hot = GaugeMetricFamily(
        "moed:hot_expert_share",
        "Part of the last minute's rows that the busiest experts have.",
        labels=(*by_layer, "topn"),
    )
    entropy = GaugeMetricFamily(
        "moed:router_entropy",
        "Of the last minute's rows over the experts: 1 where all are alike, 0 where one has all.",
        labels=by_layer,
    )
    balancedness = GaugeMetricFamily(
        "moed:expert_balancedness",
        "Mean rows of a rank over the busiest one's, in the last minute, of the worst layer.",
        labels=("model_name", "phase"),
    )
    if layers:
        for phase in GROUP_PHASES:
            worst = min(load.balancedness(phase) for load in layers)
            balancedness.add_metric((model_name, phase), worst)
    for load in layers:
        own = (model_name, str(load.layer))
        entropy.add_metric(own, load.entropy)
        imbalance.add_metric(own, load.imbalance)
        dead.add_metric(own, load.num_dead)
        for top in HOT_COUNTS:
            hot.add_metric((*own, str(top)), load.hot_share(top))
    yield from (imbalance, balancedness, entropy, dead, hot)
    if sum(len(load.rows) for load in layers) <= MAX_EXPERT_SERIES:
        tokens = CounterMetricFamily(
            "moed:expert_tokens",
            "(token, choice) pairs that the expert computed.",
            labels=(*by_layer, "expert"),
        )
        for load in layers:
            for expert, num_rows in enumerate(load.rows):
                tokens.add_metric((model_name, str(load.layer), str(expert)), num_rows)
        yield tokens


def wire_family(totals: WireTotals, model_name: str) -> Metric:
    """Counted in each layer of each step; see `moed.dist.all2all.traffic.Traffic`."""
    family = CounterMetricFamily(
        "moed:all2all_bytes",
        "Payload of rows between processes (dispatch) and of their results back (combine), within "
        "a host (intra) or between two (inter).",
        labels=("model_name", "op", "scope", "phase"),
    )
    for operation, scope, phase, num_bytes in totals.totals():
        family.add_metric((model_name, operation, scope, phase), num_bytes)
    return family
