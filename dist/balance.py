"""From how busy experts are to a placement: hot ones get copies, and every rank an even share.

As in DeepSeek's EPLB: first the copies, one at a time to the expert whose copies are the busiest;
then all copies, the busiest first, each to the least busy rank that has room.

Legend: E experts, R ranks, e slots of a rank.
"""

from collections.abc import Sequence

from moed.config.expert_placement import ExpertPlacement


def balance(rows: Sequence[int], num_ranks: int, num_copies: int) -> ExpertPlacement:
    """A placement of one layer's E experts, `rows` [E] being what each has computed.

    Every rank gets e = ceil((E + num_copies) / R) slots, all of them used as far as R allows: an
    expert lies on a rank once at most. Raises `ValueError` for sizes that cannot be.
    """
    num_experts = len(rows)
    if num_ranks < 1 or num_experts < 1 or num_copies < 0:
        raise ValueError(
            f"{num_experts} experts, {num_copies} copies and {num_ranks} ranks: there must be at "
            "least 1 expert, 0 copies and 1 rank"
        )
    num_slots = -(-(num_experts + num_copies) // num_ranks)
    if num_slots > num_experts:
        raise ValueError(
            f"{num_copies} copies are more than {num_ranks} ranks can use: with "
            f"{num_experts * (num_ranks - 1)} every rank holds every expert"
        )
    num_filled = num_experts if num_copies == 0 else num_slots * num_ranks
    counts = _counts(rows, num_ranks, num_filled)
    held = _pack(rows, counts, num_ranks, num_slots)
    return ExpertPlacement(tuple(tuple(sorted(experts)) for experts in held), num_experts)


def imbalance(rows: Sequence[int], placement: ExpertPlacement) -> float:
    """The busiest rank's rows over the mean, when copies share evenly: at least 1; 1 without
    rows.
    """
    copies = [len(slots) for slots in placement.slots_of]
    loads = [sum(rows[e] / copies[e] for e in experts) for experts in placement.held]
    mean = sum(loads) / len(loads)
    return max(loads) / mean if mean else 1.0


def _counts(rows: Sequence[int], num_ranks: int, num_filled: int) -> list[int]:
    """[E] copies of each expert, at least 1 and at most R; they sum to `num_filled`."""
    counts = [1] * len(rows)
    for _ in range(num_filled - len(rows)):
        open_to_more = [expert for expert, count in enumerate(counts) if count < num_ranks]
        busiest = max(open_to_more, key=lambda expert: (rows[expert] / counts[expert], -expert))
        counts[busiest] += 1
    return counts


def _pack(
    rows: Sequence[int], counts: Sequence[int], num_ranks: int, num_slots: int
) -> list[list[int]]:
    """The experts of each rank."""
    held: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    share = [row / count for row, count in zip(rows, counts, strict=True)]
    # What has the most copies has the fewest ranks left in the end: among equals it goes first.
    order = sorted(range(len(rows)), key=lambda expert: (-share[expert], -counts[expert], expert))
    for expert in order:
        for _ in range(counts[expert]):
            open_ranks = [
                rank
                for rank in range(num_ranks)
                if len(held[rank]) < num_slots and expert not in held[rank]
            ]
            if open_ranks:
                rank = min(open_ranks, key=lambda rank: (loads[rank], len(held[rank]), rank))
            else:
                rank = _make_room(expert, held, loads, share, num_slots)
            held[rank].append(expert)
            loads[rank] += share[expert]
    return held


def _make_room(
    expert: int, held: list[list[int]], loads: list[float], share: list[float], num_slots: int
) -> int:
    """A full rank without `expert`, from which another expert has moved to a rank with room: all
    ranks with room hold `expert` already.
    """
    for target, experts in enumerate(held):
        if len(experts) == num_slots:
            continue
        for source, others in enumerate(held):
            if expert in others:
                continue
            for moved in reversed(others):
                if moved not in experts:
                    others.remove(moved)
                    experts.append(moved)
                    loads[source] -= share[moved]
                    loads[target] += share[moved]
                    return source
    raise AssertionError("no expert can be moved")
