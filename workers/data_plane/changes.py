"""Incremental transfers of tensors: the sending process encodes the changes since the last transfer, and the receiving ones apply them.

Both sides keep the last transferred tensors in host memory. A tensor is sent in pieces under derived names: only its name if no byte has
changed, the positions and new values of its elements if few have changed, and otherwise the entire tensor.

Axes: C changed elements.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...engine.errors import ModelError
from .digests import StreamDigest

WORTH = 2
"""The factor by which positions and values have to be smaller than the whole tensor."""
SAME, POSITIONS, VALUES = "@same", "@positions", "@values"
"""The suffixes of a tensor's name in the names of its pieces."""
_NOTHING = torch.empty(0, dtype=torch.uint8)
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class SentTensors:
    """The tensors that a process has sent or received last."""

    def __init__(self) -> None:
        self.digest = ""
        """The digest of all of them; empty while they are incomplete."""
        self._tensors: dict[str, Tensor] = {}

    def check(self, digest: str) -> None:
        """Check that an incremental transfer starts from these tensors.

        Raises:
            ModelError: It starts from other tensors or from none, or these are incomplete.
        """
        if digest and digest != self.digest:
            raise ModelError(
                f"only changes are sent, of tensors with the digest {digest[:12]}, but this process has {self.digest[:12] or 'none'}; sync all "
                "weights"
            )
        if not digest:
            # A complete transfer: the old tensors are freed before the new ones arrive.
            self._tensors = {}
        # Set again by the caller when the transfer has succeeded: a partial state must not be the base of the next one.
        self.digest = ""

    def pieces(self, name: str, tensor: Tensor, results: StreamDigest, *, stays: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield the pieces that a tensor is sent in, and keep it.

        Args:
            name: Its name.
            tensor: The tensor, on any device.
            results: The digest of all tensors after the transfer, to which this one is added.
            stays: Whether the tensor is in host memory that never changes, so that it need not be copied.
        """
        now = tensor.detach().to("cpu").contiguous()
        results.add(name, now)
        before = self._tensors.get(name)
        if before is None or before.shape != now.shape or before.dtype != now.dtype:
            # A tensor in host memory is not copied by `to`, and the next update changes it in place.
            self._tensors[name] = now if stays else now.clone()
            yield name, now
            return
        # Bytes are compared: a NaN is equal to itself, and -0.0 is not 0.0. NumPy compares and looks for them several times as fast as torch.
        differs = _words(before) != _words(now)
        count = int(np.count_nonzero(differs))
        if stays:
            # The memory of the previously kept tensor may be reusable.
            self._tensors[name] = now
        if not count:
            yield name + SAME, _NOTHING
        # Positions are int32, 4 bytes each.
        elif now.numel() < 2**31 and count * (4 + now.itemsize) * WORTH < now.numel() * now.itemsize:
            positions = np.flatnonzero(differs).astype(np.int32)
            if not stays:
                _words(before)[positions] = _words(now)[positions]
            yield name + POSITIONS, torch.from_numpy(positions)
            yield name + VALUES, now.view(-1)[positions]
        else:
            if not stays:
                before.copy_(now)
            yield name, now

    def tensors(self, pieces: Iterator[tuple[str, Tensor]], results: StreamDigest) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of such pieces, and keep them. Each is valid until the next one is requested.

        Args:
            pieces: The pieces in the order in which they were sent.
            results: The digest of all tensors, to which each is added.

        Raises:
            ModelError: Pieces do not fit each other or what is here.
        """
        for name, piece in pieces:
            if name.endswith(SAME):
                name = name.removesuffix(SAME)
                tensor = self._kept(name)
            elif name.endswith(POSITIONS):
                name = name.removesuffix(POSITIONS)
                tensor, positions = self._kept(name), piece.to(torch.int64)
                values_name, values = next(pieces, ("", _NOTHING))
                # Positions come from another process. torch would count a negative one from the end.
                fits = values_name == name + VALUES and values.dtype == tensor.dtype and values.shape == positions.shape
                if not fits or not bool(((positions >= 0) & (positions < tensor.numel())).all()):
                    raise ModelError(f"the changes of {name} do not fit it; sync all weights")
                tensor.view(-1)[positions] = values
            elif name.endswith(VALUES):
                raise ModelError(f"values of {name.removesuffix(VALUES)} arrived without their positions; sync all weights")
            else:
                tensor = self._tensors[name] = piece.clone()
            results.add(name, tensor)
            yield name, tensor

    def _kept(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise ModelError(f"changes of {name} arrived, but this process has no such tensor; sync all weights")
        return self._tensors[name]


def _words(tensor: Tensor) -> NDArray[Any]:
    """Return a view of the bytes of each element as one number."""
    words: NDArray[Any] = tensor.view(-1).view(_WORDS[tensor.itemsize]).numpy()
    return words
