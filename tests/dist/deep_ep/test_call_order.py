"""Every order of calls that DeepEP hangs on or miscounts is refused, and the legal ones are not."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from moed.dist.deep_ep.stand_in import make_stand_in
from moed.dist.groups import Groups
from tests.dist.deep_ep.loads import Load, make_load, refusal, weighted_in_home
from tests.dist.deep_ep.test_low_latency import make_buffer, run_experts
from tests.worker_pool import WorkerPool

Pools = Callable[[int], WorkerPool]


class Calls:
    """Short names for the calls of one buffer with one load."""

    def __init__(self, groups: Groups, load: Load, **options: Any) -> None:
        self.groups, self.load = groups, load
        self.rows = load.rows_by_rank[groups.rank]
        self.buffer = make_buffer(groups, "relaxed", load, **options)

    def dispatch(self, use_hook: bool = False, num_max_tokens: int = 0) -> Any:
        return self.buffer.low_latency_dispatch(
            self.rows.hidden,
            self.rows.ids,
            num_max_tokens or self.load.num_max_tokens,
            self.load.num_experts,
            use_fp8=False,
            return_recv_hook=use_hook,
        )

    def combine(self, dispatched: Any, use_hook: bool = False, **changes: Any) -> Any:
        output = run_experts(self.groups, self.load, dispatched[0], dispatched[1])
        arguments = {
            "topk_idx": self.rows.ids,
            "topk_weights": self.rows.weights,
            "handle": dispatched[2],
            **changes,
        }
        return self.buffer.low_latency_combine(output, return_recv_hook=use_hook, **arguments)

    def prefill(self) -> None:
        """A high-throughput dispatch and combine."""
        layout = self.buffer.get_dispatch_layout(self.rows.ids, self.load.num_experts)
        _, _, _, _, handle, _ = dispatched = self.buffer.dispatch(
            self.rows.hidden,
            num_tokens_per_rank=layout[0],
            num_tokens_per_expert=layout[2],
            is_token_in_rank=layout[3],
            topk_idx=self.rows.ids,
            topk_weights=self.rows.weights,
        )
        self.buffer.combine(dispatched[0], handle)

    def clean(self, num_max_tokens: int = 0) -> None:
        self.buffer.clean_low_latency_buffer(
            num_max_tokens or self.load.num_max_tokens,
            self.load.hidden_size,
            self.load.num_experts,
        )


LOAD = make_load([3], 8, 5, torch.float32)
LOADS_OF_TWO = make_load([3, 5], 8, 5, torch.float32)


def two_micro_batches(groups: Groups, load: Load) -> list[torch.Tensor]:
    calls = Calls(groups, load)
    results = []
    for _ in range(3):
        first = calls.dispatch(use_hook=True)
        first[4]()
        second = calls.dispatch(use_hook=True)
        second[4]()
        one = calls.combine(first, use_hook=True)
        one[2]()
        two = calls.combine(second, use_hook=True)
        two[2]()
        results += [one[0].clone(), two[0].clone()]
        del first, second, one, two
    calls.buffer.destroy()
    return results


def test_two_micro_batches_may_be_under_way(workers: Pools) -> None:
    for rank, results in enumerate(workers(2).run(two_micro_batches, LOADS_OF_TWO)):
        assert len(results) == 6
        assert all(torch.equal(each, weighted_in_home(LOADS_OF_TWO, rank)) for each in results)


def unreceived(groups: Groups) -> list[str]:
    calls = Calls(groups, LOAD, num_nvl_bytes=2**30)
    dispatched = calls.dispatch(use_hook=True)
    no_rows = torch.zeros(4, dtype=torch.int32)
    messages = [
        refusal(calls.dispatch),
        refusal(lambda: calls.combine((dispatched[0], no_rows, dispatched[2]))),
        refusal(calls.prefill),
        refusal(calls.clean),
        refusal(calls.buffer.destroy),
    ]
    dispatched[4]()
    combined = calls.combine(dispatched, use_hook=True)
    messages += [refusal(calls.dispatch), refusal(calls.buffer.destroy)]
    combined[2]()
    assert "a hook is called twice" in refusal(combined[2])
    calls.dispatch()
    calls.buffer.destroy()
    return messages


def test_nothing_is_issued_before_the_hook(workers: Pools) -> None:
    (messages,) = workers(1).run(unreceived)
    assert [message.rpartition(" is not received")[0] for message in messages] == [
        "low_latency_dispatch while low_latency_dispatch",
        "low_latency_combine while low_latency_dispatch",
        "dispatch while low_latency_dispatch",
        "clean_low_latency_buffer while low_latency_dispatch",
        "destroy while low_latency_dispatch",
        "low_latency_dispatch while low_latency_combine",
        "destroy while low_latency_combine",
    ]


def many_results(groups: Groups) -> list[str]:
    calls = Calls(groups, LOAD)
    first, second = calls.dispatch(), calls.dispatch()
    messages = [refusal(calls.dispatch)]
    # A view keeps the memory as well as the tensor does.
    second = (second[0][:1], *second[1:])
    messages.append(refusal(calls.dispatch))
    del second
    messages.append(refusal(calls.dispatch))
    # A combine uses its dispatch up, though the rows are still held here.
    combined = calls.combine(first)[0]
    one_more = calls.dispatch()
    messages.append(refusal(calls.dispatch))
    # Memory of the caller's own does not count.
    own = torch.empty_like(combined)
    calls.combine(one_more, out=own)
    kept = calls.dispatch()
    messages.append(refusal(calls.dispatch))
    del combined, kept
    messages.append(refusal(calls.dispatch))
    calls.buffer.destroy()
    return messages


def test_two_results_at_most_are_in_use(workers: Pools) -> None:
    (messages,) = workers(1).run(many_results)
    assert ["two at most" in message for message in messages] == [
        True,
        True,
        False,
        True,
        True,
        False,
    ]
    assert messages[3].startswith(
        "low_latency_dispatch while the results of "
        "['low_latency_combine', 'low_latency_dispatch'] are in use"
    )


def phases(groups: Groups) -> list[str]:
    calls = Calls(groups, LOADS_OF_TWO, num_nvl_bytes=2**30)
    calls.dispatch()
    calls.prefill()
    messages = [refusal(calls.dispatch)]
    calls.clean()
    dispatched = calls.dispatch()
    calls.prefill()
    messages.append(refusal(lambda: calls.combine(dispatched)))
    calls.clean()
    calls.combine(dispatched)
    messages.append(refusal(lambda: calls.dispatch(num_max_tokens=6)))
    calls.clean(num_max_tokens=6)
    messages.append(refusal(calls.dispatch))
    calls.load = dataclasses.replace(calls.load, num_max_tokens=7)
    calls.clean()
    calls.dispatch()
    calls.buffer.destroy()
    return messages


def test_the_buffer_is_cleaned_between_phases_and_before_other_sizes(workers: Pools) -> None:
    for messages in workers(2).run(phases):
        assert ["call clean_low_latency_buffer" in message for message in messages] == [True] * 4
        assert "after combine" in messages[0] and "after (8, 5, 8)" in messages[2]


def handles(groups: Groups) -> list[str]:
    calls, others = Calls(groups, LOAD), Calls(groups, LOAD)
    dispatched = calls.dispatch()
    ids = calls.rows.ids
    padded = ids.clone()
    padded[0, 0] = -1
    messages = [
        refusal(lambda: calls.combine(dispatched, topk_idx=padded)),
        refusal(lambda: calls.combine(dispatched, topk_idx=ids.flip(0).contiguous())),
        refusal(lambda: others.combine(dispatched)),
    ]
    copied = (*dispatched[:2], (dispatched[2][0].clone(), *dispatched[2][1:]))
    messages.append(refusal(lambda: calls.combine(copied)))
    first_combined = calls.combine(dispatched)
    del first_combined
    messages.append(refusal(lambda: calls.combine(dispatched)))
    messages.append(
        refusal(lambda: calls.buffer.get_next_low_latency_combine_buffer(dispatched[2]))
    )
    one = calls.dispatch()
    messages.append(refusal(lambda: calls.combine(one, zero_copy=True)))
    calls.buffer.get_next_low_latency_combine_buffer(one[2])
    two = calls.dispatch()
    messages.append(refusal(lambda: calls.combine(two, zero_copy=True)))
    messages.append(refusal(lambda: calls.buffer.get_next_low_latency_combine_buffer(one[2])))
    calls.buffer.destroy()
    others.buffer.destroy()
    return messages


def test_a_combine_belongs_to_its_own_dispatch(workers: Pools) -> None:
    (messages,) = workers(1).run(handles)
    parts = [
        "is not the topk_idx of its dispatch",
        "is not the topk_idx of its dispatch",
        "not of a dispatch of this buffer",
        "not of a dispatch of this buffer",
        "a second combine",
        "another low-latency call came",
        "call get_next_low_latency_combine_buffer",
        "call get_next_low_latency_combine_buffer",
        "another low-latency call came",
    ]
    assert [part in message for part, message in zip(parts, messages, strict=True)] == [True] * 9


def different_calls(groups: Groups) -> list[str]:
    calls = Calls(groups, LOADS_OF_TWO)
    is_first = groups.rank == 0
    messages = [refusal(lambda: calls.dispatch(num_max_tokens=8 if is_first else 6))]
    calls = Calls(groups, LOADS_OF_TWO)
    messages.append(refusal(lambda: calls.dispatch() if is_first else calls.clean()))
    calls = Calls(groups, LOADS_OF_TWO)
    one, two = calls.dispatch(), calls.dispatch()
    messages.append(refusal(lambda: calls.combine(one if is_first else two)))
    calls = Calls(groups, LOADS_OF_TWO)
    if is_first:
        # A call that this rank alone makes is met by another one of its peer.
        messages.append(refusal(calls.buffer.destroy))
    else:
        messages.append(refusal(calls.clean))
    cls = make_stand_in("strict").Buffer
    messages.append(refusal(lambda: cls(groups.device, num_nvl_bytes=128 * (1 + groups.rank))))
    return messages


def test_calls_that_differ_raise_on_all_ranks(workers: Pools) -> None:
    """Where DeepEP would hang for 100 s."""
    first, second = workers(2).run(different_calls)
    assert first == second
    assert all(message.startswith("ranks make different calls") for message in first)
    assert "rank 0: low_latency_dispatch, call 1 of the buffer, with N 8" in first[0]
    assert "rank 1: low_latency_dispatch, call 1 of the buffer, with N 6" in first[0]
    assert "rank 1: clean_low_latency_buffer" in first[1]


def ends(groups: Groups) -> list[str]:
    stand_in = make_stand_in("relaxed")
    kept = stand_in.Buffer(groups.device)
    messages = [refusal(kept.destroy)]
    calls = Calls(groups, LOAD)
    calls.buffer.destroy()
    messages += [refusal(calls.buffer.destroy), refusal(calls.dispatch), refusal(calls.clean)]
    elastic = stand_in.ElasticBuffer(groups.device, num_bytes=2**21)
    messages.append(refusal(elastic.destroy))
    messages.append(refusal(lambda: stand_in.Buffer(None)))
    messages.append(refusal(lambda: kept.clean_low_latency_buffer(8, 5, 4)))
    return messages


def test_destroy_is_explicit_and_final(workers: Pools) -> None:
    (messages,) = workers(1).run(ends)
    assert messages == [
        "destroy() needs explicitly_destroy=True",
        "the buffer is destroyed",
        "the buffer is destroyed",
        "the buffer is destroyed",
        "destroy() needs explicitly_destroy=True",
        "the stand-in works over a torch.distributed group only",
        "the buffer was made without low_latency_mode",
    ]
