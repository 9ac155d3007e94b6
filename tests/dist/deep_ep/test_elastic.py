"""`ElasticBuffer` of the stand-in, between real ranks: compact and expanded."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moed.config import deep_ep_limits as limits
from moed.dist.deep_ep.stand_in import make_stand_in
from moed.dist.groups import Groups
from tests.dist.counting import counted_collectives
from tests.dist.deep_ep.loads import (
    LOADS,
    K,
    Load,
    apply_expert,
    load_of,
    refusal,
    weighted_at_experts,
    weighted_in_home,
)
from tests.dist.deep_ep.test_high_throughput import expected_rows, run_experts
from tests.worker_pool import WorkerPool

Pools = Callable[[int], WorkerPool]
ALIGNMENT = 4


@dataclasses.dataclass(frozen=True)
class Way:
    """How dispatch and combine are called."""

    do_expand: bool = False
    do_cpu_sync: bool | None = None
    do_zero_padding: bool = False
    deterministic: bool = False
    allow_multiple_reduction: bool = True
    is_asynchronous: bool = False


WAYS = {
    "compact": Way(),
    "compact_without_sync": Way(do_cpu_sync=False),
    "compact_in_order": Way(deterministic=True, is_asynchronous=True),
    "expanded": Way(do_expand=True),
    "expanded_without_sync": Way(do_expand=True, do_cpu_sync=False, is_asynchronous=True),
    "expanded_in_order": Way(do_expand=True, deterministic=True, do_zero_padding=True),
    "expanded_single_reduction": Way(do_expand=True, allow_multiple_reduction=False),
}


def make_buffer(groups: Groups, mode: str, load: Load, way: Way = WAYS["compact"]) -> Any:
    cls = make_stand_in(mode).ElasticBuffer
    return cls(
        groups.device,
        num_max_tokens_per_rank=load.num_max_tokens,
        hidden=load.hidden_size,
        num_topk=K,
        deterministic=way.deterministic,
        allow_multiple_reduction=way.allow_multiple_reduction,
        explicitly_destroy=True,
    )


def dispatch(buffer: Any, load: Load, rank: int, way: Way, **options: Any) -> Any:
    rows = load.rows_by_rank[rank]
    return buffer.dispatch(
        options.pop("x", rows.hidden),
        topk_idx=rows.ids,
        topk_weights=rows.weights,
        num_experts=load.num_experts,
        expert_alignment=ALIGNMENT,
        do_cpu_sync=way.do_cpu_sync,
        do_expand=way.do_expand,
        do_zero_padding=way.do_zero_padding,
        async_with_compute_stream=way.is_asynchronous,
        **options,
    )


def counts_by_expert(groups: Groups, load: Load) -> list[int]:
    """Rows of each local expert."""
    first = groups.rank * load.num_local()
    ids = torch.cat([rows.ids for rows in load.rows_by_rank])
    histogram = torch.bincount(ids[ids >= 0], minlength=load.num_experts).tolist()
    return histogram[first : first + load.num_local()]


def sources_of(load: Load, handle: Any) -> list[tuple[int, int]]:
    """(source rank, token) of each received row, as the handle tells."""
    num_valid = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
    origins = handle.recv_src_metadata[:num_valid, 0].tolist()
    return [divmod(origin, load.num_max_tokens) for origin in origins]


def check_handle(groups: Groups, load: Load, way: Way, handle: Any) -> None:
    counts = counts_by_expert(groups, load)
    aligned = [-(-count // ALIGNMENT) * ALIGNMENT for count in counts]
    starts = [sum(aligned[:local]) for local in range(len(aligned))]
    ends = [
        start + size
        for start, size in zip(starts, counts if way.do_expand else aligned, strict=True)
    ]
    assert handle.psum_num_recv_tokens_per_expert.tolist() == ends
    if way.do_expand:
        assert handle.num_unaligned_recv_tokens_per_expert.tolist() == counts
    sources = expected_rows(groups, load)
    per_rank = [sum(source <= rank for source, _ in sources) for rank in range(groups.world_size)]
    assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == per_rank
    sizes: tuple[int, int, list[int]]
    if way.do_cpu_sync is False:
        rows = groups.world_size * load.num_max_tokens
        most = limits.elastic_expanded_rows(
            groups.world_size, load.num_max_tokens, K, load.num_local(), ALIGNMENT
        )
        sizes = (rows, most, [])
    else:
        sizes = (len(sources), sum(aligned), aligned)
    assert sizes == (
        handle.num_recv_tokens,
        handle.num_expanded_tokens,
        handle.num_recv_tokens_per_expert_list,
    )
    found = sources_of(load, handle)
    assert sorted(found) == sources
    assert [source for source, _ in found] == [source for source, _ in sources]
    assert not way.deterministic or found == sources


def compact_output(groups: Groups, load: Load, dispatched: Any) -> torch.Tensor:
    """Checks every row, and computes it."""
    recv_x, ids, weights, handle, _ = dispatched
    sources = sources_of(load, handle)
    first = groups.rank * load.num_local()
    assert recv_x.shape[0] == ids.shape[0] == weights.shape[0] == handle.num_recv_tokens
    for row, (source, token) in enumerate(sources):
        sent = load.rows_by_rank[source]
        local = sent.ids[token] - first
        is_here = (local >= 0) & (local < load.num_local()) & (sent.ids[token] >= 0)
        assert torch.equal(recv_x[row], sent.hidden[token])
        assert torch.equal(ids[row], torch.where(is_here, local, -1))
        # Weights of other ranks' choices are not zero here.
        assert torch.equal(weights[row], sent.weights[token])
    num_valid = len(sources)
    assert recv_x[num_valid:].isnan().all() and weights[num_valid:].isnan().all()
    assert (ids[num_valid:] < -1).all()
    output = torch.full_like(recv_x, float("nan"))
    output[:num_valid] = run_experts(
        groups, load, recv_x[:num_valid], ids[:num_valid], weights[:num_valid]
    )
    return output


def expanded_output(groups: Groups, load: Load, way: Way, dispatched: Any) -> torch.Tensor:
    """Checks every row, and computes it; gaps become NaN."""
    recv_x, ids, weights, handle, _ = dispatched
    assert ids is None and recv_x.shape[0] == weights.shape[0] == handle.num_expanded_tokens
    slots = handle.recv_src_metadata[: len(sources_of(load, handle)), 2:]
    expected = torch.full_like(recv_x, float("nan"))
    expected_weights = torch.full_like(weights, float("nan"))
    output = torch.full_like(recv_x, float("nan"))
    ends = handle.psum_num_recv_tokens_per_expert.tolist()
    counts = handle.num_unaligned_recv_tokens_per_expert.tolist()
    owner = torch.full((recv_x.shape[0],), -1)
    for local, (end, count) in enumerate(zip(ends, counts, strict=True)):
        assert (end - count) % ALIGNMENT == 0
        owner[end - count : end] = local
        if way.do_zero_padding:
            expected[end : -(-end // ALIGNMENT) * ALIGNMENT] = 0
    filled = []
    for (source, token), places in zip(sources_of(load, handle), slots.tolist(), strict=True):
        sent = load.rows_by_rank[source]
        for choice, place in enumerate(places):
            index = int(sent.ids[token, choice])
            is_here = index >= 0 and index // load.num_local() == groups.rank
            assert (place >= 0) == is_here
            if is_here:
                assert int(owner[place]) == index % load.num_local()
                filled.append(place)
                expected[place] = sent.hidden[token]
                expected_weights[place] = sent.weights[token, choice]
                row = apply_expert(sent.hidden[token][None], index)
                output[place] = (row.float() * sent.weights[token, choice]).to(row.dtype)
    assert sorted(filled) == (owner >= 0).nonzero()[:, 0].tolist()
    torch.testing.assert_close(recv_x, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=0, equal_nan=True)
    return output


def round_trip(groups: Groups, mode: str, load: Load, way: Way) -> tuple[torch.Tensor, Any]:
    buffer = make_buffer(groups, mode, load, way)
    stats = torch.full((load.num_local(),), 7, dtype=torch.int32)
    dispatched = dispatch(buffer, load, groups.rank, way, cumulative_local_expert_recv_stats=stats)
    recv_x, _, recv_weights, handle, event = dispatched
    assert (event.event is not None) == way.is_asynchronous
    if way.is_asynchronous:
        assert recv_x.isnan().all() and recv_weights.isnan().all()
        event.current_stream_wait()
    assert stats.tolist() == [7 + count for count in counts_by_expert(groups, load)]
    check_handle(groups, load, way, handle)
    if way.do_expand:
        output = expanded_output(groups, load, way, dispatched)
    else:
        output = compact_output(groups, load, dispatched)
    carries_weights = way.allow_multiple_reduction
    combined, weights, event = buffer.combine(
        output,
        handle,
        topk_weights=recv_weights if carries_weights else None,
        async_with_compute_stream=way.is_asynchronous,
    )
    if way.is_asynchronous:
        assert combined.isnan().all()
        event.current_stream_wait()
    buffer.destroy()
    buffer.destroy()
    return combined, weights


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LOADS)
@pytest.mark.parametrize(
    ("mode", "world_size", "hidden_size", "dtype"),
    [
        ("strict", 1, 256, torch.bfloat16),
        ("strict", 4, 256, torch.bfloat16),
        ("relaxed", 2, 5, torch.float32),
    ],
    ids=["strict-1", "strict-4", "relaxed-2"],
)
def test_rows_come_home_as_sums_without_weights(
    workers: Pools,
    mode: str,
    world_size: int,
    hidden_size: int,
    dtype: torch.dtype,
    name: str,
    way: str,
) -> None:
    load = load_of(name, world_size, hidden_size, dtype)
    answers = workers(world_size).run(round_trip, mode, load, WAYS[way])
    for rank, (combined, weights) in enumerate(answers):
        rows = load.rows_by_rank[rank]
        # Rounded once for a choice, for a rank's sum, and for the sum of all.
        reference = weighted_in_home if WAYS[way].do_expand else weighted_at_experts
        tolerance = 0.0
        if WAYS[way].do_expand:
            tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(combined, reference(load, rank), rtol=tolerance, atol=tolerance)
        if weights is not None:
            assert torch.equal(weights, torch.where(rows.ids >= 0, rows.weights, 0.0))


def again(groups: Groups, load: Load, way: Way) -> tuple[torch.Tensor, torch.Tensor]:
    """Other rows on the ways of an earlier dispatch, then combined with two biases."""
    buffer = make_buffer(groups, "relaxed", load, way)
    rows = load.rows_by_rank[groups.rank]
    first = dispatch(buffer, load, groups.rank, way)
    handle = first[3]
    assert "pass num_sms" in refusal(lambda: buffer.dispatch(rows.hidden, handle=handle))
    doubled, ids, weights, same, _ = buffer.dispatch(
        rows.hidden * 2, handle=handle, num_sms=20, do_expand=way.do_expand
    )
    assert same is handle and weights is None
    torch.testing.assert_close(doubled, first[0] * 2, rtol=0, atol=0, equal_nan=True)
    assert (ids is None) == way.do_expand
    assert ids is None or torch.equal(ids, first[1])
    bias = torch.full_like(rows.hidden, 0.5)
    ones = torch.ones_like(doubled)
    combined, _, _ = buffer.combine(ones, handle, bias=(bias, bias * 3))
    plain, _, _ = buffer.combine(ones, handle, bias=bias)
    buffer.destroy()
    return combined, plain


@pytest.mark.parametrize("way", ["compact", "compact_without_sync", "expanded"])
def test_a_handle_leads_other_rows_the_same_way(workers: Pools, way: str) -> None:
    load = load_of("ragged", 2, 5, torch.float32)
    for rank, (combined, plain) in enumerate(workers(2).run(again, load, WAYS[way])):
        expected = []
        for ids in load.rows_by_rank[rank].ids.tolist():
            used = [index for index in ids if index >= 0]
            # One for a rank, or for a choice where expanded.
            num = len(used) if WAYS[way].do_expand else len({index // 4 for index in used})
            expected.append([float(num)] * 5)
        assert combined.tolist() == (torch.tensor(expected) + 2).tolist()
        assert plain.tolist() == (torch.tensor(expected) + 0.5).tolist()


def in_8_bits(groups: Groups, load: Load, is_column_major: bool) -> tuple[int, ...]:
    """Rows are their scales' numbers; strides of the received scales."""
    buffer = make_buffer(groups, "strict", load)
    num_tokens = len(load.rows_by_rank[groups.rank].hidden)
    data = torch.ones(num_tokens, load.hidden_size).to(torch.float8_e4m3fn)
    # In any strides: here columns lie together.
    scales = torch.arange(2.0)[:, None] + 10 * torch.arange(float(num_tokens)) + 100 * groups.rank
    (recv_data, recv_scales), _, _, handle, _ = dispatch(
        buffer,
        load,
        groups.rank,
        WAYS["compact"],
        x=(data, scales.T),
        use_tma_aligned_col_major_sf=is_column_major,
    )
    assert (recv_data.float() == 1).all()
    expected = [
        [10.0 * token + 100 * source, 1 + 10.0 * token + 100 * source]
        for source, token in sources_of(load, handle)
    ]
    assert recv_scales.tolist() == expected
    buffer.destroy()
    strides: tuple[int, ...] = (len(expected), *recv_scales.stride())
    return strides


def test_scales_lie_as_they_are_asked_for(workers: Pools) -> None:
    load = load_of("ragged", 2, 256, torch.bfloat16)
    for num_rows, *strides in workers(2).run(in_8_bits, load, False):
        assert num_rows > 0 and strides == [2, 1]
    for num_rows, *strides in workers(2).run(in_8_bits, load, True):
        assert strides == [1, -(-num_rows // 4) * 4]


def orders(groups: Groups, load: Load, way: Way) -> list[list[int]]:
    """Source rank and token, as one number, of received rows or of those of one expert."""
    buffer = make_buffer(groups, "relaxed", load, way)
    found = []
    for _ in range(4):
        _, _, _, handle, _ = dispatch(buffer, load, groups.rank, way)
        origins = handle.recv_src_metadata[:, 0]
        if way.do_expand:
            slots = handle.recv_src_metadata[:, 2:]
            end = int(handle.psum_num_recv_tokens_per_expert[-1])
            start = end - int(handle.num_unaligned_recv_tokens_per_expert[-1])
            rows = [(slots == place).any(dim=1).nonzero().item() for place in range(start, end)]
            origins = origins[rows]
        found.append(origins.tolist())
    buffer.destroy()
    return found


@pytest.mark.parametrize(
    ("way", "is_sorted"),
    [
        ("compact", False),
        ("compact_in_order", True),
        ("expanded", False),
        ("expanded_in_order", True),
    ],
)
def test_rows_come_in_no_order_unless_asked(workers: Pools, way: str, is_sorted: bool) -> None:
    load = load_of("full", 2, 5, torch.float32)
    for found in workers(2).run(orders, load, WAYS[way]):
        assert len(found[0]) > 2
        assert all(order == sorted(order) for order in found) == is_sorted
        assert all(sorted(order) == sorted(found[0]) for order in found)


def counted(groups: Groups, load: Load) -> list[str]:
    buffer = make_buffer(groups, "relaxed", load)
    with counted_collectives() as calls:
        recv_x, _, _, handle, _ = dispatch(buffer, load, groups.rank, WAYS["compact"])
        buffer.combine(recv_x, handle)
    buffer.destroy()
    return calls


@pytest.mark.parametrize("name", ["nobody_sends", "only_padding", "full"])
def test_collectives_are_constant(workers: Pools, name: str) -> None:
    load = load_of(name, 2, 5, torch.float32)
    assert workers(2).run(counted, load) == [["all_to_all_single"] * 4] * 2


def refused(groups: Groups, load: Load) -> dict[str, str]:
    """Before any collective, so that a single rank can ask."""
    stand_in = make_stand_in("strict")
    rows = load.rows_by_rank[groups.rank]
    buffer = make_buffer(groups, "strict", load)
    small = stand_in.ElasticBuffer(groups.device, num_bytes=0, num_max_tokens_per_rank=8)
    twice = rows.ids.clone()
    twice[0] = 1
    base = {
        "topk_idx": rows.ids,
        "topk_weights": rows.weights,
        "num_experts": load.num_experts,
    }
    event = stand_in.Buffer.capture()
    tried: dict[str, tuple[Any, dict[str, Any]]] = {
        "float32": (buffer, {"x": rows.hidden.float()}),
        "odd hidden": (buffer, {"x": rows.hidden[:, :128].contiguous()}),
        "no experts": (buffer, {"num_experts": None}),
        "7 experts": (buffer, {"num_experts": 7}),
        "one expert twice": (buffer, {"topk_idx": twice}),
        "too many tokens": (buffer, {"num_max_tokens_per_rank": 2}),
        "larger N": (buffer, {"num_max_tokens_per_rank": 4096}),
        "too many queues": (buffer, {"num_qps": 1000}),
        "gaps of none": (buffer, {"do_zero_padding": True}),
        "event of the other class": (
            buffer,
            {"previous_event": event, "allocate_on_comm_stream": True},
        ),
        "event alone": (buffer, {"previous_event": event.event}),
        "small": (small, {}),
    }
    messages = {
        name: refusal(lambda: used.dispatch(**{"x": rows.hidden, **base, **changes}))  # noqa: B023
        for name, (used, changes) in tried.items()
    }
    cls = stand_in.ElasticBuffer
    messages["unaligned bytes"] = refusal(lambda: cls(groups.device, num_bytes=2**20))
    messages["no sizes"] = refusal(lambda: cls(groups.device))
    buffer.destroy()
    messages["destroyed"] = refusal(lambda: buffer.dispatch(rows.hidden, **base))
    return messages


def test_what_deep_ep_refuses_is_refused(workers: Pools) -> None:
    load = load_of("full", 2, 256, torch.bfloat16)
    parts = {
        "float32": "must be bfloat16",
        "odd hidden": "no multiple of 256",
        "no experts": "pass num_sms or num_experts",
        "7 experts": "do not divide over 2 ranks",
        "one expert twice": "one expert twice",
        "too many tokens": "tokens, at most 2",
        "larger N": "and the call needs",
        "too many queues": "129 are allocated",
        "gaps of none": "needs do_expand",
        "event of the other class": "no EventHandle",
        "event alone": "needs allocate_on_comm_stream",
        "small": "num_bytes is 0",
        "unaligned bytes": "no multiple of 2097152",
        "no sizes": "must be above 0",
        "destroyed": "is destroyed",
    }
    for messages in workers(2).run(refused, load):
        missing = {name for name, part in parts.items() if part not in messages[name]}
        assert missing == set(), messages


def one_capacity_each(groups: Groups, load: Load) -> str:
    buffer = make_buffer(groups, "relaxed", load)
    way = WAYS["compact"]
    message = refusal(
        lambda: dispatch(buffer, load, groups.rank, way, num_max_tokens_per_rank=8 - groups.rank)
    )
    buffer.destroy()
    return message


def test_unequal_capacities_raise_on_all_ranks(workers: Pools) -> None:
    load = load_of("ragged", 2, 5, torch.float32)
    first, second = workers(2).run(one_capacity_each, load)
    assert first == second and "rank 1: dispatch, call 1 of the buffer, with N 7" in first
