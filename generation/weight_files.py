"""New weights for generators that read them from files."""

from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

SHARD_BYTES = 4 * 2**30
"""The size from which on a file is complete, in bytes."""


def write_weights(folder: Path, weights: Iterable[tuple[str, Tensor]]) -> list[Path]:
    """Write tensors to safetensors files of limited size, as they arrive; return the files.

    Args:
        folder: An existing folder.
        weights: The tensors, by name.
    """
    files: list[Path] = []
    batch: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        # A copy: safetensors refuses tensors that share memory, as tied or sliced weights do, and the source may free
        # its own.
        batch[name] = tensor.detach().cpu().contiguous().clone()
        size += batch[name].nbytes
        if size >= SHARD_BYTES:
            files.append(_write(folder, len(files), batch))
            batch, size = {}, 0
    if batch:
        files.append(_write(folder, len(files), batch))
    return files


def _write(folder: Path, number: int, batch: dict[str, Tensor]) -> Path:
    file = folder / f"weights-{number:05}.safetensors"
    save_file(batch, file)
    return file
