"""A checkpoint large enough to weigh and to time loading, and a process that does both."""

import json
import threading
import time
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from moed.config.engine_config import EngineConfig
from moed.config.weight_bytes import weight_bytes
from moed.moe.shards import even_shard
from tests.moe.harness import engine_config, load, one_rank

HIDDEN, SIZE, NUM_EXPERTS, HEADS, HEAD_DIM, VOCABULARY = 1024, 512, 32, 16, 64, 16000
POLL_S = 0.002


def write_large(folder: Path, num_layers: int) -> int:
    """A Qwen3-MoE in bfloat16 of about 0.1 GB a layer, a file for each; returns its bytes."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "moe_intermediate_size": SIZE,
        "intermediate_size": SIZE,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": 4,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS // 2,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    rows, files = HEADS * HEAD_DIM, {}
    whole = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "lm_head.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for number in range(num_layers + 1):
        prefix = f"model.layers.{number}."
        shapes: dict[str, tuple[int, ...]] = {
            f"{prefix}input_layernorm.weight": (HIDDEN,),
            f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
            f"{prefix}self_attn.q_proj.weight": (rows, HIDDEN),
            f"{prefix}self_attn.k_proj.weight": (rows // 2, HIDDEN),
            f"{prefix}self_attn.v_proj.weight": (rows // 2, HIDDEN),
            f"{prefix}self_attn.o_proj.weight": (HIDDEN, rows),
            f"{prefix}self_attn.q_norm.weight": (HEAD_DIM,),
            f"{prefix}self_attn.k_norm.weight": (HEAD_DIM,),
            f"{prefix}mlp.gate.weight": (NUM_EXPERTS, HIDDEN),
        }
        for expert in range(NUM_EXPERTS):
            for name, shape in (("gate", (SIZE, HIDDEN)), ("up", (SIZE, HIDDEN))):
                shapes[f"{prefix}mlp.experts.{expert}.{name}_proj.weight"] = shape
            shapes[f"{prefix}mlp.experts.{expert}.down_proj.weight"] = (HIDDEN, SIZE)
        if number == num_layers:
            shapes = dict(whole)
        name = f"model-{number:05d}.safetensors"
        tensors = {key: torch.empty(shape, dtype=torch.bfloat16) for key, shape in shapes.items()}
        for tensor in tensors.values():
            tensor.fill_(0.01)
        save_file(tensors, folder / name, {"format": "pt"})
        files.update(dict.fromkeys(tensors, name))
    index = {"weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def anonymous_bytes() -> int:
    """RssAnon of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon")


class Peak:
    """The most that this process held while the context was open."""

    def __enter__(self) -> "Peak":
        self.before = self.most = anonymous_bytes()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._is_over.wait(POLL_S):
            self.most = max(self.most, anonymous_bytes())

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self.most = max(self.most, anonymous_bytes())


def loaded(folder: str, rank: int, num_ranks: int) -> tuple[int, int, int]:
    """What `rank` holds by the plan, what it grew by at most while it loaded, what was left of
    that.
    """
    config = config_of(folder, num_ranks)
    with Peak() as peak:
        decoder = load(config, one_rank(rank, num_ranks))
    own = sum(weight_bytes(config).values())
    assert decoder is not None
    return own, peak.most - peak.before, anonymous_bytes() - peak.before


def load_seconds(folder: str, rank: int, num_ranks: int) -> float:
    """The time that loading takes when nobody looks at its memory meanwhile."""
    config = config_of(folder, num_ranks)
    begin = time.perf_counter()
    decoder = load(config, one_rank(rank, num_ranks))
    took = time.perf_counter() - begin
    assert decoder is not None
    return took


def config_of(folder: str, num_ranks: int) -> EngineConfig:
    torch.set_num_threads(1)
    return engine_config(Path(folder), backend="all2allv", ranks=num_ranks, dtype="bfloat16")


def read(folder: str, rank: int, num_ranks: int) -> tuple[int, float]:
    """Bytes and seconds of reading what `rank` holds, tensor by tensor, with safetensors alone."""
    torch.set_num_threads(1)
    own = even_shard(NUM_EXPERTS, num_ranks, rank)
    begin, num_bytes, kept = time.perf_counter(), 0, []
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                parts = name.split(".experts.")
                if len(parts) == 2 and not own.start <= int(parts[1].split(".")[0]) < own.stop:
                    continue
                kept.append(file.get_tensor(name).clone())
                num_bytes += kept[-1].nbytes
    return num_bytes, time.perf_counter() - begin
