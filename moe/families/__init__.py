"""Model families as declarations: what config.json means, and what the checkpoint's tensors are
called. The decoder is one and the same.

To add a family:

1. Read its modelling file in `transformers`, for what differs from Llama: router, norms and where
   they stand, biases, windows, rotary embedding, and what is stored under which name. If it has a
   part that no field of `DecoderFeatures`, of `RouterSpec` and of `Names` can say (another
   attention, a state that is no KV cache), the decoder has to learn that part first; such a model
   is refused until then, by a line in `moed.config.missing_parts`.
2. Write a function from `ModelConfig` to `DecoderFeatures`, beginning with `common(...)`, whose
   arguments are the family's own values for fields that config.json may leave out. Refuse, with
   `ModelError`, values of fields that change the computation and are not served.
3. Name the tensors that are not called as in `Names` (experts one by one) and as in `FusedNames`
   (all experts of a layer in one tensor; `is_transposed` where rows and columns are swapped, as
   `x @ w` needs them). What published files use is in `conversion_mapping.py` of `transformers`.
4. Put both into `FAMILIES` below, under config.json's `model_type` (that of `text_config`, for the
   text part of a multimodal model), add it to `moed.config.model.SERVED_MODEL_TYPES`, and take its
   line out of `moed.config.missing_parts`.
5. What config.json alone must tell, for `moed plan` needs no torch: which layers have experts, and
   sizes of dense and shared MLPs, biases, norms and float32 routers, in `moed.config.weight_bytes`
   (sets of model types at its top, if its fields have other names or its tensors are more); experts
   whose size has another name, in `moed.config.model.EXPERT_SIZE_FIELDS`; windows of some layers
   only, in `moed.config.kv_layout`.
6. Give it a line in `tests/moe/checkpoints.py`, with all its peculiarities switched on and sizes
   such that none can stand for another; a window is shorter than the prompts of the tests. Then
   `pytest tests/moe/test_families.py -k TYPE` compares logits, prompts in pieces, greedy tokens and
   the plan's bytes with `transformers`, and `make test-slow` splits over ranks. Variants that
   config.json may switch go into `test_other_shapes_of_a_family`.
"""

from moed.config.engine_config import ModelConfig
from moed.config.errors import ModelError
from moed.config.quantization import SERVED_FORMATS
from moed.moe.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE
from moed.moe.families.ernie import ERNIE
from moed.moe.families.features import (
    DecoderFeatures,
    Family,
    FusedNames,
    Names,
    QueryKeyNorm,
    Temperature,
)
from moed.moe.families.glm import DOTS1, GLM4_MOE, SOLAR_OPEN
from moed.moe.families.gpt_oss import GPT_OSS
from moed.moe.families.granite import GRANITE_MOE, GRANITE_MOE_SHARED
from moed.moe.families.hunyuan import HUNYUAN
from moed.moe.families.llama4 import LLAMA4
from moed.moe.families.mixtral import MINIMAX_M2, MIXTRAL
from moed.moe.families.olmoe import OLMOE
from moed.moe.families.phimoe import PHIMOE
from moed.moe.families.qwen import QWEN2_MOE, QWEN3_MOE, QWEN3_VL_MOE
from moed.moe.rotary import ROPE_TYPES

__all__ = [
    "FAMILIES",
    "DecoderFeatures",
    "Family",
    "FusedNames",
    "Names",
    "QueryKeyNorm",
    "Temperature",
    "families_table",
    "family_of",
]

FAMILIES = {
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,
    "dots1": DOTS1,
    "ernie4_5_moe": ERNIE,
    "glm4_moe": GLM4_MOE,
    "glm4_moe_lite": GLM4_MOE_LITE,
    "glm4v_moe_text": GLM4_MOE,
    "gpt_oss": GPT_OSS,
    "granitemoe": GRANITE_MOE,
    "granitemoeshared": GRANITE_MOE_SHARED,
    "hunyuan_v1_moe": HUNYUAN,
    "kimi_k2": DEEPSEEK_V3,
    "llama4_text": LLAMA4,
    "minimax_m2": MINIMAX_M2,
    "mixtral": MIXTRAL,
    "olmoe": OLMOE,
    "phimoe": PHIMOE,
    "qwen2_moe": QWEN2_MOE,
    "qwen3_moe": QWEN3_MOE,
    "qwen3_vl_moe_text": QWEN3_VL_MOE,
    "solar_open": SOLAR_OPEN,
}


def families_table() -> str:
    """Text: each family with its features, then the formats that weights may be stored in."""
    width = max(map(len, FAMILIES))
    rows = "".join(
        f"  {name:<{width}}  {family.description}\n" for name, family in FAMILIES.items()
    )
    return (
        f"model_type{' ' * max(1, width - 6)}features\n{rows}"
        f"weights: bfloat16, float16, float32; quantised: {SERVED_FORMATS}\n"
        f"rotary embeddings: {', '.join(ROPE_TYPES)}\n"
    )


def family_of(model: ModelConfig) -> Family:
    """Raises `ModelError` for a model type without a declaration."""
    if model.model_type not in FAMILIES:
        raise ModelError(
            f"models of type {model.model_type!r} are not served; served are {', '.join(FAMILIES)}"
        )
    return FAMILIES[model.model_type]
