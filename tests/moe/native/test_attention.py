"""A whole decoder with native kernels against the same with torch's: mixed steps of every kind."""

import ctypes
import dataclasses
import pathlib

import pytest
import torch

from moed.moe import native
from moed.moe.native import binding
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


HEADS, KV_HEADS, DIM, BLOCK_SIZE = 6, 2, 48, 16
# Number of tokens and context: around the edges of blocks and tiles, more tokens than go together.
PIECES = [(1, 1), (1, 15), (1, 17), (1, 200), (16, 16), (3, 65), (130, 130), (70, 300), (2, 128)]


@dataclasses.dataclass
class Case:
    """What attention is asked for; requests follow each other."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    tables: torch.Tensor
    sinks: torch.Tensor | None
    window: int | None
    pieces: list[tuple[int, int]]

    def run(self) -> torch.Tensor:
        library = native.library()
        assert library is not None
        num_tokens, heads, dim = self.query.shape
        rows: list[tuple[int, int, int]] = []
        positions: list[int] = []
        row = 0
        for request, (count, context) in enumerate(self.pieces):
            rows.append((row, count, request))
            positions += range(context - count, context)
            row += count
        kept = torch.tensor(rows), torch.tensor(positions), torch.empty_like(self.query)
        layer = binding.AttentionLayer(
            num_heads=heads,
            num_kv_heads=self.keys.shape[2],
            head_dim=dim,
            window=self.window or 0,
            scale=dim**-0.5,
            sinks=None if self.sinks is None else self.sinks.data_ptr(),
        )
        step = binding.StepState(
            num_tokens=num_tokens,
            block_size=self.keys.shape[1],
            table_width=self.tables.shape[1],
            positions=kept[1].data_ptr(),
            num_pieces=len(rows),
            pieces=kept[0].data_ptr(),
            tables=self.tables.data_ptr(),
        )
        pointers = (t.data_ptr() for t in (self.query, self.keys, self.values, kept[2]))
        structs = ctypes.addressof(layer), ctypes.addressof(step)
        library.attend(binding.arguments(self.query.dtype), *structs, *pointers)
        return kept[2]

    def wanted(self) -> torch.Tensor:
        """Written out, in float32."""
        size, found, row = HEADS // KV_HEADS, [], 0
        for request, (count, context) in enumerate(self.pieces):
            blocks = self.tables[request]
            keys, values = (
                cache[blocks].flatten(0, 1)[:context].float().repeat_interleave(size, dim=1)
                for cache in (self.keys, self.values)
            )
            for position in range(context - count, context):
                seen = slice(max(0, position + 1 - (self.window or context)), position + 1)
                query = self.query[row].float()
                scores = torch.einsum("hd,chd->hc", query, keys[seen]) * DIM**-0.5
                if self.sinks is not None:
                    scores = torch.cat([scores, self.sinks.float()[:, None]], dim=1)
                weights = scores.softmax(dim=1)[:, : seen.stop - seen.start]
                found.append(torch.einsum("hc,chd->hd", weights, values[seen]))
                row += 1
        return torch.stack(found)


def make_case(dtype: torch.dtype, has_sinks: bool, window: int | None) -> Case:
    generator = torch.Generator().manual_seed(0)
    width = max(-(-context // BLOCK_SIZE) for _, context in PIECES)
    num_blocks = width * len(PIECES)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    cache = (num_blocks, BLOCK_SIZE, KV_HEADS, DIM)
    return Case(
        normal(sum(count for count, _ in PIECES), HEADS, DIM),
        normal(*cache),
        normal(*cache),
        torch.randperm(num_blocks, generator=generator).view(len(PIECES), width),
        normal(HEADS) if has_sinks else None,
        window,
        PIECES,
    )


@pytest.mark.parametrize("window", [None, 1, 16, 20, 100])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_equals_attention_written_out(
    dtype: torch.dtype, has_sinks: bool, window: int | None
) -> None:
    """Six query heads over two KV heads of 48 dims."""
    case = make_case(dtype, has_sinks, window)
    error = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(case.run().float(), case.wanted(), rtol=error, atol=error)


@pytest.mark.parametrize("window", [None, 20])
def test_a_token_does_not_depend_on_pieces_or_other_requests(window: int | None) -> None:
    """To the last bit; and nothing is read that no token sees."""
    case = make_case(torch.bfloat16, True, window)
    whole, row = case.run(), 0
    for request, (count, context) in enumerate(case.pieces):
        for first in range(0, count, 29):
            num = min(29, count - first)
            rows = slice(row + first, row + first + num)
            last = context - count + first + num
            alone = dataclasses.replace(
                case,
                query=case.query[rows].contiguous(),
                keys=case.keys.clone(),
                values=case.values.clone(),
                tables=case.tables[request : request + 1],
                pieces=[(num, last)],
            )
            own = alone.tables[0]
            seen = torch.zeros(len(own) * BLOCK_SIZE, dtype=torch.bool)
            seen[max(0, last - num + 1 - (window or last)) : last] = True
            for cache in (alone.keys, alone.values):
                rows_of_request = cache[own].flatten(0, 1)
                rows_of_request[~seen] = torch.nan
                cache.fill_(torch.nan)[own] = rows_of_request.view(len(own), *cache.shape[1:])
            assert torch.equal(alone.run(), whole[rows])
        row += count
