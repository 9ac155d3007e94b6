"""Loading reads what this rank needs and nothing else, and says plainly what does not fit."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from moed.config.errors import ModelError
from moed.config.expert_placement import ExpertPlacement
from moed.moe import loader
from tests.moe.checkpoints import make_checkpoint, make_model, prompt, true_logits
from tests.moe.harness import Stepper, engine_config, load, one_rank
from tests.moe.spy import Spy

FILE = "model.safetensors"
GATE = "model.layers.1.mlp.experts.2.gate_proj.weight"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_checkpoint("qwen3_moe", tmp_path, num_experts=6)
    return tmp_path


def load_alone(folder: Path, **options: Any) -> Stepper:
    config = engine_config(folder, **options)
    return Stepper(config, load(config, one_rank()))


def refused(folder: Path, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        load_alone(folder, **options)
    return str(caught.value)


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    # Cloned, since the file that they are mapped from is written over.
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / FILE).items()}
    edit(tensors)
    save_file(tensors, folder / FILE, metadata={"format": "pt"})


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    found: list[str] = []
    real = safe_open
    monkeypatch.setattr("moed.moe.loader.safe_open", lambda *a, **k: Spy(real(*a, **k), found))
    yield found


@pytest.mark.parametrize(
    ("ranks", "rank", "own"),
    [(1, 0, [0, 1, 2, 3, 4, 5]), (4, 0, [0, 1]), (4, 3, [5]), (2, 1, [3, 4, 5]), (8, 7, [])],
)
def test_only_own_experts_are_read(
    folder: Path, reads: list[str], ranks: int, rank: int, own: list[int]
) -> None:
    backend = "local" if ranks == 1 else "all2allv"
    load(engine_config(folder, backend=backend, ranks=ranks), one_rank(rank, ranks))
    expected = {
        f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"
        for layer in range(3)
        for expert in own
        for name in ("gate", "up", "down")
    }
    assert {name for name in reads if ".experts." in name} == expected
    assert len(reads) == len(set(reads)), "a tensor was read twice"


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_fused_layout_equals_transformers_and_only_own_rows_are_read(
    tmp_path: Path, family: str, reads: list[str]
) -> None:
    truth = make_model(family)
    truth.save_pretrained(tmp_path, save_original_format=False)
    tokens = prompt(20, seed=1)
    logits = load_alone(tmp_path).step({"a": tokens})["a"]
    torch.testing.assert_close(logits, true_logits(truth, tokens), rtol=0, atol=1e-4)
    reads.clear()
    load(engine_config(tmp_path, backend="all2allv", ranks=4), one_rank(3, 4))
    assert {name for name in reads if ".experts." in name} == {
        f"model.layers.{layer}.mlp.experts.{name}[{row}]"
        for layer in range(3)
        for name in ("gate_up_proj", "down_proj")
        for row in (6, 7)
    }


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_many_shards_equal_transformers(tmp_path: Path, family: str) -> None:
    truth = make_model(family)
    truth.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    tokens = prompt(20, seed=1)
    logits = load_alone(tmp_path).step({"a": tokens})["a"]
    torch.testing.assert_close(logits, true_logits(truth, tokens), rtol=0, atol=1e-4)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    make_model("qwen3_moe").save_pretrained(tmp_path, max_shard_size="100KB")
    lost = sorted(tmp_path.glob("*.safetensors"))[1]
    lost.unlink()
    assert lost.name in refused(tmp_path)


def test_folder_without_weights(folder: Path) -> None:
    (folder / FILE).unlink()
    assert FILE in refused(folder)


@pytest.mark.parametrize("kept", [0, 7, 300, 5000, -1])
def test_file_cut_short_is_named(folder: Path, kept: int) -> None:
    content = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(content[:kept])
    message = refused(folder)
    assert str(folder / FILE) in message and "\n" not in message


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}']
)
def test_broken_index_is_named(folder: Path, content: str) -> None:
    (folder / loader.INDEX).write_text(content)
    assert loader.INDEX in refused(folder)


def test_all_missing_and_unused_tensors_are_named_before_anything_is_read(
    folder: Path, reads: list[str]
) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[GATE], tensors["model.norm.weight"]
        tensors["model.layers.0.mlp.shared_expert.weight"] = torch.zeros(2)

    change(folder, edit)
    message = refused(folder)
    assert not reads
    for name in (GATE, "model.norm.weight", "model.layers.0.mlp.shared_expert.weight"):
        assert name in message


def test_one_expert_more_than_the_config_says(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_experts": 5}))
    message = refused(folder)
    assert "[6, 64]" in message and "experts.5." in message


def test_wrong_shape_names_both(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({GATE: torch.zeros(32, 60)}))
    message = refused(folder)
    assert GATE in message and "[32, 60]" in message and "[32, 64]" in message


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantized_tensor_is_refused(folder: Path, dtype: torch.dtype) -> None:
    change(folder, lambda tensors: tensors.update({GATE: tensors[GATE].to(dtype)}))
    assert GATE in refused(folder)


def test_missing_head_is_not_replaced_by_the_embedding(folder: Path) -> None:
    change(folder, lambda tensors: tensors.pop("lm_head.weight"))
    assert "lm_head.weight" in refused(folder)


def test_rotary_table_of_old_checkpoints_is_ignored(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change(folder, lambda tensors: tensors.update({name: torch.zeros(8)}))
    load_alone(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
            "original_max",
        ),
        ({"rope_scaling": {"type": "spiral", "factor": 2.0}, "rope_parameters": None}, "spiral"),
        ({"hidden_act": "gelu"}, "gelu"),
    ],
)
def test_what_the_decoder_lacks_is_refused_by_name(
    folder: Path, changes: dict[str, Any], words: str
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    assert words in refused(folder)


def test_rope_theta_at_the_top_level(tmp_path: Path) -> None:
    rope = {"rope_theta": 5e5, "rope_type": "default"}
    truth = make_checkpoint("qwen3_moe", tmp_path, rope_parameters=rope)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_theta": 5e5}))
    tokens = prompt(30, seed=2)
    logits = load_alone(tmp_path).step({"a": tokens})["a"]
    torch.testing.assert_close(logits, true_logits(truth, tokens), rtol=0, atol=1e-4)


def test_dummy_experts_are_the_same_whichever_rank_holds_them(folder: Path) -> None:
    (folder / FILE).unlink()
    name = "model.layers.0.mlp.experts.{}.up_proj.weight".format
    first, second, other_seed = (
        loader.Dummy(seed, torch.float32, torch.device("cpu")) for seed in (1, 1, 2)
    )
    # The second asks in another order, as a rank with other experts does.
    one, two = first.get(name(3), (4, 8)), first.get(name(4), (4, 8))
    assert torch.equal(second.get(name(4), (4, 8)), two)
    assert torch.equal(second.get(name(3), (4, 8)), one)
    assert not torch.equal(one, two)
    assert not torch.equal(other_seed.get(name(3), (4, 8)), one)


def test_dummy_model_runs_without_weight_files(folder: Path) -> None:
    (folder / FILE).unlink()
    tokens = prompt(9, seed=3)
    same = [
        load_alone(folder, load_format="dummy", seed=seed).step({"a": tokens})["a"]
        for seed in (5, 5, 6)
    ]
    assert same[0].isfinite().all()
    assert torch.equal(same[0], same[1]) and not torch.equal(same[0], same[2])


def test_every_expert_lies_on_one_rank() -> None:
    for num_experts, num_ranks in ((6, 4), (3, 2), (1, 2)):
        placement = ExpertPlacement.linear(num_experts, num_ranks)
        ids = [e for rank in range(num_ranks) for e in placement.local_expert_ids(rank)]
        assert sorted(ids) == list(range(num_experts))


def test_an_index_that_is_mixed_up_is_told(tmp_path: Path) -> None:
    make_model("qwen3_moe").save_pretrained(tmp_path, max_shard_size="100KB")
    index = json.loads((tmp_path / loader.INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"][GATE] = files[0] if index["weight_map"][GATE] != files[0] else files[1]
    (tmp_path / loader.INDEX).write_text(json.dumps(index))
    message = refused(tmp_path)
    assert GATE in message and "mixed up" in message and "\n" not in message


@pytest.mark.parametrize("header", [b"{" * 64, b"<html>" * 20, b"\xff" * 64])
def test_a_corrupt_header_is_told(folder: Path, header: bytes) -> None:
    content = (folder / FILE).read_bytes()
    for begin in (0, 8):
        (folder / FILE).write_bytes(content[:begin] + header + content[begin + len(header) :])
        message = refused(folder)
        assert str(folder / FILE) in message and "\n" not in message
