"""The same series under the names of vLLM, so that dashboards, autoscalers and routers that were
made for it work as they are (`--metrics-compat vllm`).
"""

import copy
from collections.abc import Iterable, Iterator

from prometheus_client.core import Metric

PREFIX, VLLM_PREFIX = "moed:", "vllm:"
# Families that vLLM has with the same labels and meaning; `_total` belongs to samples, not names.
SHARED = frozenset(
    (
        "num_requests_running",
        "num_requests_waiting",
        "num_requests_waiting_by_reason",
        "kv_cache_usage_perc",
        "cache_config_info",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "prompt_tokens",
        "prompt_tokens_cached",
        "prompt_tokens_by_source",
        "generation_tokens",
        "request_success",
        "num_preemptions",
        "admission_rejections",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_max_num_generation_tokens",
        "request_num_preemptions",
        "request_params_n",
        "request_params_max_tokens",
        "request_prefill_kv_computed_tokens",
        "iteration_tokens_total",
    )
)
# Names of earlier versions, which older dashboards still read.
OLDER_NAMES = {
    "inter_token_latency_seconds": ("time_per_output_token_seconds",),
    "kv_cache_usage_perc": ("gpu_cache_usage_perc",),
}


def with_vllm_names(families: Iterable[Metric]) -> Iterator[Metric]:
    """`families`, each followed by its copies."""
    for family in families:
        yield family
        suffix = family.name.removeprefix(PREFIX)
        if suffix in SHARED:
            for name in (suffix, *OLDER_NAMES.get(suffix, ())):
                yield _renamed(family, suffix, VLLM_PREFIX + name)


def _renamed(family: Metric, suffix: str, name: str) -> Metric:
    renamed = copy.copy(family)
    renamed.name = name
    old = PREFIX + suffix
    renamed.samples = [
        sample._replace(name=name + sample.name[len(old) :]) for sample in family.samples
    ]
    return renamed
