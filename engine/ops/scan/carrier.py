"""The interface to the source and the destination of states of scans and convolutions."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from torch import Tensor
from torch.distributed import ProcessGroup

from .segments import Segments

Scan = Callable[[Sequence[Any], Segments, Tensor | None], tuple[Tensor, Tensor]]
"""A function of tensors of tokens, `[T, ...]` each or None, their segments, and the states before these, `[N, ...]` or None for zeros.
Returns the outputs `[T, ...]` and the states after the segments."""

StateKind = Literal["convolution", "scan"]
"""The kinds of states of a layer."""


class StateCarrier(Protocol):
    """The tokens of one call of a layer, and the states before them."""

    cp_group: ProcessGroup | None
    """The ranks that share the tokens; None if there is only one."""
    handle: Tensor
    """The handle by which compiled code refers to a packed sequence; see `PackedContext`."""

    def carry(self, kind: StateKind, scan: Scan, inputs: Sequence[Tensor | None]) -> Tensor:
        """Return the outputs `[T, ...]` of a scan over all tokens.

        Args:
            kind: The kind of state that the scan carries.
            scan: The scan.
            inputs: The tensors of tokens, `[T, ...]` each, or None.
        """
        ...
