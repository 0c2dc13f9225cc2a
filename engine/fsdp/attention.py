"""Our packed attention, registered at transformers' own extension point. Nothing is patched.

No mask function is registered under the name, so transformers builds no mask. The name must not contain "flash", or
transformers would prepare arguments for its own kernels.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from ..errors import ModelError
from ..ops.attention import packed_attention
from ..ops.packed_context import PackedContext

IMPLEMENTATION = "drivetrain_packed"


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    packed: PackedContext | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Run packed attention in transformers' signature: query `[1, H, T, D]` in, `[1, T, H, D]` out."""
    if packed is None:
        raise ModelError(
            f"{type(module).__name__} does not pass model arguments down to its attention, so packed documents would "
            "attend to each other; this family cannot run here"
        )
    if query.shape[0] != 1:
        raise ModelError(
            f"packed attention got {query.shape[0]} rows: two models share one config object; give each its own copy"
        )
    if attention_mask is not None:
        raise ModelError(f"{type(module).__name__} passes its own attention mask; it cannot run on packed sequences")
    if dropout:
        raise ModelError(f"attention dropout {dropout} is not supported on packed sequences; set it to 0 in config.json")
    out_the = packed_attention(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        packed,
        scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
        window=sliding_window,
        softcap=softcap,
        sinks_h=s_aux,
    )
    # Some families view the output, as they may with transformers' own implementations; the others' reshape is free then.
    return out_the.contiguous().unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, attention_forward)
