"""Streaming comparison of two checkpoints tensor by tensor, and verification of one.

This module imports torch only if numbers differ.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..engine.checkpoint.hf_folder import natural
from ..engine.checkpoint.manifest import CheckpointManifest
from ..engine.checkpoint.retention import find_checkpoint
from ..engine.checkpoint.safetensors_io import BLOCK_BYTES, ITEMSIZE, CheckedFile
from ..engine.checkpoint.tensor_slices import TensorSlice
from ..engine.checkpoint.thread_pool import in_parallel
from ..engine.errors import CheckpointError
from .sources import CheckpointSource, TensorSource, is_hf_folder, open_source
from .streaming import ProgressCallback, ThreadBuffer, blocks_of


@dataclass(kw_only=True)
class CheckpointComparison:
    """The differences between two sets of tensors.

    Args:
        equal: The names of tensors whose bytes are the same.
        only_first: The names that only the first set has.
        only_second: The names that only the second set has.
        different: A mapping from the name of each tensor that differs to a description of the difference.
        largest: The largest absolute difference between two elements.
    """

    equal: list[str] = field(default_factory=list)
    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    different: dict[str, str] = field(default_factory=dict)
    largest: float = 0.0

    @property
    def same(self) -> bool:
        """Whether the two sets are identical."""
        return not (self.only_first or self.only_second or self.different)


def compare(
    first: Path | str, second: Path | str, *, workers: int | None = None, progress: ProgressCallback | None = None
) -> CheckpointComparison:
    """Compare two checkpoints from any engine and layout, two Hugging Face folders, or one of each.

    The comparison of two checkpoints includes their moments; otherwise only values are compared.

    Args:
        first: A folder or URL.
        second: A folder or URL.
        workers: The number of threads; None for one per core, at most 8.
        progress: Called with the size of each block in bytes.

    Raises:
        CheckpointError: One of the two cannot be read.
    """
    result = CheckpointComparison()
    sources = list(_sources(first, second))
    for suffix, a, b in sources:
        result.only_first += [n + suffix for n in sorted(set(a.entries) - set(b.entries), key=natural)]
        result.only_second += [n + suffix for n in sorted(set(b.entries) - set(a.entries), key=natural)]
        _compare(a, b, suffix, result, workers or _cores(), progress)
    return result


def _sources(first: Path | str, second: Path | str) -> Iterator[tuple[str, TensorSource, TensorSource]]:
    if is_hf_folder(first) or is_hf_folder(second):
        yield "", open_source(first), open_source(second)
        return
    a, b = find_checkpoint(first), find_checkpoint(second)
    for kind in dict.fromkeys([*_kinds(a), *_kinds(b)]):
        yield "" if kind == "value" else f" ({kind})", CheckpointSource(a, kind), CheckpointSource(b, kind)


def _kinds(manifest: CheckpointManifest) -> list[str]:
    return list(dict.fromkeys(kind for entry in manifest.data["tensors"].values() for kind in entry["kinds"]))


def _compare(
    a: TensorSource,
    b: TensorSource,
    suffix: str,
    result: CheckpointComparison,
    workers: int,
    progress: ProgressCallback | None,
) -> None:
    first, second = ThreadBuffer(), ThreadBuffer()

    def compare_block(name: str, part: TensorSlice) -> tuple[int, float]:
        """Return the number of elements that differ in a block, and the largest absolute difference."""
        # Two buffers for each thread, because both blocks are needed at the same time.
        kinds = a.entries[name][0], b.entries[name][0]
        arrays = [
            buffer.take("", kind, part.length) for buffer, kind in zip((first.buffer, second.buffer), kinds, strict=True)
        ]
        for source, out in zip((a, b), arrays, strict=True):
            source.read(name, part, out)
        if progress is not None:
            progress(arrays[0].nbytes)
        # Raw numbers are compared, so equal bits count as equal even where they are NaN.
        if kinds[0] == kinds[1] and np.array_equal(*arrays):
            return 0, 0.0
        return _difference(arrays, kinds)

    parts: list[tuple[str, TensorSlice]] = []
    for name in sorted(set(a.entries) & set(b.entries), key=natural):
        (kind_a, shape_a), (kind_b, shape_b) = a.entries[name], b.entries[name]
        if shape_a != shape_b:
            result.different[name + suffix] = f"shapes {list(shape_a)} and {list(shape_b)}"
            continue
        # Blocks are cut for the wider of both data types, so that neither of the two exceeds the block size.
        larger = max(kind_a, kind_b, key=ITEMSIZE.__getitem__)
        parts += [(name, part) for part, _ in blocks_of((larger, shape_a))]
    differences: dict[str, tuple[int, float]] = dict.fromkeys(set(a.entries) & set(b.entries), (0, 0.0))
    for (name, _), (count, off) in zip(
        parts, in_parallel(workers, (partial(compare_block, name, part) for name, part in parts)), strict=True
    ):
        differences[name] = (differences[name][0] + count, max(differences[name][1], off))
    for name, (count, off) in sorted(differences.items(), key=lambda item: natural(item[0])):
        (kind_a, shape), (kind_b, _) = a.entries[name], b.entries[name]
        result.largest = max(result.largest, off)
        # Their shapes differ, which has been recorded above.
        if name + suffix in result.different:
            continue
        if kind_a != kind_b:
            detail = f"largest difference {off:.3g}" if off else "the same values"
            result.different[name + suffix] = f"{kind_a} and {kind_b}, {detail}"
        elif count:
            size = int(np.prod(shape, dtype=np.int64))
            result.different[name + suffix] = f"{count} of {size} elements, largest difference {off:.3g}"
        else:
            result.equal.append(name + suffix)


def _difference(arrays: list[Any], kinds: tuple[str, str]) -> tuple[int, float]:
    from ..engine.checkpoint.local_shards import as_tensor

    x, y = (as_tensor(array, kind).double() for array, kind in zip(arrays, kinds, strict=True))
    off = (x - y).abs()
    # Equal infinities and NaN on both sides count as equal; NaN on one side counts as an infinite difference.
    off = off.masked_fill((x == y) | (x.isnan() & y.isnan()), 0.0).nan_to_num(nan=float("inf"), posinf=float("inf"))
    bits = int(np.count_nonzero(arrays[0] != arrays[1])) if kinds[0] == kinds[1] else int((off > 0).sum())
    return bits, float(off.max())


@dataclass(frozen=True, kw_only=True)
class VerificationResult:
    """The result of verifying one checkpoint.

    Args:
        where: The location of the checkpoint.
        tensors: The number of tensors, counting each kind separately.
        bytes: The number of bytes that were checked against their checksums; 0 if there are no checksums.
    """

    where: str
    tensors: int
    bytes: int


def verify(where: Path | str, *, workers: int | None = None, progress: ProgressCallback | None = None) -> VerificationResult:
    """Check every byte of a checkpoint against its checksum, and that the stored slices cover each tensor exactly once.

    A Hugging Face folder has no checksums, so its files are only checked for completeness.

    Args:
        where: A folder or URL.
        workers: The number of threads; None for one per core, at most 8.
        progress: Called with the size of each block in bytes.

    Raises:
        CheckpointError: The checkpoint is incomplete or damaged.
    """
    source = open_source(where)
    if not isinstance(source, CheckpointSource):
        return VerificationResult(where=source.label, tensors=len(source.entries), bytes=0)
    manifest = source.manifest
    # First the slices, without reading any elements; then every byte of every file.
    sources = [CheckpointSource(manifest, kind) for kind in _kinds(manifest)]
    # An empty manifest would pass every check.
    if not any(s.entries for s in sources):
        raise CheckpointError(f"{source.label} contains no tensors")
    files = {
        name: CheckedFile(manifest.store, name, entry["bytes"], entry["xxh3"])
        for name, entry in manifest.data["files"].items()
    }
    local = ThreadBuffer()

    def check_block(file: CheckedFile, start: int) -> int:
        # The last block of a file may be shorter.
        out = local.buffer.take("", "U8", (min(BLOCK_BYTES, file.size - start),))
        file.read_into(start, memoryview(out))
        if progress is not None:
            progress(out.nbytes)
        return int(out.nbytes)

    blocks = (partial(check_block, file, start) for file in files.values() for start in range(0, file.size, BLOCK_BYTES))
    total = sum(in_parallel(workers or _cores(), blocks))
    return VerificationResult(where=source.label, tensors=sum(len(s.entries) for s in sources), bytes=total)


def _cores() -> int:
    return min(8, len(os.sched_getaffinity(0)))
