"""A stand-in for `deep_ep` on CPU tensors over gloo, with the same names and calls.

It keeps two promises: code that runs here makes calls that DeepEP accepts, and results that code
gets here it also gets from DeepEP, up to the order of rows. What is not promised, is spoiled.
"""

from dataclasses import dataclass

import torch

from moed.dist.deep_ep.buffer import Buffer, RelaxedBuffer
from moed.dist.deep_ep.configs import Config
from moed.dist.deep_ep.elastic import ElasticBuffer, RelaxedElasticBuffer
from moed.dist.deep_ep.elastic_handle import EPHandle
from moed.dist.deep_ep.events import EventHandle, EventOverlap
from moed.dist.deep_ep.rules import Mode


@dataclass(frozen=True)
class StandIn:
    """The attributes of the module `deep_ep`."""

    mode: Mode
    Buffer: type[Buffer]
    ElasticBuffer: type[ElasticBuffer]
    Config: type[Config]
    EPHandle: type[EPHandle]
    EventHandle: type[EventHandle]
    EventOverlap: type[EventOverlap]
    topk_idx_t: torch.dtype


def make_stand_in(mode: Mode | str) -> StandIn:
    """`mode` is "strict" or "relaxed", see `Mode`. Raises ValueError for anything else."""
    mode = Mode(mode)
    is_strict = mode is Mode.STRICT
    return StandIn(
        mode=mode,
        Buffer=Buffer if is_strict else RelaxedBuffer,
        ElasticBuffer=ElasticBuffer if is_strict else RelaxedElasticBuffer,
        Config=Config,
        EPHandle=EPHandle,
        EventHandle=EventHandle,
        EventOverlap=EventOverlap,
        topk_idx_t=torch.int64,
    )
