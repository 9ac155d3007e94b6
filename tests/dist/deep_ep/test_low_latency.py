"""Low-latency dispatch and combine of the stand-in, between real ranks."""

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moed.dist.deep_ep import fp8
from moed.dist.deep_ep.stand_in import make_stand_in
from moed.dist.groups import Groups
from tests.dist.counting import counted_collectives
from tests.dist.deep_ep.loads import (
    LOADS,
    Load,
    apply_expert,
    load_of,
    make_load,
    refusal,
    weighted_in_home,
)
from tests.worker_pool import WorkerPool

Pools = Callable[[int], WorkerPool]


def make_buffer(groups: Groups, mode: str, load: Load, **options: Any) -> Any:
    """A low-latency `Buffer` that has room for `load`."""
    cls = make_stand_in(mode).Buffer
    num_bytes = cls.get_low_latency_rdma_size_hint(
        load.num_max_tokens, load.hidden_size, groups.world_size, load.num_experts
    )
    return cls(
        groups.device,
        num_rdma_bytes=num_bytes,
        low_latency_mode=True,
        num_qps_per_rank=load.num_local(),
        explicitly_destroy=True,
        **options,
    )


def run_experts(groups: Groups, load: Load, recv_x: torch.Tensor, counts: Any) -> torch.Tensor:
    """[L, R x N, H], NaN beyond the counts, like a kernel that skips padding."""
    output = torch.full(recv_x.shape, float("nan"), dtype=recv_x.dtype)
    for local, count in enumerate(counts.tolist()):
        index = groups.rank * load.num_local() + local
        output[local, :count] = apply_expert(recv_x[local, :count], index)
    return output


def check_placement(
    groups: Groups, load: Load, recv_x: torch.Tensor, counts: Any, handle: Any
) -> None:
    """Every row stands where the handle says, and none is missing or added."""
    src_info, layout_range = handle[0], handle[1]
    num_rows = groups.world_size * load.num_max_tokens
    assert recv_x.shape == (load.num_local(), num_rows, load.hidden_size)
    assert src_info.shape == (load.num_local(), num_rows) and src_info.dtype == torch.int32
    assert layout_range.shape == (load.num_local(), groups.world_size)
    for local in range(load.num_local()):
        index = groups.rank * load.num_local() + local
        covered: list[int] = []
        for source, rows in enumerate(load.rows_by_rank):
            packed = int(layout_range[local, source])
            begin, count = packed >> 32, packed & 0xFFFFFFFF
            covered += range(begin, begin + count)
            tokens = src_info[local, begin : begin + count].tolist()
            expected = (rows.ids == index).any(dim=1).nonzero()[:, 0].tolist()
            assert sorted(tokens) == expected
            assert torch.equal(recv_x[local, begin : begin + count], rows.hidden[tokens])
        assert sorted(covered) == list(range(int(counts[local])))
        assert recv_x[local, int(counts[local]) :].isnan().all()


def round_trip(groups: Groups, mode: str, load: Load, use_hook: bool) -> torch.Tensor:
    """Dispatch, experts, combine, with checks of everything between."""
    rows = load.rows_by_rank[groups.rank]
    buffer = make_buffer(groups, mode, load)
    stats = torch.full((load.num_local(),), 100, dtype=torch.int32)
    recv_x, counts, handle, event, hook = buffer.low_latency_dispatch(
        rows.hidden,
        rows.ids,
        load.num_max_tokens,
        load.num_experts,
        cumulative_local_expert_recv_stats=stats,
        use_fp8=False,
        return_recv_hook=use_hook,
    )
    assert event.event is None and (hook is not None) == use_hook
    if use_hook:
        assert recv_x.isnan().all() and (counts < 0).all() and (stats == 100).all()
        hook()
    ids = torch.cat([other.ids for other in load.rows_by_rank])
    first = groups.rank * load.num_local()
    histogram = torch.bincount(ids[ids >= 0], minlength=load.num_experts)
    assert counts.tolist() == histogram[first : first + load.num_local()].tolist()
    assert stats.tolist() == (counts + 100).tolist()
    check_placement(groups, load, recv_x, counts, handle)
    assert handle[2:] == (load.num_max_tokens, load.hidden_size, load.num_experts)
    combined, event, hook = buffer.low_latency_combine(
        run_experts(groups, load, recv_x, counts),
        rows.ids,
        rows.weights,
        handle,
        return_recv_hook=use_hook,
    )
    if use_hook:
        assert combined.isnan().all()
        hook()
    buffer.destroy()
    assert combined.dtype == load.dtype
    result: torch.Tensor = combined
    return result


@pytest.mark.parametrize("use_hook", [False, True], ids=["at_once", "hook"])
@pytest.mark.parametrize("name", LOADS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(
    ("mode", "hidden_size", "dtype"),
    [("strict", 2048, torch.bfloat16), ("relaxed", 5, torch.float32)],
    ids=["strict", "relaxed"],
)
def test_rows_come_home_weighted_once(
    workers: Pools,
    mode: str,
    hidden_size: int,
    dtype: torch.dtype,
    world_size: int,
    name: str,
    use_hook: bool,
) -> None:
    """To the last bit: weights are applied in float32, in the order of the choices."""
    load = load_of(name, world_size, hidden_size, dtype)
    for rank, combined in enumerate(workers(world_size).run(round_trip, mode, load, use_hook)):
        assert torch.equal(combined, weighted_in_home(load, rank))


def test_rows_beyond_the_capacity_are_refused(workers: Pools) -> None:
    messages = workers(1).run(dispatch_one_too_many)
    assert messages == ["9 tokens, at most 8"]


def dispatch_one_too_many(groups: Groups) -> str:
    load = dataclasses.replace(make_load([9], 8, 2048, torch.bfloat16), num_max_tokens=8)
    buffer = make_buffer(groups, "strict", load)
    rows = load.rows_by_rank[0]
    message = refusal(lambda: buffer.low_latency_dispatch(rows.hidden, rows.ids, 8, 4))
    buffer.destroy()
    return message


def fp8_round_trip(groups: Groups, load: Load, round_scale: bool, use_ue8m0: bool) -> float:
    """Largest error of a received row, relative to the largest value of its 128 channels."""
    rows = load.rows_by_rank[groups.rank]
    buffer = make_buffer(groups, "strict", load)
    (data, scales), counts, handle, _, _ = buffer.low_latency_dispatch(
        rows.hidden,
        rows.ids,
        load.num_max_tokens,
        load.num_experts,
        round_scale=round_scale,
        use_ue8m0=use_ue8m0,
    )
    num_rows, groups_of_128 = groups.world_size * load.num_max_tokens, load.hidden_size // 128
    num_scales = groups_of_128 // 4 if use_ue8m0 else groups_of_128
    assert data.shape == (load.num_local(), num_rows, load.hidden_size)
    assert data.dtype == torch.float8_e4m3fn
    assert scales.dtype == (torch.int32 if use_ue8m0 else torch.float32)
    assert scales.shape == (load.num_local(), num_rows, num_scales)
    assert scales.stride() == (num_rows * num_scales, 1, num_rows)
    values = fp8.dequantize(data, scales)
    worst = 0.0
    for local, count in enumerate(counts.tolist()):
        assert data[local, count:].float().isnan().all()
        for source, sent in enumerate(load.rows_by_rank):
            packed = int(handle[1][local, source])
            block = slice(packed >> 32, (packed >> 32) + (packed & 0xFFFFFFFF))
            exact = sent.hidden[handle[0][local, block].long()].float()
            error = (values[local, block] - exact).abs().view(-1, groups_of_128, 128)
            amax = exact.abs().view(-1, groups_of_128, 128).amax(dim=2)
            worst = max(worst, float((error.amax(dim=2) / amax).max()) if len(exact) else 0.0)
    buffer.destroy()
    return worst


@pytest.mark.parametrize(
    ("round_scale", "use_ue8m0"), [(False, False), (True, False), (True, True)]
)
def test_8_bit_rows_keep_three_bits_and_lie_in_columns(
    workers: Pools, round_scale: bool, use_ue8m0: bool
) -> None:
    """A mantissa of 3 bits rounds by 1/16 of the value at most; all scales fit the largest."""
    load = load_of("ragged", 2, 2048, torch.bfloat16)
    errors = workers(2).run(fp8_round_trip, load, round_scale, use_ue8m0)
    assert all(0 < error <= 1 / 16 for error in errors)


def test_scales_are_as_the_kernels_make_them() -> None:
    x = torch.zeros(1, 512)
    x[0, 0], x[0, 128], x[0, 256] = 448.0, -3 * 448.0, 1e-6
    data, scales = fp8.quantize(x, round_scale=False)
    # The largest value of each 128 / 448; of tiny ones 1e-4 / 448.
    torch.testing.assert_close(scales, torch.tensor([[1.0, 3.0, 1e-4 / 448, 1e-4 / 448]]))
    assert data[0, [0, 128]].float().tolist() == [448.0, -448.0]
    _, scales = fp8.quantize(x, round_scale=True)
    # 2^-22 = 2.38e-7 is the power of two above 1e-4 / 448 = 2.23e-7.
    assert scales.tolist() == [[1.0, 4.0, 2.0**-22, 2.0**-22]]
    packed = fp8.pack_ue8m0(scales)
    assert packed.tolist() == [[127 | 129 << 8 | 105 << 16 | 105 << 24]]
    assert torch.equal(fp8.unpack_ue8m0(packed), scales)


def orders(groups: Groups, load: Load) -> tuple[list[list[int]], list[list[int]], bool]:
    """Tokens as they stand at one expert in 6 dispatches, the ranks of their blocks, and whether
    torch's own random numbers were left alone.
    """
    rows = load.rows_by_rank[groups.rank]
    buffer = make_buffer(groups, "relaxed", load)
    state = torch.get_rng_state()
    tokens, blocks = [], []
    for _ in range(6):
        _, counts, handle, _, _ = buffer.low_latency_dispatch(
            rows.hidden, rows.ids, load.num_max_tokens, load.num_experts, use_fp8=False
        )
        tokens.append(handle[0][3, : counts[3]].tolist())
        blocks.append((handle[1][3] >> 32).argsort().tolist())
    buffer.destroy()
    return tokens, blocks, torch.equal(state, torch.get_rng_state())


def test_rows_and_blocks_come_in_no_order(workers: Pools) -> None:
    load = load_of("one_expert", 2, 5, torch.float32)
    tokens, blocks, is_untouched = workers(2).run(orders, load)[0]
    assert all(sorted(order) == sorted([*range(8), *range(8)]) for order in tokens)
    assert len({tuple(order) for order in tokens}) > 1
    assert {tuple(order) for order in blocks} == {(0, 1), (1, 0)}
    assert is_untouched


def counted(groups: Groups, load: Load) -> tuple[list[str], int]:
    """Collectives of a dispatch and a combine, and bytes given to them."""
    rows = load.rows_by_rank[groups.rank]
    buffer = make_buffer(groups, "relaxed", load)
    sent = 0
    all_to_all = dist.all_to_all_single

    def measured(output: torch.Tensor, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal sent
        sent += tensor.nbytes
        return all_to_all(output, tensor, *args, **kwargs)

    with mock.patch.object(dist, "all_to_all_single", measured), counted_collectives() as calls:
        recv_x, counts, handle, _, _ = buffer.low_latency_dispatch(
            rows.hidden, rows.ids, load.num_max_tokens, load.num_experts, use_fp8=False
        )
        output = run_experts(groups, load, recv_x, counts)
        buffer.low_latency_combine(output, rows.ids, rows.weights, handle)
    buffer.destroy()
    return calls, sent


def test_collectives_are_constant_and_bytes_follow_rows(workers: Pools) -> None:
    sent = {}
    for name in ("nobody_sends", "only_padding", "full"):
        answers = workers(2).run(counted, load_of(name, 2, 1000, torch.float32))
        assert [calls for calls, _ in answers] == [["all_to_all_single"] * 4] * 2
        sent[name] = sum(num_bytes for _, num_bytes in answers)
    assert sent["nobody_sends"] == sent["only_padding"]
    # 16 tokens, less the fifth that is -1, 4000 bytes each way.
    num_rows = sum(
        (rows.ids >= 0).sum() for rows in load_of("full", 2, 5, torch.float32).rows_by_rank
    )
    payload = sent["full"] - sent["nobody_sends"]
    assert 2 * 4000 * num_rows <= payload <= 2 * 4032 * num_rows


def zero_copy(groups: Groups, mode: str, load: Load) -> tuple[torch.Tensor, tuple[int, ...]]:
    rows = load.rows_by_rank[groups.rank]
    buffer = make_buffer(groups, mode, load)
    recv_x, counts, handle, _, _ = buffer.low_latency_dispatch(
        rows.hidden, rows.ids, load.num_max_tokens, load.num_experts, use_fp8=False
    )
    view = buffer.get_next_low_latency_combine_buffer(handle)
    view.copy_(run_experts(groups, load, recv_x, counts))
    out = torch.empty_like(rows.hidden)
    combined, _, _ = buffer.low_latency_combine(
        torch.empty_like(recv_x), rows.ids, rows.weights, handle, zero_copy=True, out=out
    )
    assert combined is out
    buffer.destroy()
    return out, view.stride()


def test_combine_takes_its_rows_from_the_registered_buffer(workers: Pools) -> None:
    load = load_of("ragged", 2, 2048, torch.bfloat16)
    for rank, (combined, stride) in enumerate(workers(2).run(zero_copy, "strict", load)):
        # A row of 2048 is followed by room for 32 values.
        assert stride == (16 * 2080, 2080, 1)
        assert torch.equal(combined, weighted_in_home(load, rank))


def asynchronous(groups: Groups, load: Load) -> torch.Tensor:
    rows = load.rows_by_rank[groups.rank]
    buffer = make_buffer(groups, "relaxed", load)
    recv_x, counts, handle, event, hook = buffer.low_latency_dispatch(
        rows.hidden,
        rows.ids,
        load.num_max_tokens,
        load.num_experts,
        use_fp8=False,
        async_finish=True,
    )
    assert hook is None and recv_x.isnan().all()
    call = (recv_x, rows.ids, rows.weights, handle)
    assert "before the event" in refusal(lambda: buffer.low_latency_combine(*call))
    event.current_stream_wait()
    output = run_experts(groups, load, recv_x, counts)
    combined, event, _ = buffer.low_latency_combine(
        output, rows.ids, rows.weights, handle, async_finish=True
    )
    assert combined.isnan().all()
    with event:
        pass
    buffer.destroy()
    result: torch.Tensor = combined
    return result


def test_results_are_there_when_the_event_was_waited_for(workers: Pools) -> None:
    load = load_of("ragged", 2, 5, torch.float32)
    for rank, combined in enumerate(workers(2).run(asynchronous, load)):
        assert torch.equal(combined, weighted_in_home(load, rank))
