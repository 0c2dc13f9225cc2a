"""The weights that a process has last sent to another pool, kept for processes that replace dead ones."""

from collections.abc import Iterator

from torch import Tensor

from ...engine.errors import ModelError


class KeptVersions:
    """The last versions of weights that were sent, in host memory."""

    def __init__(self) -> None:
        self._versions: dict[int, list[tuple[str, Tensor]]] = {}

    def keeping(self, version: int, count: int, stream: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield copies of the tensors of a stream, in host memory, and keep them once it has ended.

        Args:
            version: The version of these weights.
            count: How many versions are kept. Older ones are dropped first, so there are never more.
            stream: The tensors by name.
        """
        before = sorted(number for number in self._versions if number < version)
        self._versions = {number: self._versions[number] for number in before[max(0, len(before) - count + 1) :]}
        tensors = []
        for name, tensor in stream:
            # Copied even in host memory: the next update changes the model's tensors in place.
            tensors.append((name, tensor.detach().to("cpu", copy=True).contiguous()))
            yield tensors[-1]
        self._versions[version] = tensors

    def tensors(self, version: int | None) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a version.

        Raises:
            ModelError: It is not kept.
        """
        if version not in self._versions:
            kept = ", ".join(map(str, self._versions)) or "none"
            raise ModelError(
                f"version {version} of the weights is not kept, which was to be sent again; those that are: {kept}"
            )
        yield from self._versions[version]
