"""High-throughput dispatch and combine of the stand-in, between real ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moed.config import deep_ep_limits as limits
from moed.dist.deep_ep import configs, fp8
from moed.dist.deep_ep.high_throughput import dispatch_layout
from moed.dist.deep_ep.rules import ContractViolation
from moed.dist.deep_ep.stand_in import make_stand_in
from moed.dist.groups import Groups
from tests.dist.counting import counted_collectives
from tests.dist.deep_ep.loads import (
    LOADS,
    Load,
    apply_expert,
    load_of,
    refusal,
    weighted_at_experts,
)
from tests.worker_pool import WorkerPool

Pools = Callable[[int], WorkerPool]


def make_buffer(groups: Groups, mode: str, load: Load) -> Any:
    """A `Buffer` with the room that the recommended settings ask for."""
    cls = make_stand_in(mode).Buffer
    row_bytes = load.hidden_size * max(load.dtype.itemsize, 2)
    num_bytes = max(
        config(groups.world_size).get_nvl_buffer_size_hint(row_bytes, groups.world_size)
        for config in (cls.get_dispatch_config, cls.get_combine_config)
    )
    return cls(groups.device, num_nvl_bytes=num_bytes, explicitly_destroy=True)


def dispatch(buffer: Any, load: Load, rank: int, **options: Any) -> Any:
    rows = load.rows_by_rank[rank]
    per_rank, per_node, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(
        rows.ids, load.num_experts
    )
    return buffer.dispatch(
        options.pop("x", rows.hidden),
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=is_in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=rows.ids,
        topk_weights=rows.weights,
        **options,
    )


def run_experts(
    groups: Groups, load: Load, x: torch.Tensor, ids: Any, weights: Any
) -> torch.Tensor:
    """[M, H]: weighted sums over the local experts; NaN for rows without any."""
    total = torch.zeros(x.shape)
    for choice in range(ids.shape[1]):
        for local in range(load.num_local()):
            is_here = ids[:, choice] == local
            output = apply_expert(x[is_here], groups.rank * load.num_local() + local)
            total[is_here] += weights[is_here, choice, None] * output.float()
    total[(ids < 0).all(dim=1)] = float("nan")
    return total.to(x.dtype)


def expected_rows(groups: Groups, load: Load) -> list[tuple[int, int]]:
    """(source rank, token) of every row that belongs here, in order."""
    first = groups.rank * load.num_local()
    return [
        (source, token)
        for source, rows in enumerate(load.rows_by_rank)
        for token, ids in enumerate(rows.ids.tolist())
        if any(first <= index < first + load.num_local() for index in ids)
    ]


def check_rows(groups: Groups, load: Load, dispatched: Any) -> None:
    """Rows, ids and weights of each source rank, and nothing else."""
    recv_x, ids, weights, _, handle, _ = dispatched
    expected = expected_rows(groups, load)
    found = list(zip([source for source, _ in expected], handle[3].tolist(), strict=False))
    assert sorted(found) == expected
    first = groups.rank * load.num_local()
    for row, (source, token) in enumerate(found):
        sent = load.rows_by_rank[source]
        local = sent.ids[token] - first
        is_here = (local >= 0) & (local < load.num_local()) & (sent.ids[token] >= 0)
        assert torch.equal(recv_x[row], sent.hidden[token])
        assert torch.equal(ids[row], torch.where(is_here, local, -1))
        assert torch.equal(weights[row], torch.where(is_here, sent.weights[token], 0.0))
    assert recv_x[len(expected) :].isnan().all() and (ids[len(expected) :] == -1).all()


def round_trip(
    groups: Groups, mode: str, load: Load, num_worst_tokens: int, is_asynchronous: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    buffer = make_buffer(groups, mode, load)
    dispatched = dispatch(
        buffer,
        load,
        groups.rank,
        expert_alignment=4,
        num_worst_tokens=num_worst_tokens,
        async_finish=is_asynchronous,
    )
    recv_x, ids, weights, counts, handle, event = dispatched
    if is_asynchronous:
        assert recv_x.isnan().all() and weights.isnan().all()
        event.current_stream_wait()
    check_rows(groups, load, dispatched)
    if num_worst_tokens:
        assert (recv_x.shape[0], counts) == (num_worst_tokens, [])
    else:
        first = groups.rank * load.num_local()
        sent = torch.cat([rows.ids for rows in load.rows_by_rank])
        histogram = torch.bincount(sent[sent >= 0], minlength=load.num_experts).tolist()
        mine = histogram[first : first + load.num_local()]
        assert counts == [-(-count // 4) * 4 for count in mine]
    output = run_experts(groups, load, recv_x, ids, weights)
    combined, combined_weights, event = buffer.combine(
        output, handle, topk_weights=weights, async_finish=is_asynchronous
    )
    if is_asynchronous:
        assert combined.isnan().all()
        event.current_stream_wait()
    buffer.destroy()
    return combined, combined_weights


@pytest.mark.parametrize("options", [(0, False), (40, False), (0, True)])
@pytest.mark.parametrize("name", LOADS)
@pytest.mark.parametrize(
    ("mode", "world_size", "hidden_size", "dtype"),
    [
        ("strict", 2, 2048, torch.bfloat16),
        ("strict", 4, 2048, torch.bfloat16),
        ("relaxed", 1, 5, torch.float32),
        ("relaxed", 4, 5, torch.float32),
    ],
    ids=["strict-2", "strict-4", "relaxed-1", "relaxed-4"],
)
def test_rows_come_home_as_sums_without_weights(
    workers: Pools,
    mode: str,
    world_size: int,
    hidden_size: int,
    dtype: torch.dtype,
    name: str,
    options: tuple[int, bool],
) -> None:
    load = load_of(name, world_size, hidden_size, dtype)
    answers = workers(world_size).run(round_trip, mode, load, *options)
    for rank, (combined, weights) in enumerate(answers):
        assert torch.equal(combined, weighted_at_experts(load, rank))
        rows = load.rows_by_rank[rank]
        # Each weight went to the rank of its expert, alone, and came back.
        assert torch.equal(weights, torch.where(rows.ids >= 0, rows.weights, 0.0))


def again(groups: Groups, load: Load) -> tuple[torch.Tensor, list[str]]:
    """Other values on the ways of an earlier dispatch; two biases."""
    buffer = make_buffer(groups, "relaxed", load)
    rows = load.rows_by_rank[groups.rank]
    first = dispatch(buffer, load, groups.rank)
    handle = first[4]
    doubled, *middle, event = buffer.dispatch(rows.hidden * 2, handle=handle)
    assert middle == [None] * 4 and event.event is None
    assert torch.equal(doubled, first[0] * 2)
    bias = torch.full_like(rows.hidden, 0.5)
    combined, weights, _ = buffer.combine(torch.ones_like(doubled), handle, bias=(bias, bias * 3))
    assert weights is None
    refused = [
        refusal(lambda: buffer.dispatch(rows.hidden, handle=handle, topk_idx=rows.ids)),
        refusal(lambda: buffer.dispatch(rows.hidden[1:].contiguous(), handle=handle)),
        refusal(lambda: buffer.combine(doubled[1:].contiguous(), handle)),
    ]
    buffer.destroy()
    return combined, refused


def test_a_handle_leads_other_rows_the_same_way(workers: Pools) -> None:
    load = load_of("full", 4, 5, torch.float32)
    for rank, (combined, refused) in enumerate(workers(4).run(again, load)):
        ids = load.rows_by_rank[rank].ids
        # One comes back from each rank that holds an expert of the token; biases are 2 together.
        ranks = [len({index // 4 for index in row if index >= 0}) for row in ids.tolist()]
        assert combined.tolist() == [[2.0 + num_ranks] * 5 for num_ranks in ranks]
        assert "topk together with a handle" in refused[0]
        assert "another number of rows" in refused[1]
        assert "x is torch.float32" in refused[2]


def in_8_bits(groups: Groups, load: Load) -> bool:
    buffer = make_buffer(groups, "strict", load)
    rows = load.rows_by_rank[groups.rank]
    data, scales = fp8.quantize(rows.hidden, round_scale=False)
    (recv_data, recv_scales), *_, handle, _ = dispatch(buffer, load, groups.rank, x=(data, scales))
    buffer.destroy()
    sources = [source for source, _ in expected_rows(groups, load)]
    sent = [fp8.quantize(rows.hidden, round_scale=False) for rows in load.rows_by_rank]
    for row, (source, token) in enumerate(zip(sources, handle[3].tolist(), strict=True)):
        data, scales = sent[source]
        assert torch.equal(recv_data[row].float(), data[token].float())
        assert torch.equal(recv_scales[row], scales[token])
    return len(sources) > 0


def test_8_bit_rows_travel_with_their_scales(workers: Pools) -> None:
    load = load_of("ragged", 2, 2048, torch.bfloat16)
    assert workers(2).run(in_8_bits, load) == [True, True]


def counted(groups: Groups, load: Load) -> list[str]:
    buffer = make_buffer(groups, "relaxed", load)
    with counted_collectives() as calls:
        recv_x, _, _, _, handle, _ = dispatch(buffer, load, groups.rank)
        buffer.combine(recv_x, handle)
    buffer.destroy()
    return calls


@pytest.mark.parametrize("name", ["nobody_sends", "only_padding", "full"])
def test_collectives_are_constant(workers: Pools, name: str) -> None:
    load = load_of(name, 2, 5, torch.float32)
    assert workers(2).run(counted, load) == [["all_to_all_single"] * 4] * 2


def orders(groups: Groups, load: Load) -> list[list[int]]:
    """Tokens of the first source rank, as they come in 4 dispatches."""
    buffer = make_buffer(groups, "relaxed", load)
    handles = [dispatch(buffer, load, groups.rank)[4] for _ in range(4)]
    buffer.destroy()
    return [handle[3][: handle[0][0, groups.rank]].tolist() for handle in handles]


def test_rows_of_a_rank_come_in_no_order(workers: Pools) -> None:
    for found in workers(2).run(orders, load_of("full", 2, 5, torch.float32)):
        assert len({tuple(order) for order in found}) > 1
        assert len({tuple(sorted(order)) for order in found}) == 1


def refused(groups: Groups, load: Load) -> dict[str, str]:
    """Before any collective, so that a single rank can ask."""
    rows = load.rows_by_rank[groups.rank]
    strict, relaxed = make_buffer(groups, "strict", load), make_buffer(groups, "relaxed", load)
    layout = strict.get_dispatch_layout(rows.ids, load.num_experts)
    names = {
        "num_tokens_per_rank": layout[0],
        "num_tokens_per_expert": layout[2],
        "is_token_in_rank": layout[3],
        "topk_idx": rows.ids,
        "topk_weights": rows.weights,
    }
    small = make_stand_in("strict").Buffer(groups.device, num_nvl_bytes=2**20)
    tried = {
        "float32": lambda: strict.dispatch(rows.hidden.float(), **names),
        "odd row": lambda: strict.dispatch(rows.hidden[:, :12].contiguous(), **names),
        "slice": lambda: strict.dispatch(rows.hidden[:, :2040], **names),
        "no weights": lambda: strict.dispatch(rows.hidden, **{**names, "topk_weights": None}),
        "no layout": lambda: relaxed.dispatch(
            rows.hidden, topk_idx=rows.ids, topk_weights=rows.weights
        ),
        "other layout": lambda: relaxed.dispatch(
            rows.hidden, **{**names, "num_tokens_per_expert": layout[2] + 1}
        ),
        "int32 ids": lambda: strict.get_dispatch_layout(rows.ids.int(), load.num_experts),
        "7 experts": lambda: strict.get_dispatch_layout(rows.ids.clamp(max=6), 7),
        "large id": lambda: strict.get_dispatch_layout(rows.ids, 4),
        "own stream": lambda: strict.dispatch(rows.hidden, **names, allocate_on_comm_stream=True),
        "small": lambda: small.dispatch(rows.hidden, **names),
    }
    messages = {name: refusal(call) for name, call in tried.items()}
    strict.destroy()
    relaxed.destroy()
    return messages


def test_what_deep_ep_refuses_is_refused(workers: Pools) -> None:
    load = load_of("ragged", 2, 2048, torch.bfloat16)
    parts = {
        "float32": "must be bfloat16",
        "odd row": "24 bytes",
        "slice": "contiguous",
        "no weights": "topk_weights are missing",
        "no layout": "get_dispatch_layout are missing",
        "other layout": "not the one of get_dispatch_layout",
        "int32 ids": "torch.int32",
        "7 experts": "do not divide over 2 ranks",
        "large id": "must lie in -1..3",
        "own stream": "needs previous_event and async_finish",
        "small": "num_nvl_bytes is 1048576",
    }
    for messages in workers(2).run(refused, load):
        missing = {name for name, part in parts.items() if part not in messages[name]}
        assert missing == set(), messages


def test_the_layout_counts_tokens_and_choices() -> None:
    """Two ranks of two experts: token 0 goes to rank 0 twice and once to rank 1."""
    layout = dispatch_layout(torch.tensor([[0, 1, 3], [3, -1, 2], [-1, -1, -1]]), 4, 2)
    assert layout.num_tokens_per_rank.tolist() == [1, 2]
    assert layout.num_tokens_per_expert.tolist() == [1, 1, 1, 2]
    assert layout.is_token_in_rank.tolist() == [[True, True], [False, True], [False, False]]
    assert layout.num_tokens_per_rdma_rank is None


def test_the_layout_counts_nodes_beyond_eight_ranks() -> None:
    """Ranks 0, 7 and 8 of 16 hold one expert each."""
    layout = dispatch_layout(torch.tensor([[0, 7, 8], [0, -1, -1]]), 16, 16)
    assert layout.num_tokens_per_rdma_rank is not None
    assert layout.num_tokens_per_rdma_rank.tolist() == [2, 1]


@pytest.mark.parametrize("num_ranks", limits.HIGH_THROUGHPUT_RANKS)
def test_the_recommended_settings_need_what_the_limits_say(num_ranks: int) -> None:
    cls = make_stand_in("strict").Buffer
    pair = (cls.get_dispatch_config(num_ranks), cls.get_combine_config(num_ranks))
    nvl = max(config.get_nvl_buffer_size_hint(14336, num_ranks) for config in pair)
    rdma = max(config.get_rdma_buffer_size_hint(14336, num_ranks) for config in pair)
    assert nvl == limits.high_throughput_nvl_bytes(num_ranks, 7168)
    assert rdma == limits.high_throughput_rdma_bytes(num_ranks, 7168)


def test_rank_counts_without_settings_are_refused_when_strict() -> None:
    assert set(configs.DISPATCH) == set(configs.COMBINE) == set(limits.HIGH_THROUGHPUT_RANKS)
    with pytest.raises(ContractViolation, match="3 ranks"):
        make_stand_in("strict").Buffer.get_dispatch_config(3)
    config = make_stand_in("relaxed").Buffer.get_dispatch_config(3)
    assert vars(config) == vars(make_stand_in("strict").Buffer.get_dispatch_config(4))


@pytest.mark.parametrize(
    "numbers",
    [(21,), (20, 256, 256), (20, 0, 256), (20, 6, 256, 0), (20, 6, 256, 6, 6)],
)
def test_settings_that_cannot_work_are_refused(numbers: tuple[int, ...]) -> None:
    with pytest.raises(ContractViolation):
        make_stand_in("strict").Config(*numbers)


def test_the_number_of_multiprocessors_holds_for_all_buffers() -> None:
    cls = make_stand_in("strict").Buffer
    cls.set_num_sms(24)
    try:
        assert cls.get_dispatch_config(8).num_sms == cls.num_sms == 24
        assert make_stand_in("relaxed").Buffer.get_combine_config(8).num_sms == 24
        with pytest.raises(ContractViolation):
            cls.set_num_sms(3)
    finally:
        cls.set_num_sms(20)
