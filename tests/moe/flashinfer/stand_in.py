"""A module `flashinfer` for tests: the real one's calls, argument by argument, and its rules, with
attention reckoned on the CPU the long way.

Legend: T tokens, R requests, H query heads, G KV heads, d head dim.
"""

import functools
import inspect
import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from tests.moe.flashinfer.extract_signatures import SIGNATURES

TABLE: dict[str, Any] = json.loads(SIGNATURES.read_text())
KINDS = {kind.description: kind for kind in inspect._ParameterKind}
HALVES = (torch.bfloat16, torch.float16)


def signature(class_name: str, method: str) -> inspect.Signature:
    """As the table has it, defaults included."""
    empty = inspect.Parameter.empty
    return inspect.Signature(
        [
            inspect.Parameter(
                name, KINDS[kind], default=empty if default is None else eval(default)
            )
            for name, kind, default in TABLE["classes"][class_name][method]
        ]
    )


def as_published(class_name: str, method: str) -> Callable[..., Any]:
    """A method that takes what the real one takes, and refuses the rest with `TypeError`; what it
    wraps is given the bound arguments by name.
    """

    def wrap(implementation: Callable[..., Any]) -> Callable[..., Any]:
        published = signature(class_name, method)

        @functools.wraps(implementation)
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = published.bind(*args, **kwargs)
            bound.apply_defaults()
            given = dict(bound.arguments)
            return implementation(given.pop("self"), given)

        return call

    return wrap


class _Wrapper:
    """What both share."""

    needs_halves = True
    capturing = False
    """Within a capture nothing may be planned."""

    def _set_up(self, given: dict[str, Any]) -> None:
        workspace = given["float_workspace_buffer"]
        assert workspace.dtype == torch.uint8 and workspace.numel() >= 128 * 2**20
        assert given["kv_layout"] == "NHD" and given["jit_args"] is None
        self.planned: dict[str, Any] | None = None
        self.num_plans = 0

    def _take(
        self, given: dict[str, Any], starts: torch.Tensor, blocks: torch.Tensor, last: torch.Tensor
    ) -> None:
        assert not _Wrapper.capturing, "plan() cannot be called in a graph"
        for tensor in (starts, blocks, last):
            assert tensor.dtype == torch.int32 and tensor.dim() == 1
        assert starts[0] == 0 and (starts.diff() > 0).all() and len(starts) == len(last) + 1
        assert len(blocks) == starts[-1]
        assert ((last >= 1) & (last <= given["page_size"])).all()
        assert given["num_qo_heads"] % given["num_kv_heads"] == 0
        dtype = given["q_data_type"]
        assert given["kv_data_type"] in (None, dtype)
        assert dtype in HALVES or not _Wrapper.needs_halves
        assert given["pos_encoding_mode"] == "NONE" and given["window_left"] >= -1
        self.planned = given
        self.num_plans += 1

    def _attend(
        self,
        given: dict[str, Any],
        first_rows: list[int],
        starts: torch.Tensor,
        blocks: torch.Tensor,
        last: torch.Tensor,
    ) -> torch.Tensor:
        """[T, H, d], request by request, where the last query sees all keys."""
        planned, query = self.planned, given["q"]
        assert planned is not None, "plan() comes before run()"
        assert query.is_contiguous() and query.dtype == planned["q_data_type"]
        heads = (planned["num_qo_heads"], planned["num_kv_heads"])
        keys, values = given["paged_kv_cache"]
        assert query.shape[0] == first_rows[-1] and query.shape[1] == heads[0]
        assert (
            keys.shape[1:] == values.shape[1:] == (planned["page_size"], heads[1], query.shape[2])
        )
        assert given["sinks"] is None and given["kv_cache_sf"] is None
        output = torch.full_like(query, torch.nan)
        for request in range(len(last)):
            own = blocks[starts[request] : starts[request + 1]].long()
            length = (len(own) - 1) * planned["page_size"] + int(last[request])
            rows = slice(first_rows[request], first_rows[request + 1])
            group = heads[0] // heads[1]
            own_keys, own_values = (
                cached[own].flatten(0, 1)[:length].float().repeat_interleave(group, dim=1)
                for cached in (keys, values)
            )
            output[rows] = self._one(query[rows].float(), own_keys, own_values).to(query.dtype)
        return output

    def _one(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """[n, H, d] for `query` [n, H, d] and `keys`, `values` [c, H, d]."""
        planned = self.planned
        assert planned is not None
        scale = planned["sm_scale"] or query.shape[2] ** -0.5
        scores = torch.einsum("nhd,chd->hnc", query, keys) * scale
        places = torch.arange(len(keys) - len(query), len(keys))[:, None]
        seen = torch.arange(len(keys)) <= places
        if planned["window_left"] >= 0:
            seen &= torch.arange(len(keys)) >= places - planned["window_left"]
        weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
        return torch.einsum("hnc,chd->nhd", weights, values)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    @as_published("BatchPrefillWithPagedKVCacheWrapper", "__init__")
    def __init__(self, given: dict[str, Any]) -> None:
        self._set_up(given)

    @as_published("BatchPrefillWithPagedKVCacheWrapper", "plan")
    def plan(self, given: dict[str, Any]) -> None:
        names = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
        self._take(given, *(given[name] for name in names))
        assert given["causal"], "the stand-in knows causal attention alone"
        assert given["qo_indptr"].dtype == torch.int32

    @as_published("BatchPrefillWithPagedKVCacheWrapper", "run")
    def run(self, given: dict[str, Any]) -> torch.Tensor:
        planned = self.planned
        assert planned is not None, "plan() comes before run()"
        names = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
        first_rows = planned["qo_indptr"].tolist()
        return self._attend(given, first_rows, *(planned[name] for name in names))


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    """In a graph, what `run` reads are the buffers that `plan` last wrote."""

    @as_published("BatchDecodeWithPagedKVCacheWrapper", "__init__")
    def __init__(self, given: dict[str, Any]) -> None:
        self._set_up(given)
        names = ("indptr", "indices", "last_page_len")
        self._buffers = [given[f"paged_kv_{name}_buffer"] for name in names]
        self._in_graph = given["use_cuda_graph"]
        self._tensor_cores = given["use_tensor_cores"]
        if self._in_graph:
            starts, _, last = self._buffers
            assert all(buffer.dtype == torch.int32 for buffer in self._buffers)
            assert len(starts) == len(last) + 1

    def plan(self, *args: Any, **kwargs: Any) -> None:
        assert len(args) <= 7, "further arguments by position are deprecated"
        self._plan_impl(*args, **kwargs)

    @as_published("BatchDecodeWithPagedKVCacheWrapper", "_plan_impl")
    def _plan_impl(self, given: dict[str, Any]) -> None:
        parts = [given[name] for name in ("indptr", "indices", "last_page_len")]
        self._take(given, *parts)
        group = given["num_qo_heads"] // given["num_kv_heads"]
        # The kernels for CUDA cores are made for these alone.
        assert self._tensor_cores or group in (1, 2, 4, 8)
        if not self._in_graph:
            self._buffers = parts
            return
        starts, blocks, last = self._buffers
        assert len(parts[2]) == len(last), "the number of requests is fixed in a graph"
        assert len(parts[1]) <= len(blocks)
        starts.copy_(parts[0])
        blocks[: len(parts[1])].copy_(parts[1])
        last.copy_(parts[2])

    @as_published("BatchDecodeWithPagedKVCacheWrapper", "run")
    def run(self, given: dict[str, Any]) -> torch.Tensor:
        first_rows = list(range(len(self._buffers[2]) + 1))
        return self._attend(given, first_rows, *self._buffers)


def make_module() -> ModuleType:
    """What `import flashinfer` would give."""
    module = ModuleType("flashinfer")
    for wrapper in (BatchPrefillWithPagedKVCacheWrapper, BatchDecodeWithPagedKVCacheWrapper):
        setattr(module, wrapper.__name__, wrapper)
    return module
