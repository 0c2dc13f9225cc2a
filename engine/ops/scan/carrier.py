"""Where the states of scans and convolutions come from and go to."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from torch import Tensor
from torch.distributed import ProcessGroup

from .segments import Segments

Scan = Callable[[Sequence[Any], Segments, Tensor | None], tuple[Tensor, Tensor]]
"""Takes tensors of tokens, `[T, ...]` each, or None, their segments and the states before these, `[N, ...]` or None for zeros; returns
the outputs `[T, ...]` and the states after the segments."""

StateKind = Literal["convolution", "scan"]
"""The states of a layer."""


class StateCarrier(Protocol):
    """The tokens of one call of a layer, and the states before them."""

    cp_group: ProcessGroup | None
    """The ranks that share the tokens; None if there is only one."""
    handle: Tensor
    """What compiled code refers to a packed sequence by; see `PackedContext`."""

    def carry(self, kind: StateKind, scan: Scan, inputs: Sequence[Tensor | None]) -> Tensor:
        """Return the outputs `[T, ...]` of a scan over all tokens.

        Args:
            kind: Which of the layer's states the scan has.
            scan: The scan.
            inputs: The tensors of tokens, `[T, ...]` each, or None.
        """
        ...
