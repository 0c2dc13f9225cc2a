"""Settings specific to the Megatron-core backend."""

from dataclasses import dataclass
from typing import Literal

from ..config import setting


@dataclass(frozen=True, kw_only=True)
class MCoreOptions:
    """`engine.options` of `engine.backend=mcore`."""

    overlap_grad_reduce: bool = setting(
        False, "reduce gradients bucket by bucket while the backward pass of the last micro-batch is still running"
    )
    router_dtype: Literal["float32", "float64"] = setting("float32", "dtype of the router scores in a mixture of experts")
    bucket_size: int | None = setting(
        None, "number of parameters per bucket with overlap_grad_reduce; null: megatron's choice"
    )
