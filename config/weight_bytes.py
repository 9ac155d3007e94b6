"""Weights of one rank by part, from config.json alone, in the dtype that is computed with.

Experts are spread over all ranks; attention heads over the ranks of a tensor-parallel group; all
else is held by each rank. Sizes are those of a decoder with SwiGLU; a family that is not served
yet is reckoned by the same fields, under whichever of their names config.json has.

Legend: D hidden size, I intermediate size.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moed.config.engine_config import EngineConfig, ModelConfig
from moed.config.quantization import FP8_BLOCK_SIZE, StoredFormat

BYTES_PER_NUMBER = {"float32": 4, "bfloat16": 2, "float16": 2}
PARTS = ("embedding", "attention", "router", "experts", "shared experts", "dense MLP", "head")

# Model types with a norm of queries and keys, and with a correction of the router's choice.
NORMED = frozenset(
    {"dots1", "hunyuan_v1_moe", "minimax_m2", "olmoe", "qwen3_moe", "qwen3_vl_moe_text"}
)
CORRECTED = frozenset(
    {
        *("deepseek_v3", "dots1", "ernie4_5_moe", "glm4_moe", "glm4_moe_lite", "glm4v_moe_text"),
        *("kimi_k2", "minimax_m2", "solar_open"),
    }
)
# Those whose router computes in float32.
FLOAT32_ROUTED = frozenset(
    {
        *("deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "glm4_moe", "glm4_moe_lite"),
        *("glm4v_moe_text", "kimi_k2", "solar_open"),
    }
)
# Those whose attention has biases of queries, keys and values alone.
WITHOUT_OUTPUT_BIAS = frozenset({"glm4_moe", "glm4v_moe_text", "solar_open"})
# Dense layers before the first MoE layer, where config.json does not say.
NUM_FIRST_DENSE = {"deepseek_v3": 3, "glm4_moe_lite": 1, "glm4v_moe_text": 1}


@dataclass(frozen=True)
class Latent:
    """Attention that caches one compressed row a token (MLA) instead of K and V of each head."""

    query_rank: int
    """0: queries are not compressed."""
    kv_rank: int
    rotary_dim: int
    plain_dim: int
    value_dim: int

    @property
    def row_size(self) -> int:
        """Numbers cached for a token in a layer."""
        return self.kv_rank + self.rotary_dim

    @property
    def query_dim(self) -> int:
        """Of a head's query and key."""
        return self.plain_dim + self.rotary_dim


def latent_attention(model: ModelConfig) -> Latent | None:
    """None for the common kind, with K and V heads."""
    config = model.hf_config
    if not config.get("kv_lora_rank"):
        return None
    return Latent(
        query_rank=_count(config, "q_lora_rank"),
        kv_rank=_count(config, "kv_lora_rank"),
        rotary_dim=_count(config, "qk_rope_head_dim"),
        plain_dim=_count(config, "qk_nope_head_dim"),
        value_dim=_count(config, "v_head_dim"),
    )


def weight_bytes(config: EngineConfig) -> dict[str, int]:
    """Bytes of each of `PARTS` on one rank, the fullest where experts do not divide evenly."""
    itemsize = BYTES_PER_NUMBER[config.model.dtype]
    found = {part: count * itemsize for part, count in _num_weights(config).items()}
    wider = BYTES_PER_NUMBER["float32"] - itemsize
    found["router"] += sum(moe_layers(config.model)) * _num_float32(config.model) * wider
    if experts_stay_fp8(config):
        # A byte each, and a float32 scale for each block.
        blocks = FP8_BLOCK_SIZE[0] * FP8_BLOCK_SIZE[1]
        count = found["experts"] // itemsize
        found["experts"] = count + count // blocks * 4
    return found


def experts_stay_fp8(config: EngineConfig) -> bool:
    """Whether experts stored in FP8 blocks are computed with as they are: on GPUs, unless each is
    split over processes.
    """
    found = config.model.hf_config.get("quantization_config")
    is_fp8 = isinstance(found, Mapping) and found.get("quant_method") == StoredFormat.FP8_BLOCK
    parallel = config.parallel
    return is_fp8 and parallel.device == "cuda" and parallel.enable_expert_parallel


def _num_weights(config: EngineConfig) -> dict[str, int]:
    model, moe = config.model, config.fused_moe
    hidden, table = model.hidden_size, model.vocab_size * model.hidden_size
    num_moe = sum(moe_layers(model))
    num_dense = model.num_layers - num_moe
    num_local = moe.num_local_slots
    inner = model.moe_intermediate_size
    if not config.parallel.enable_expert_parallel:
        inner = -(-inner // config.parallel.world_size)
    is_tied = bool(model.hf_config.get("tie_word_embeddings", False))
    head_bias = model.vocab_size if model.hf_config.get("lm_head_bias") else 0
    # Two norms of D in each layer, and one at the end; with a bias as long, if with any.
    norms = (2 * model.num_layers + 1) * hidden * (1 + (model.model_type == "phimoe"))
    return {
        "embedding": table,
        "attention": model.num_layers * _attention(config) + norms,
        "router": num_moe * (model.num_experts * hidden + _router_extras(model)),
        "experts": num_moe * num_local * (3 * hidden * inner + _expert_biases(model, inner)),
        "shared experts": num_moe * 3 * hidden * shared_intermediate_size(model),
        "dense MLP": num_dense * 3 * hidden * dense_intermediate_size(model),
        "head": (0 if is_tied else table) + head_bias,
    }


def moe_layers(model: ModelConfig) -> list[bool]:
    """By layer: MoE, or a dense MLP."""
    config = model.hf_config
    if model.model_type == "llama4_text":
        every = _count(config, "interleave_moe_layer_step") or 1
        listed = config.get("moe_layers")
        listed = range(every - 1, model.num_layers, every) if listed is None else listed
        return [layer in listed for layer in range(model.num_layers)]
    if isinstance(kinds := config.get("mlp_layer_types"), list):
        return [kind == "sparse" for kind in kinds[: model.num_layers]]
    otherwise = NUM_FIRST_DENSE.get(model.model_type, 0)
    first = config.get("first_k_dense_replace", otherwise) or 0
    step = _count(config, "decoder_sparse_step") or 1
    frequency = _count(config, "moe_layer_freq") or 1
    dense = set(config.get("mlp_only_layers") or ())
    last = model.num_layers - 1
    if model.model_type == "ernie4_5_moe":
        first = config.get("moe_layer_start_index", 1)
        step = _count(config, "moe_layer_interval") or 1
        end = config.get("moe_layer_end_index", -1)
        last = last if end == -1 else end
    return [
        first <= layer <= last
        and layer not in dense
        and (layer + 1) % step == 0
        and layer % frequency == 0
        for layer in range(model.num_layers)
    ]


def dense_intermediate_size(model: ModelConfig) -> int:
    """I of the layers without experts."""
    name = "intermediate_size_mlp" if model.model_type == "llama4_text" else "intermediate_size"
    return _count(model.hf_config, name)


def shared_intermediate_size(model: ModelConfig) -> int:
    """I of the experts that every token passes, together; 0 where there are none."""
    config = model.hf_config
    if model.model_type in ("hunyuan_v1_moe", "llama4_text"):
        return model.moe_intermediate_size
    size = _count(config, "shared_expert_intermediate_size")
    size = size or _count(config, "shared_intermediate_size")
    number = _count(config, "n_shared_experts") or _count(config, "moe_num_shared_experts")
    return size or number * model.moe_intermediate_size


def _router_extras(model: ModelConfig) -> int:
    """A bias for each expert, where its choice is corrected; a gate of the shared expert."""
    has_bias = _has_correction(model) or model.model_type == "gpt_oss"
    bias = model.num_experts if has_bias else 0
    gate = model.hidden_size if _count(model.hf_config, "shared_expert_intermediate_size") else 0
    return bias + gate


def _has_correction(model: ModelConfig) -> bool:
    return model.hf_config.get("topk_method") == "noaux_tc" or model.model_type in CORRECTED


def _num_float32(model: ModelConfig) -> int:
    """Numbers of one layer's router that are held in float32, whatever the model's dtype."""
    weights = model.num_experts * model.hidden_size if model.model_type in FLOAT32_ROUTED else 0
    return weights + (model.num_experts if _has_correction(model) else 0)


def _expert_biases(model: ModelConfig, inner: int) -> int:
    """Of one expert whose intermediate size here is `inner`."""
    return 2 * inner + model.hidden_size if model.model_type == "gpt_oss" else 0


def _attention(config: EngineConfig) -> int:
    """Numbers of one layer's attention on one rank."""
    model, ranks = config.model, tensor_parallel_size(config)
    heads = -(-model.num_attention_heads // ranks)
    latent = latent_attention(model)
    if latent is not None:
        return _latent_attention(model, latent, heads)
    kv_heads = local_kv_heads(config)
    hidden, dim = model.hidden_size, model.head_dim
    rows = (heads + 2 * kv_heads) * dim
    count = rows * hidden + hidden * heads * dim
    is_gpt_oss = model.model_type == "gpt_oss"
    count += heads if is_gpt_oss else 0
    if model.hf_config.get("attention_bias", is_gpt_oss):
        count += rows + (0 if model.model_type in WITHOUT_OUTPUT_BIAS else hidden)
    elif model.model_type == "qwen2_moe" and model.hf_config.get("qkv_bias", True):
        count += rows
    has_norm = model.hf_config.get("use_qk_norm") and model.model_type != "llama4_text"
    if model.model_type in NORMED or has_norm:
        # The norm of queries and keys is held once for each head.
        count += (heads + kv_heads) * dim
    return count


def _latent_attention(model: ModelConfig, latent: Latent, heads: int) -> int:
    hidden = model.hidden_size
    if latent.query_rank:
        query = latent.query_rank * (hidden + 1 + heads * latent.query_dim)
    else:
        query = hidden * heads * latent.query_dim
    compress = hidden * latent.row_size + latent.kv_rank
    if model.hf_config.get("attention_bias", False):
        compress += latent.query_rank + latent.row_size + hidden
    expand = latent.kv_rank * heads * (latent.plain_dim + latent.value_dim)
    return query + compress + expand + heads * latent.value_dim * hidden


def tensor_parallel_size(config: EngineConfig) -> int:
    """Ranks that share the attention heads of one data-parallel rank."""
    return config.parallel.tensor_parallel_size


def local_kv_heads(config: EngineConfig) -> int:
    """KV heads of a rank: its share, at least one."""
    return max(1, config.model.num_kv_heads // tensor_parallel_size(config))


def _count(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    return value if isinstance(value, int) else 0
