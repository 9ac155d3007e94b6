"""What leads from the heads of a layer's attention back to the hidden states, whatever its kind."""

from moed.config.engine_config import ModelConfig
from moed.dist.tensor_parallel import TensorParallel
from moed.moe.families import DecoderFeatures
from moed.moe.linear import Linear
from moed.moe.loader import Source
from moed.moe.shards import Shard


def load_output(
    source: Source,
    prefix: str,
    model: ModelConfig,
    features: DecoderFeatures,
    heads: Shard,
    tensor_parallel: TensorParallel,
) -> Linear:
    """To the hidden size, from what the own `heads` give; `prefix` is the attention's."""
    weight = source.get(f"{prefix}o_proj.weight", (model.hidden_size, heads.whole))
    if tensor_parallel.size > 1:
        weight = weight[:, heads.start : heads.stop].contiguous()
    bias = None
    if features.attention_output_bias:
        bias = source.get(f"{prefix}o_proj.bias", (model.hidden_size,))
    # Added once, not by each member.
    return Linear(weight, bias if tensor_parallel.is_first else None)
