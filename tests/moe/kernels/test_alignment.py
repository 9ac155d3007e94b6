"""Blocks of pairs that share an expert, against a list made by hand."""

import pytest
import torch

from moed.moe.kernels.alignment import align, max_blocks, reference_blocks


@pytest.mark.parametrize("block_rows", [1, 2, 16])
@pytest.mark.parametrize(
    ("num_experts", "ids"),
    [
        (3, [[0, 2], [2, -1], [-1, -1], [0, 2], [2, 0]]),
        (3, [[-1, -1]]),
        (1, [[0]]),
        (4, [[3]] * 5),
        (4, [[0]] * 4),
        (2, [[0, 1]] * 7),
        (5, [[4, 1, 0]]),
        (0, [[-1, -1]]),
        (8, []),
    ],
)
def test_equals_the_reference(
    num_experts: int, ids: list[list[int]], block_rows: int, device: torch.device
) -> None:
    top_k = len(ids[0]) if ids else 2
    tensor = torch.tensor(ids, dtype=torch.int64, device=device).view(len(ids), top_k)
    found = align(tensor, num_experts, block_rows)
    pairs, starts = found.pairs.tolist(), found.starts.tolist()
    blocks = []
    for expert, start in zip(
        found.block_experts.tolist(), found.block_starts.tolist(), strict=True
    ):
        if expert < num_experts:
            end = min(start + block_rows, starts[expert + 1])
            blocks.append((expert, pairs[start:end]))
    expected = reference_blocks(ids, num_experts, block_rows)
    assert blocks == expected
    assert sorted(pairs) == list(range(len(ids) * top_k))
    assert starts[-1] == sum(len(pairs) for _, pairs in expected)
    assert len(found.block_experts) == max_blocks(len(pairs), num_experts, block_rows)


def test_the_bound_by_hand() -> None:
    # 10 pairs in blocks of 4: two experts may have 9 and 1, three blocks and one; never five.
    assert max_blocks(10, 2, 4) == 4
    # Each pair at its own expert: as many blocks as pairs.
    assert max_blocks(3, 100, 16) == 3
    assert max_blocks(0, 8, 16) == 0
