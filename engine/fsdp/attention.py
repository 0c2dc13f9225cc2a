"""Our packed attention, registered with transformers' `AttentionInterface`.

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

_HARMLESS = frozenset({"position_ids"})
"""Tensors that families pass to attention but that it does not need, because queries and keys are already rotated."""


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    packed: PackedContext | None = None,
    chunk: int | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Run packed attention in transformers' signature: query `[1, H, T, D]` in, `[1, T, H, D]` out.

    Raises:
        ModelError: The family asks for something other than causal attention over the tokens of a document.
    """
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
    if is_causal is False:
        raise ModelError(f"{type(module).__name__} requires attention in both directions, but packed attention is causal")
    if key.shape[2] != query.shape[2]:
        raise ModelError(
            f"{type(module).__name__} attends from {query.shape[2]} tokens to {key.shape[2]} keys: it adds keys that belong to "
            "no single token, such as compressed blocks, which may cross document boundaries; it cannot run on packed sequences"
        )
    # Arguments such as a choice of keys or a bias on the logits are part of the model and must not be dropped silently.
    for name, other in others.items():
        if isinstance(other, Tensor) and name not in _HARMLESS:
            raise ModelError(
                f"{type(module).__name__} passes {name} to its attention, which packed attention does not compute; it cannot "
                "run on packed sequences"
            )
    # Qwen2-MoE's layers have a window but do not pass it, because transformers applies it in its mask, which is not built here.
    window = others.get("sliding_window", getattr(module, "sliding_window", None))
    out_the = packed_attention(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        packed,
        scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
        window=window,
        softcap=softcap,
        sinks_h=s_aux,
        chunk=chunk,
    )
    # Some families call `view` on the output, which transformers' own implementations allow. For all others, reshape is then free.
    return out_the.contiguous().unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, attention_forward)
