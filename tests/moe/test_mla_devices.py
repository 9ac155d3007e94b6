"""Latent attention with the head sizes of DeepSeek-V3, in other dtypes and on a GPU, against a CPU
in float32.
"""

import math

import pytest
import torch

from moed.config.weight_bytes import Latent
from moed.moe.attention import plan_attention
from moed.moe.batch import ForwardBatch
from moed.moe.kv_cache import LatentCache
from moed.moe.linear import Linear
from moed.moe.mla import LatentAttention, LatentWeights
from moed.moe.rotary import Rotary
from tests.moe.harness import BLOCK_SIZE

SIZES = Latent(query_rank=256, kv_rank=512, rotary_dim=64, plain_dim=128, value_dim=128)
NUM_HEADS, HIDDEN = 8, 512
ROTARY = Rotary(tuple((10000 ** -(torch.arange(32) / 32)).tolist()), is_interleaved=True)
# A prompt, which is expanded; a piece after it, which is absorbed; a decode.
STEPS = ((0, 390), (390, 399), (399, 400))
BLOCKS = list(range(26, 0, -1))


def normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator) / math.sqrt(shape[-1])


def attention_on(device: str, dtype: torch.dtype) -> LatentAttention:
    """The same numbers on every device."""
    generator = torch.Generator().manual_seed(7)

    def weight(*shape: int) -> torch.Tensor:
        return normal(generator, *shape).to(device, dtype)

    weights = LatentWeights(
        compress=Linear(weight(SIZES.query_rank + SIZES.row_size, HIDDEN), None),
        query_norm=torch.ones(SIZES.query_rank, device=device, dtype=dtype),
        query=Linear(weight(NUM_HEADS * SIZES.query_dim, SIZES.query_rank), None),
        norm=torch.ones(SIZES.kv_rank, device=device, dtype=dtype),
        expand_key=weight(NUM_HEADS, SIZES.plain_dim, SIZES.kv_rank),
        expand_value=weight(NUM_HEADS, SIZES.value_dim, SIZES.kv_rank),
        output=Linear(weight(HIDDEN, NUM_HEADS * SIZES.value_dim), None),
    )
    return LatentAttention(SIZES, weights, ROTARY, SIZES.query_dim**-0.5)


def run(device: str, dtype: torch.dtype) -> torch.Tensor:
    """[400, HIDDEN] float32 on the CPU."""
    rows = torch.randn(400, HIDDEN, generator=torch.Generator().manual_seed(8))
    attention, blocks = attention_on(device, dtype), torch.tensor(BLOCKS, device=device)
    num_blocks = len(BLOCKS) + 1
    cache = LatentCache(SIZES.row_size, 1, num_blocks, BLOCK_SIZE, dtype, torch.device(device))
    found = []
    for start, stop in STEPS:
        positions = torch.arange(start, stop, device=device)
        batch = ForwardBatch(
            token_ids=positions,
            positions=positions,
            slot_mapping=blocks[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
            query_lens=(stop - start,),
            context_lens=(stop,),
            block_tables=blocks[None],
            logits_indices=positions[:0],
        )
        plan = plan_attention(batch, BLOCK_SIZE, None, dtype)
        tables = ROTARY.tables(positions, dtype)
        states = rows[start:stop].to(device, dtype)
        found.append(attention(states, 0, tables, plan, batch.slot_mapping, cache))
    return torch.cat(found).float().cpu()


@pytest.mark.parametrize(
    ("device", "dtype", "tolerance"),
    [
        ("cpu", torch.bfloat16, 2e-2),
        ("cpu", torch.float16, 5e-3),
        pytest.param("cuda", torch.float32, 1e-3, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, 2e-2, marks=pytest.mark.gpu),
    ],
    ids=str,
)
def test_as_a_cpu_in_float32(device: str, dtype: torch.dtype, tolerance: float) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    torch.set_num_threads(1)
    expected = run("cpu", torch.float32)
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(run(device, dtype), expected, rtol=0, atol=tolerance)
