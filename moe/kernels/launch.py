"""How a product is cut into tiles."""

from dataclasses import dataclass

import triton

from moed.moe.block_scaled import SCALE_BLOCK


@dataclass(frozen=True)
class Tiling:
    """Sizes of a tile: rows, columns, and channels at a time."""

    block_rows: int
    block_columns: int
    block_depth: int
    num_warps: int

    def grid(self, num_row_blocks: int, num_columns: int) -> tuple[int, int]:
        return num_row_blocks, triton.cdiv(num_columns, self.block_columns)

    def options(self, is_fp8: bool) -> dict[str, int | bool]:
        """The constants of a kernel."""
        return {
            "BLOCK_M": self.block_rows,
            "BLOCK_N": self.block_columns,
            "BLOCK_K": SCALE_BLOCK if is_fp8 else self.block_depth,
            "IS_FP8": is_fp8,
            "num_warps": self.num_warps,
        }


def tiling_for(num_rows_per_expert: int) -> Tiling:
    """From the mean that is expected: few rows leave most of a large tile empty."""
    if num_rows_per_expert <= 16:
        return Tiling(16, 64, 128, num_warps=4)
    if num_rows_per_expert <= 64:
        return Tiling(32, 64, 64, num_warps=4)
    return Tiling(64, 128, 64, num_warps=8)
