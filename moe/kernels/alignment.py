"""From the choices of rows to blocks of rows that share an expert, on the device alone.

Legend: r rows, K top-k, P = r * K pairs (row, choice), e local experts, b blocks.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Alignment:
    """Pairs sorted by expert, and the block -> expert map of a grouped product."""

    pairs: torch.Tensor
    """[P] int64: indices into the flattened ids, by expert; those of other ranks, -1, last."""
    starts: torch.Tensor
    """[e + 1] int32: where each expert's pairs begin; the last is the number of all local ones."""
    block_experts: torch.Tensor
    """[b] int32; e where the block is not needed. b is a bound that the host knows."""
    block_starts: torch.Tensor
    """[b] int32: the place in `pairs` of each block's first row."""


def align(expert_ids: torch.Tensor, num_experts: int, block_rows: int) -> Alignment:
    """For `expert_ids` [r, K] int64. Nothing here waits for the device."""
    flat, device = expert_ids.flatten(), expert_ids.device
    keys, pairs = torch.where(flat < 0, num_experts, flat).sort(stable=True)
    experts = torch.arange(num_experts + 1, device=device)
    starts = torch.searchsorted(keys, experts)
    blocks_before = torch.zeros_like(starts)
    blocks_before[1:] = ((starts.diff() + block_rows - 1) // block_rows).cumsum(0)
    blocks = torch.arange(max_blocks(flat.shape[0], num_experts, block_rows), device=device)
    block_experts = torch.searchsorted(blocks_before, blocks, right=True) - 1
    block_starts = starts[block_experts] + (blocks - blocks_before[block_experts]) * block_rows
    return Alignment(
        pairs,
        starts.to(torch.int32),
        block_experts.to(torch.int32),
        block_starts.to(torch.int32),
    )


def max_blocks(num_pairs: int, num_experts: int, block_rows: int) -> int:
    """Blocks that suffice however the pairs are spread: each expert wastes less than a block."""
    return min(num_pairs, num_pairs // block_rows + min(num_pairs, num_experts))


def reference_blocks(
    expert_ids: list[list[int]], num_experts: int, block_rows: int
) -> list[tuple[int, list[int]]]:
    """What `align` describes: (expert, pairs) of each block, one expert after the other."""
    flat = [expert for choices in expert_ids for expert in choices]
    blocks = []
    for expert in range(num_experts):
        pairs = [pair for pair, chosen in enumerate(flat) if chosen == expert]
        for start in range(0, len(pairs), block_rows):
            blocks.append((expert, pairs[start : start + block_rows]))
    return blocks
