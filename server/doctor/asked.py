"""What a launch with these settings asks of the machine, as far as the checks need it."""

from dataclasses import dataclass
from pathlib import Path

from moed.config.engine_config import EngineConfig
from moed.config.errors import MoedError
from moed.config.machine import nvidia_device
from moed.config.resolve import resolve_and_explain
from moed.config.settings import ServeSettings
from moed.config.weight_bytes import weight_bytes
from moed.dist.registry import capabilities


@dataclass(frozen=True)
class Asked:
    """Of this node."""

    num_ranks: int
    num_nodes: int
    is_cuda: bool
    backend: str
    host: str
    port: int
    num_threads: int | None
    """Of each rank; None: not known."""
    weight_bytes: int | None
    """Of all ranks of this node; None: not known."""
    model_folder: Path | None
    """None: there is none yet."""

    @property
    def is_deep_ep(self) -> bool:
        return self.is_cuda and self.backend.startswith("deepep")


def ask(settings: ServeSettings, num_nodes: int) -> tuple[Asked, MoedError | None]:
    """What is asked, and why it would be refused at once, if it would."""
    try:
        config = resolve_and_explain(settings, capabilities(), weights=False).config
    except MoedError as error:
        return _from_settings(settings, num_nodes), error
    return _from_config(config, num_nodes), None


def _from_settings(settings: ServeSettings, num_nodes: int) -> Asked:
    ranks = settings.data_parallel_size * settings.tensor_parallel_size
    auto = settings.device == "auto"
    return Asked(
        num_ranks=-(-ranks // num_nodes),
        num_nodes=num_nodes,
        is_cuda=nvidia_device() is not None if auto else settings.device == "cuda",
        backend=settings.all2all_backend,
        host=settings.host,
        port=settings.port,
        num_threads=settings.num_threads,
        weight_bytes=None,
        model_folder=None,
    )


def _from_config(config: EngineConfig, num_nodes: int) -> Asked:
    ranks = -(-config.parallel.world_size // num_nodes)
    return Asked(
        num_ranks=ranks,
        num_nodes=num_nodes,
        is_cuda=config.parallel.device == "cuda",
        backend=config.parallel.backend.name,
        host=config.server.host,
        port=config.server.port,
        num_threads=config.parallel.num_threads,
        weight_bytes=ranks * sum(weight_bytes(config).values()),
        model_folder=Path(config.model.path),
    )
