"""How much memory a generator needs, estimated from its model's files and config."""

from typing import Any

from ...engine.hf.config import read_config
from ...engine.hf.model_path import resolve_folder
from .options import RolloutConfig

_BYTES = {"float32": 4, "bfloat16": 2}


def estimated_bytes(config: RolloutConfig) -> dict[str, int]:
    """Return the size of the `parameters` and of the full `cache`, in bytes; 0 for what the config or the files do not say.

    Args:
        config: The configuration of the generator.
    """
    folder = resolve_folder(config.model.path)
    model: Any = read_config(config.model).get_text_config(decoder=True)
    size = _BYTES[config.dtype]
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    stored_size = {"float32": 4, "float64": 8}.get(str(getattr(model, "dtype", "")).removeprefix("torch."), 2)
    attention = getattr(model, "num_attention_heads", None)
    heads = getattr(model, "num_key_value_heads", None) or attention or 0
    width = getattr(model, "head_dim", None) or (model.hidden_size // attention if attention else 0)
    per_token = 2 * model.num_hidden_layers * heads * width * size
    return {"parameters": stored * size // stored_size, "cache": per_token * config.max_batch_total_tokens}
