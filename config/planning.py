"""`moed plan`: from settings to a plan that holds every refusal, where a launch would stop at the
first contradiction. Needs a config.json alone: no weights, no GPU.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from moed.config import environ
from moed.config.capabilities import BackendCapabilities
from moed.config.engine_config import ModelConfig
from moed.config.errors import ConfigError
from moed.config.hub import fetch
from moed.config.machine import Machine, this_machine
from moed.config.model import BUNDLED_NAME, bundled_checkpoint, load_model_config, unserved
from moed.config.plan import Plan, make_plan
from moed.config.plan_settings import PlanSettings
from moed.config.resolve import Resolution, assemble
from moed.config.settings import ServeSettings

Capabilities = Mapping[str, BackendCapabilities]

# Settings that contradictions are about, those first on which a plan depends least. Those of one
# entry mean nothing without each other.
DROPPED_FIRST = (
    ("api_key_file",),
    ("admin_api_key_file",),
    ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers"),
    ("allowed_origins", "allow_credentials"),
    ("otlp_traces_endpoint",),
    ("max_num_seqs",),
    ("enable_chunked_prefill",),
    ("max_model_len",),
    ("enable_expert_parallel",),
    ("attention_backend",),
    ("num_kv_blocks",),
    ("kv_cache_memory",),
    ("max_num_batched_tokens",),
    ("all2all_backend",),
    ("tensor_parallel_size",),
    ("data_parallel_size",),
)


@dataclass(frozen=True)
class Alternative:
    """The same question with another backend, and its own default of B."""

    name: str
    plan: Plan | None
    """None: it cannot be asked of so many ranks, or of this device."""


@dataclass(frozen=True)
class FullPlan:
    """What `moed plan` prints."""

    plan: Plan
    alternatives: tuple[Alternative, ...]


def plan_settings(
    settings: ServeSettings, own: PlanSettings, capabilities: Capabilities
) -> FullPlan:
    """The plan for `settings`, and beside it one for each other backend.

    Raises `ModelError` for a config.json that is missing or lacks a size, `ConfigError` only for
    what no plan can be made of.
    """
    if settings.device == "auto":
        settings = replace(settings, device="cuda")
    model = _model(settings)
    machine = planned_machine(settings, own)

    def resolved(asked: ServeSettings) -> Resolution:
        return assemble(asked, capabilities, machine, lambda _: model)

    contradictions, asked, resolution = _collect(settings, resolved)
    plan = make_plan(resolution.config, machine, resolution.decided)
    given = Path(model.model)
    source = given if given.is_file() else Path(model.path) / "config.json"
    unmet = unserved(model.hf_config, source, model.whole_model_type)
    against = (*unmet, *contradictions, *plan.refusals)
    others = [name for name in capabilities if name != resolution.config.parallel.backend.name]
    return FullPlan(
        replace(plan, refusals=against),
        tuple(_alternative(name, asked, resolved) for name in others),
    )


def planned_machine(settings: ServeSettings, own: PlanSettings) -> Machine:
    """The machine that the plan's own settings describe; for a CPU, the one at hand."""
    here = this_machine("cpu")
    ranks = settings.data_parallel_size * settings.tensor_parallel_size
    nodes = own.nnodes or -(-ranks // own.gpus_per_node)
    if settings.device == "cpu":
        return replace(here, num_nodes=own.nnodes or 1)
    return Machine(
        gpu="planned",
        gpus_per_node=own.gpus_per_node,
        num_nodes=nodes,
        gpu_memory_bytes=own.gpu_memory,
        qp_depth=here.qp_depth,
    )


def _model(settings: ServeSettings) -> ModelConfig:
    name = BUNDLED_NAME if settings.model is None else settings.model
    if name == BUNDLED_NAME:
        path = bundled_checkpoint()
    elif Path(name).is_file():
        path = Path(name)
    else:
        token = environ.hub_token()
        path = fetch(name, settings.revision, settings.offline, token, weights=False)
    return load_model_config(
        path,
        model=name,
        revision=settings.revision,
        served_model_names=settings.served_model_name or (name,),
        dtype=settings.dtype,
        load_format=settings.load_format,
        seed=settings.seed,
        served_only=False,
    )


def _collect(
    settings: ServeSettings, resolved: Callable[[ServeSettings], Resolution]
) -> tuple[list[str], ServeSettings, Resolution]:
    """Every contradiction of `settings`; and the settings, and what they resolve to, with those
    back at their defaults that the contradictions are about.
    """
    found: list[str] = []
    while True:
        problem = _problem(settings, resolved)
        if problem is None:
            return found, settings, resolved(settings)
        found.append(problem)
        settings = _without_cause(settings, problem, resolved)


def _problem(
    settings: ServeSettings, resolved: Callable[[ServeSettings], Resolution]
) -> str | None:
    try:
        resolved(settings)
    except ConfigError as error:
        return str(error)
    return None


def _without_cause(
    settings: ServeSettings, problem: str, resolved: Callable[[ServeSettings], Resolution]
) -> ServeSettings:
    """`settings` with one entry of `DROPPED_FIRST` back at its default, with which `problem` is not
    met.

    Raises `ConfigError` when no single one is its cause.
    """
    defaults: dict[str, Any] = {field.name: field.default for field in fields(ServeSettings)}
    for names in DROPPED_FIRST:
        changed = replace(settings, **{name: defaults[name] for name in names})
        if changed != settings and _problem(changed, resolved) != problem:
            return changed
    raise ConfigError(problem)


def _alternative(
    name: str, settings: ServeSettings, resolved: Callable[[ServeSettings], Resolution]
) -> Alternative:
    try:
        resolution = resolved(replace(settings, all2all_backend=name))
    except ConfigError:
        return Alternative(name, None)
    config = resolution.config
    return Alternative(name, make_plan(config, resolution.machine, resolution.decided))
