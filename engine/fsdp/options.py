"""Settings specific to the FSDP backend."""

from dataclasses import dataclass
from typing import Literal

from ..config import setting


@dataclass(frozen=True, kw_only=True)
class FSDPOptions:
    """`engine.options` of `engine.backend=fsdp`."""

    reshard_after_forward: bool | Literal["auto"] = setting(
        "auto",
        "free a layer's gathered parameters after its forward pass; false saves one all-gather but uses more memory; auto: true, except on "
        "a single GPU, which keeps them for all micro-batches of a step",
    )
    reduce_each_micro_batch: bool | Literal["auto"] = setting(
        "auto",
        "reduce gradients after every micro-batch: less memory, more communication; auto: if unsharded gradients would not fit",
    )
    allow_unverified_family: bool = setting(False, "run a model family for which packed attention could not be verified")
