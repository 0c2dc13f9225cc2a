"""Counting of the points at which the host waits for the device.

A GPU computes while the host prepares what comes next. Whatever the host reads from the device makes it wait until the device has caught
up, and then the device waits for new work. A step of an engine has these, whatever the size of the model:

- for each micro-batch, the number of tokens whose outputs the loss needs (`nonzero` in `rank_slice.py`), because it is a size;
- for each micro-batch and each output of a linear loss, whether the gradient is the one that the head has computed already
  (`equal` in `ops/linear_head.py`), because the other way is to compute its logits again;
- once, the sums of the loss and its metrics (`_local_scalar_dense` or a copy in `step.py`);
- once, the norm of the gradient, which decides whether the step is taken.

Mixtures whose experts are on other ranks wait in every layer too, for how many tokens go where; and AdamW's moments on the host are waited
for at the end of a step.
"""

import traceback
from collections import Counter
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_WAITING = frozenset({"_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "unique_dim", "is_nonzero"})
"""Operators whose result the host needs, or whose result's size depends on data."""
_COPIES = frozenset({"_to_copy", "copy_"})


class HostSyncs(TorchDispatchMode):
    """Counts the operators inside a `with` block for which the host waits for the device.

    Without a GPU it sees the operators whose result goes to the host by nature, but no copies.

    Args:
        device_type: The type of the device; operators on other tensors do not count.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type
        self.places: Counter[str] = Counter()
        """How often each operator waited, by operator and line of code."""

    @property
    def count(self) -> int:
        """How often the host waited."""
        return self.places.total()

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        # The last tensor is what is read: `copy_` has its target first.
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        source = tensors[-1] if tensors else None
        to_host = name in _COPIES and out.device.type == "cpu" != self._device_type
        if source is not None and source.device.type == self._device_type and (name in _WAITING or to_host):
            self.places[f"{name} in {_place()}"] += 1
        return out


def _place() -> str:
    """Return the innermost line of code outside of torch."""
    for frame in reversed(traceback.extract_stack()):
        # Without CUDA each call inside megatron passes through its stand-in.
        if "/torch/" not in frame.filename and frame.filename != __file__ and not frame.filename.endswith("mcore/cpu.py"):
            return "/".join(frame.filename.split("/")[-2:]) + f":{frame.lineno}"
    return "torch"
