"""Counting of the points at which the host waits for the device.

A GPU computes while the host prepares what comes next. Whatever the host reads from the device makes it wait until the device has caught
up, and then the device waits for new work. A step of an engine has these, whatever the size of the model:

- for each micro-batch, the number of tokens whose outputs the loss needs (`nonzero` in `rank_slice.py`), because it is a size;
- for each micro-batch and each output of a linear loss, whether the gradient is the one that the head has computed already
  (`equal` in `ops/linear_head.py`), because the other way is to compute its logits again;
- once, the sums of the loss and its metrics (`_local_scalar_dense` or a copy in `step.py`);
- once, the norm of the gradient, which decides whether the step is taken.

Losses over pairs check them once per micro-batch. Mixtures whose experts are on other ranks wait once in every layer and pass, for how many
tokens go where; and AdamW's moments on the host are waited for at the end of a step.
"""

import traceback
import warnings
from collections import Counter
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_WAITING = frozenset(
    {"_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "unique_dim", "is_nonzero", "bincount"}
)
"""Operators whose result the host needs, or whose result's size depends on data."""
_CUDA_WARNING = "called a synchronizing CUDA operation"
"""The warning of `torch.cuda.set_sync_debug_mode`."""


class HostSyncs:
    """Counts the operations inside a `with` block for which the host waits for the device.

    On CUDA, torch itself reports each of them (`torch.cuda.set_sync_debug_mode`), blocking copies to the device included, but not those
    of collectives. Elsewhere the operators count whose result goes to the host by nature, but no copies; meanwhile compiled layers run
    uncompiled, as the compiler would otherwise give up their code for the rest of the process.

    Args:
        device_type: The type of the device; operators on other tensors do not count.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._stack = ExitStack()
        self.places: Counter[str] = Counter()
        """How often each operation waited, by operator and line of code; on CUDA, torch does not name the operator."""

    @property
    def count(self) -> int:
        """How often the host waited."""
        return self.places.total()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            if self._device_type == "cuda":
                self._listen(stack)
            else:
                # Dynamo skips a frame under a dispatch mode, and marks its code to be skipped from then on.
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                stack.enter_context(_WaitingOperators(self._device_type, self.places))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def _listen(self, stack: ExitStack) -> None:
        """Count torch's warnings until `stack` is closed; all other warnings are shown as before."""
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("always", message=_CUDA_WARNING)
        show: Any = warnings.showwarning

        def count(message: Any, *args: Any, **kwargs: Any) -> None:
            if str(message).startswith(_CUDA_WARNING):
                self.places[f"wait in {_place()}"] += 1
            else:
                show(message, *args, **kwargs)

        warnings.showwarning = count
        stack.callback(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
        torch.cuda.set_sync_debug_mode("warn")


class _WaitingOperators(TorchDispatchMode):
    def __init__(self, device_type: str, places: Counter[str]) -> None:
        super().__init__()
        self._device_type, self._places = device_type, places

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        source = next((value for value in args if isinstance(value, torch.Tensor)), None)
        if name in _WAITING and source is not None and source.device.type == self._device_type:
            self._places[f"{name} in {_place()}"] += 1
        return out


def _place() -> str:
    """Return the innermost line of code outside of torch."""
    for frame in reversed(traceback.extract_stack()):
        # Without CUDA each call inside megatron passes through its stand-in.
        outside = "/torch/" not in frame.filename and not frame.filename.endswith(("mcore/cpu.py", "/warnings.py"))
        if outside and frame.filename != __file__:
            return "/".join(frame.filename.split("/")[-2:]) + f":{frame.lineno}"
    return "torch"
