"""A recorded step never waits for the device: run on fake tensors, which have no values, so that
whatever would read one on the host fails. The experts are those of a GPU without triton.
"""

import contextlib
import dataclasses
import importlib.util
import pathlib
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from moed.config.engine_config import EngineConfig
from moed.config.graphs import GraphShape
from moed.dist.dp_metadata import DPMetadata
from moed.dist.registry import capabilities, create_backend
from moed.moe import native
from moed.moe.batch import ForwardBatch
from moed.moe.decoder import Decoder
from moed.moe.families import FAMILIES
from moed.moe.kv_cache import KVCache, LatentCache, local_kv_heads, make_kv_cache
from moed.moe.model import load_model
from moed.server.graph_inputs import GraphInputs
from tests.moe import harness
from tests.moe.checkpoints import make_model
from tests.moe.harness import one_rank
from tests.moe.host_reads import HostRead, no_host_reads
from tests.server.engine.configs import engine_config

# A read of a value, and sizes that hang on values.
NOTICED = (HostRead, DataDependentOutputException, DynamicOutputShapeException)
CPU = torch.device("cpu")
SHAPE = GraphShape(4, 3)
BLOCK_SIZE = 4


@contextlib.contextmanager
def fake_gpu() -> Iterator[None]:
    """Tensors without values, as soon as an operation makes them or takes them."""
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        mock.patch.object(dist, "all_to_all_single", lambda *_, **__: None),
    ):
        yield


@contextlib.contextmanager
def without_triton() -> Iterator[None]:
    """So that a GPU's experts are torch's own; and weights are not packed, as on CPUs alone."""
    with (
        mock.patch.object(importlib.util, "find_spec", lambda name: None),
        mock.patch.object(torch.backends.mkldnn, "is_available", lambda: False),
    ):
        yield


def gpu_config(backend: str, ranks: int, folder: pathlib.Path | None) -> EngineConfig:
    """Of the checkpoint in `folder`, or of a small Qwen3-MoE; weights are random."""
    if folder is None:
        config = engine_config(backend=capabilities()[backend], ranks=ranks)
    else:
        config = harness.engine_config(folder, backend=backend, ranks=ranks, load_format="dummy")
    parallel = dataclasses.replace(config.parallel, device="cuda")
    # A CPU's own kernels would follow pointers of tensors without memory.
    runner = dataclasses.replace(config.runner, cpu_kernels="torch")
    # What torch's grouped product takes.
    model = dataclasses.replace(config.model, dtype="bfloat16")
    return dataclasses.replace(config, parallel=parallel, model=model, runner=runner)


@dataclasses.dataclass(frozen=True)
class Step:
    """Four decodes of one rank, and all that they read."""

    decoder: Decoder
    batch: ForwardBatch
    cache: KVCache | LatentCache
    metadata: DPMetadata

    def run(self) -> torch.Tensor:
        """Logits [b, V]."""
        return self.decoder.forward(self.batch, self.cache, self.metadata)


def make_step(backend: str, ranks: int, in_graph: bool, folder: pathlib.Path | None = None) -> Step:
    """As a graph of so many ranks records it, or as it runs eagerly."""
    config, groups = gpu_config(backend, ranks, folder), one_rank(world_size=ranks)
    groups.device = mock.Mock()
    # Rows travel by collectives, as on GPUs, not through a host's memory.
    groups.is_single_node = False
    made = create_backend(
        backend, groups, config.placement(), config.fused_moe, torch.bfloat16, CPU
    )
    with without_triton():
        decoder = load_model(config, groups, made, lambda _: None)
    heads = local_kv_heads(config.model, 1)
    cache = make_kv_cache(config.model, heads, 9, 9, BLOCK_SIZE, torch.bfloat16, CPU)
    inputs = GraphInputs((SHAPE,), BLOCK_SIZE, (8, None), CPU)
    sizes = torch.full((ranks,), SHAPE.num_rows, dtype=torch.int32)
    padding = inputs.padding(SHAPE) if in_graph else None
    return Step(decoder, inputs.batch(SHAPE), cache, DPMetadata(sizes, 0, 1, padding))


def record(step: Step) -> torch.Tensor:
    """What a recording does, which would fail where a capture would."""
    # Sizes are known on the host.
    local_sizes = mock.patch.object(DPMetadata, "local_sizes", step.metadata.local_sizes)
    with local_sizes, fake_gpu(), no_host_reads():
        return step.run()


@pytest.fixture(scope="module", autouse=True)
def constants() -> Iterator[None]:
    """A recording comes after the same step for real, which moves constants to the device once.
    Kernels of a CPU are out of sight.
    """
    with mock.patch.object(native, "library", lambda: None):
        run_for_real()
        yield


def run_for_real() -> None:
    assert make_step("local", 1, in_graph=True).run().isfinite().all()


@pytest.mark.parametrize(
    ("backend", "ranks"), [("local", 1), ("all2allv", 2), ("allgather_reducescatter", 2)]
)
def test_a_recorded_step_never_waits(backend: str, ranks: int) -> None:
    assert capabilities()[backend].graph_safe
    step = make_step(backend, ranks, in_graph=True)
    assert not step.decoder.reads_on_host
    assert record(step).shape == (SHAPE.num_rows, 97)


# One of each kind of attention; the others are slow.
QUICK_FAMILIES = ("deepseek_v3", "gpt_oss", "qwen3_moe")


@pytest.mark.parametrize(
    "family",
    [
        family if family in QUICK_FAMILIES else pytest.param(family, marks=pytest.mark.slow)
        for family in sorted(FAMILIES)
    ],
)
def test_no_family_waits(family: str, tmp_path: pathlib.Path) -> None:
    make_model(family).config.get_text_config().save_pretrained(tmp_path)
    step = make_step("local", 1, in_graph=True, folder=tmp_path)
    step.run()
    assert not step.decoder.reads_on_host
    assert record(step).shape == (SHAPE.num_rows, 97)


def test_an_eager_step_that_counts_on_the_host_is_noticed() -> None:
    """So that the test above can fail."""
    with pytest.raises(NOTICED):
        record(make_step("all2allv", 2, in_graph=False))


def test_experts_that_count_on_the_host_say_so() -> None:
    with mock.patch.object(torch.cuda, "is_available", lambda: True):
        with mock.patch.object(torch.cuda, "get_device_capability", lambda: (7, 5)):
            step = make_step("local", 1, in_graph=True)
    assert step.decoder.reads_on_host
    with pytest.raises(NOTICED):
        record(step)
