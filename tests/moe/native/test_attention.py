"""A whole decoder with native kernels against the same with torch's: mixed steps of every kind."""

import ctypes
import dataclasses
import pathlib

import pytest
import torch

from moed.moe import native
from moed.moe.native import binding
from moed.moe.native.attention import DECODE
from tests.moe.checkpoints import make_checkpoint, prompt
from tests.moe.harness import Stepper, engine_config, load, one_rank

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")

# Plain; sinks and a sliding window; partial rotation; neighbours turned; norm after the rotation.
FAMILIES = ["qwen3_moe", "gpt_oss", "glm4_moe", "ernie4_5_moe", "hunyuan_v1_moe"]
# Of logits that are a few units large. In bfloat16 a router's choice can flip, so there the bound
# holds for most rows.
TOLERANCE = 1e-4


@pytest.fixture(autouse=True)
def choice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "_choice", "auto")


def logits(folder: pathlib.Path, dtype: str, kernels: str) -> list[torch.Tensor]:
    """Of a prompt, of a decode beside a prompt, of decodes alone, and of pieces beside decodes."""
    config = engine_config(folder, dtype=dtype)
    runner = dataclasses.replace(config.runner, cpu_kernels=kernels)
    config = dataclasses.replace(config, runner=runner)
    decoder = load(config, one_rank())
    has_native = decoder._native is not None
    assert has_native == (kernels == "native")
    stepper = Stepper(config, decoder)
    steps = [
        {"a": prompt(37, seed=1)},
        {"a": [5], "b": prompt(18, seed=2)},
        {"a": [6], "b": [7]},
        {"c": [9], "b": prompt(3, seed=3), "a": [8]},
        {},
        {"b": [1], "c": [2], "a": [3]},
    ]
    return [part for step in steps for part in stepper.step(step).values()]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_decoder_gives_the_same(tmp_path: pathlib.Path, family: str) -> None:
    make_checkpoint(family, tmp_path)
    found, wanted = (logits(tmp_path, "float32", kernels) for kernels in ("native", "torch"))
    for own, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=TOLERANCE)


def test_a_decoder_in_bfloat16(tmp_path: pathlib.Path) -> None:
    """As near to the float32 truth as torch's own bfloat16 is, give or take a half."""
    make_checkpoint("qwen3_moe", tmp_path)
    native.use_kernels("torch")
    truth = torch.cat(logits(tmp_path, "float32", "torch"))
    errors = {
        kernels: (torch.cat(logits(tmp_path, "bfloat16", kernels)) - truth).abs().median()
        for kernels in ("native", "torch")
    }
    assert 0 < errors["native"] < 1.5 * errors["torch"]


@pytest.mark.parametrize("window", [None, 1, 16, 20])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decodes_equal_attention_written_out(
    dtype: torch.dtype, has_sinks: bool, window: int | None
) -> None:
    """Six query heads over two KV heads of 48 dims, contexts around the edges of blocks."""
    heads, kv_heads, dim, block_size = 6, 2, 48, 16
    contexts = [1, 15, 16, 17, 50]
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    sinks = normal(heads) if has_sinks else None
    keys, values = normal(30, block_size, kv_heads, dim), normal(30, block_size, kv_heads, dim)
    tables = torch.randperm(30, generator=generator)[: 4 * len(contexts)].view(len(contexts), 4)
    query = normal(len(contexts), heads, dim)
    found = run_decodes(query, keys, values, tables, contexts, sinks, window)
    for row, context in enumerate(contexts):
        blocks = tables[row]
        first = max(0, context - window) if window else 0
        own = slice(first, context)
        key = keys[blocks].flatten(0, 1)[own].float().repeat_interleave(heads // kv_heads, dim=1)
        value = values[blocks].flatten(0, 1)[own].float().repeat_interleave(3, dim=1)
        scores = torch.einsum("hd,chd->hc", query[row].float(), key) * dim**-0.5
        if sinks is not None:
            scores = torch.cat([scores, sinks.float()[:, None]], dim=1)
        weights = scores.softmax(dim=1)[:, : context - first]
        wanted = torch.einsum("hc,chd->hd", weights, value)
        error = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(found[row].float(), wanted, rtol=error, atol=error)


def run_decodes(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    contexts: list[int],
    sinks: torch.Tensor | None,
    window: int | None,
) -> torch.Tensor:
    """The middle phase of a native layer alone."""
    library = native.library()
    assert library is not None
    num_tokens, heads, dim = query.shape
    positions = torch.tensor(contexts) - 1
    attended = torch.empty_like(query)
    layer = binding.AttentionLayer(
        num_heads=heads,
        num_kv_heads=keys.shape[2],
        head_dim=dim,
        window=window or 0,
        scale=dim**-0.5,
        sinks=None if sinks is None else sinks.data_ptr(),
    )
    step = binding.StepState(
        num_tokens=num_tokens,
        block_size=keys.shape[1],
        table_width=tables.shape[1],
        positions=positions.data_ptr(),
        num_decodes=num_tokens,
        tables=tables.data_ptr(),
    )
    pointers = (tensor.data_ptr() for tensor in (query, attended, keys, values))
    library.attention(
        binding.arguments(query.dtype),
        DECODE,
        ctypes.addressof(layer),
        ctypes.addressof(step),
        None,
        *pointers,
    )
    return attended
