"""How a product is cut into tiles."""

from dataclasses import dataclass

import torch
import triton

from moed.moe.block_scaled import SCALE_BLOCK


@dataclass(frozen=True)
class Tiling:
    """Sizes of a tile: rows, columns, and bytes of channels at a time. All fit, with the next tile
    on its way, in the 99 KiB of shared memory that the smallest GPUs give a program.
    """

    block_rows: int
    block_columns: int
    block_depth_bytes: int
    num_warps: int

    def grid(self, num_row_blocks: int, num_columns: int) -> tuple[int, int]:
        return num_row_blocks, triton.cdiv(num_columns, self.block_columns)

    def options(self, dtype: torch.dtype) -> dict[str, int | bool]:
        """The constants of a kernel for weights of `dtype`."""
        is_fp8 = dtype == torch.float8_e4m3fn
        return {
            "BLOCK_M": self.block_rows,
            "BLOCK_N": self.block_columns,
            "BLOCK_K": SCALE_BLOCK if is_fp8 else self.block_depth_bytes // dtype.itemsize,
            "IS_FP8": is_fp8,
            "num_warps": self.num_warps,
            "num_stages": 3,
        }


def tiling_for(num_rows_per_expert: int) -> Tiling:
    """From the mean that is expected: few rows leave most of a large tile empty."""
    if num_rows_per_expert <= 16:
        return Tiling(16, 64, 256, num_warps=4)
    if num_rows_per_expert <= 64:
        return Tiling(32, 64, 128, num_warps=4)
    return Tiling(64, 128, 128, num_warps=8)
