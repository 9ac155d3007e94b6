"""What the decoder lacks for Mixture-of-Experts models that are known and not served, by the
`model_type` in config.json: that of the text part, where there are several.
"""

from types import MappingProxyType

_LINEAR = "linear attention with a state"
_MAMBA = "Mamba layers with a state"
_CONVOLUTION = "short convolutions with a state"
_INDEXER = "a sparse indexer over the context"
_STREAMS = "several residual streams that are mixed"
_GATED = "attention whose output is gated"
_NORMS_AFTER = "norms after attention and MLP"
_ROTARY_BY_LAYER = "rotary embeddings that differ between layers"
_SCALED_SINKS = "sinks together with Granite's multipliers and windows by layer"
_ENCODER = "an encoder"
_NO_LANGUAGE_MODEL = "a language model around it"
# All its parts are there, in other models.
_DECLARATION = "a declaration of its tensors' names and of its config.json's fields"

MISSING_PARTS = MappingProxyType(
    {
        "afmoe": f"{_GATED}, and {_NORMS_AFTER}",
        "aria_text": _DECLARATION,
        "axk1": "a norm after the experts",
        "axk2": f"{_INDEXER}, and {_GATED}",
        "bailing_hybrid": _LINEAR,
        "beam": f"{_GATED}, and {_NORMS_AFTER}",
        "cohere2_moe": "attention and MLP side by side, after one norm",
        "dbrx": "queries, keys and values in one tensor, and norms without a bias",
        "deepseek_ocr2_text": _DECLARATION,
        "deepseek_v32": _INDEXER,
        "deepseek_v4": f"{_INDEXER}, and {_STREAMS}",
        "diffusion_gemma_text": "attention in both directions",
        "doge": "attention with a learned mask, and experts that are found by product keys",
        "dots3_note": _INDEXER,
        "dots3_note_text": _INDEXER,
        "dots3_note_vision_encoder": _NO_LANGUAGE_MODEL,
        "ernie4_5_vl_moe_text": "experts of images beside those of text",
        "exaone_moe": _DECLARATION,
        "flex_olmo": _NORMS_AFTER,
        "flint": _DECLARATION,
        "gemma4_text": "embeddings of each layer, and norms after attention and MLP",
        "glm5_next_text": f"{_LINEAR}, {_INDEXER}, and {_STREAMS}",
        "glm_moe_dsa": _INDEXER,
        "granitemoe_swa": _SCALED_SINKS,
        "granitemoehybrid": _MAMBA,
        "hy_v3": _DECLARATION,
        "hy_v4": f"{_INDEXER}, and {_STREAMS}",
        "hy_v4_vl_text": f"{_INDEXER}, and {_STREAMS}",
        "inkling2_loop_text": f"{_CONVOLUTION}, and layers that are run several times",
        "inkling2_text": _CONVOLUTION,
        "inkling_text": _CONVOLUTION,
        "jamba": _MAMBA,
        "jetmoe": "attention whose heads are experts",
        "kimi_linear": _LINEAR,
        "kolibri1": f"{_NORMS_AFTER}, and a choice by corrected logits",
        "laguna": f"{_GATED}, and {_ROTARY_BY_LAYER}",
        "lara_mini": _LINEAR,
        "lfm2_moe": _CONVOLUTION,
        "longcat_flash": "experts that compute nothing",
        "mellum": _ROTARY_BY_LAYER,
        "mimo_v2_flash": "attention whose K and V differ in size",
        "minimax": _LINEAR,
        "minimax_m3": "block-sparse attention",
        "minimax_m3_vl_text": "block-sparse attention",
        "mistral4": "latent attention whose queries grow with their position",
        "mistral_large4_text": _INDEXER,
        "muse_spark_text": f"{_GATED}, and gated residuals",
        "nemotron_h": _MAMBA,
        "nllb-moe": _ENCODER,
        "openai_privacy_filter": "attention in both directions",
        "qwen3_5_moe": _LINEAR,
        "qwen3_5_moe_text": _LINEAR,
        "qwen3_next": _LINEAR,
        "qwen3_omni_moe": "the parts of an omni model, of which the thinker alone makes text",
        "qwen3_omni_moe_talker_text": "the parts of an omni model, of which the thinker makes text",
        "qwen3_omni_moe_text": "the parts of an omni model around it",
        "qwen4_exp_text": f"{_LINEAR}, {_INDEXER}, and {_STREAMS}",
        "sarvam_mla": _DECLARATION,
        "sarvam_moe": _DECLARATION,
        "step3p5": _GATED,
        "switch_transformers": _ENCODER,
        "unlimited_ocr_text": "a window that keeps the whole prompt",
        "vitpose_backbone": _NO_LANGUAGE_MODEL,
        "zaya": _CONVOLUTION,
    }
)
