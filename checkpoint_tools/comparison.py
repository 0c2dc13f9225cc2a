"""Are two checkpoints equal, and is one whole: tensor by tensor, streamed. Imports torch where numbers differ alone."""

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..engine.checkpoint.hf_folder import natural
from ..engine.checkpoint.manifest import Manifest
from ..engine.checkpoint.retention import find_checkpoint
from ..engine.checkpoint.safetensors_io import BLOCK_BYTES, ITEMSIZE, CheckedFile
from ..engine.checkpoint.tensor_slices import TensorSlice
from ..engine.checkpoint.thread_pool import in_parallel
from ..engine.errors import CheckpointError
from .sources import CheckpointSource, Source, is_hf_folder, open_source
from .streaming import BlockBuffer, Progress, blocks_of


@dataclass(kw_only=True)
class Comparison:
    """How two sets of tensors differ.

    Args:
        equal: names of tensors whose bytes are the same.
        only_first: names that the first alone has.
        only_second: names that the second alone has.
        different: name -> in what.
        largest: the largest difference between two numbers.
    """

    equal: list[str] = field(default_factory=list)
    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    different: dict[str, str] = field(default_factory=dict)
    largest: float = 0.0

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not (self.only_first or self.only_second or self.different)


def compare(
    first: Path | str, second: Path | str, *, workers: int | None = None, progress: Progress | None = None
) -> Comparison:
    """Compare checkpoints, of any engine and layout, or Hugging Face folders: each with each.

    Two checkpoints are compared with their moments, else values alone.

    Args:
        first: folder or URL.
        second: folder or URL.
        workers: threads; None for one for each core, 8 at most.
        progress: called with the bytes of each block.

    Raises:
        CheckpointError: one of them cannot be read.
    """
    result = Comparison()
    sources = list(_sources(first, second))
    for suffix, a, b in sources:
        result.only_first += [n + suffix for n in sorted(set(a.entries) - set(b.entries), key=natural)]
        result.only_second += [n + suffix for n in sorted(set(b.entries) - set(a.entries), key=natural)]
        _compare(a, b, suffix, result, workers or _cores(), progress)
    return result


def _sources(first: Path | str, second: Path | str) -> Iterator[tuple[str, Source, Source]]:
    if is_hf_folder(first) or is_hf_folder(second):
        yield "", open_source(first), open_source(second)
        return
    a, b = find_checkpoint(first), find_checkpoint(second)
    for kind in dict.fromkeys([*_kinds(a), *_kinds(b)]):
        yield "" if kind == "value" else f" ({kind})", CheckpointSource(a, kind), CheckpointSource(b, kind)


def _kinds(manifest: Manifest) -> list[str]:
    return list(dict.fromkeys(kind for entry in manifest.data["tensors"].values() for kind in entry["kinds"]))


def _compare(a: Source, b: Source, suffix: str, result: Comparison, workers: int, progress: Progress | None) -> None:
    own = threading.local()

    def one(name: str, part: TensorSlice) -> tuple[int, float]:
        """Elements that differ in a block, and the largest difference."""
        if not hasattr(own, "rooms"):
            own.rooms = BlockBuffer(), BlockBuffer()
        kinds = a.entries[name][0], b.entries[name][0]
        found = [room.take("", kind, part.length) for room, kind in zip(own.rooms, kinds, strict=True)]
        for source, out in zip((a, b), found, strict=True):
            source.read(name, part, out)
        if progress is not None:
            progress(found[0].nbytes)
        if kinds[0] == kinds[1] and np.array_equal(*found):
            return 0, 0.0
        return _difference(found, kinds)

    parts: list[tuple[str, TensorSlice]] = []
    for name in sorted(set(a.entries) & set(b.entries), key=natural):
        (kind_a, shape_a), (kind_b, shape_b) = a.entries[name], b.entries[name]
        if shape_a != shape_b:
            result.different[name + suffix] = f"shape {list(shape_a)} and {list(shape_b)}"
            continue
        larger = max(kind_a, kind_b, key=ITEMSIZE.__getitem__)
        parts += [(name, part) for part, _ in blocks_of((larger, shape_a))]
    found: dict[str, tuple[int, float]] = dict.fromkeys(set(a.entries) & set(b.entries), (0, 0.0))
    for (name, _), (count, off) in zip(
        parts, in_parallel(workers, (partial(one, name, part) for name, part in parts)), strict=True
    ):
        found[name] = (found[name][0] + count, max(found[name][1], off))
    for name, (count, off) in sorted(found.items(), key=lambda item: natural(item[0])):
        (kind_a, shape), (kind_b, _) = a.entries[name], b.entries[name]
        result.largest = max(result.largest, off)
        if name + suffix in result.different:
            continue
        if kind_a != kind_b:
            apart = f"at most {off:.3g} apart" if off else "the same values"
            result.different[name + suffix] = f"{kind_a} and {kind_b}, {apart}"
        elif count:
            size = int(np.prod(shape, dtype=np.int64))
            result.different[name + suffix] = f"{count} of {size} numbers, at most {off:.3g} apart"
        else:
            result.equal.append(name + suffix)


def _difference(found: list[Any], kinds: tuple[str, str]) -> tuple[int, float]:
    from ..engine.checkpoint.local_shards import as_tensor

    x, y = (as_tensor(f, k).double() for f, k in zip(found, kinds, strict=True))
    off = (x - y).abs()
    # Equal infinities, and NaN on both sides, are no difference; NaN on one side is an infinite one.
    off = off.masked_fill((x == y) | (x.isnan() & y.isnan()), 0.0).nan_to_num(nan=float("inf"), posinf=float("inf"))
    bits = int(np.count_nonzero(found[0] != found[1])) if kinds[0] == kinds[1] else int((off > 0).sum())
    return bits, float(off.max())


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What was checked of one checkpoint.

    Args:
        where: it lies.
        tensors: number of tensors, each kind counted.
        bytes: read and compared with their checksums; 0 where there are none to compare with.
    """

    where: str
    tensors: int
    bytes: int


def verify(where: Path | str, *, workers: int | None = None, progress: Progress | None = None) -> Verified:
    """Read all of a checkpoint: every byte of every file against its checksum, and that the boxes cover each tensor exactly once. A Hugging Face folder has
    no checksums: its files are looked at for being whole.

    Args:
        where: folder or URL.
        workers: threads; None for one for each core, 8 at most.
        progress: called with the bytes of each block.

    Raises:
        CheckpointError: what is wrong with it.
    """
    source = open_source(where)
    if not isinstance(source, CheckpointSource):
        return Verified(where=source.label, tensors=len(source.entries), bytes=0)
    manifest = source.manifest
    # Boxes first, without a look at their numbers; then every byte of every file.
    sources = [CheckpointSource(manifest, kind) for kind in _kinds(manifest)]
    if not any(s.entries for s in sources):
        raise CheckpointError(f"{source.label} holds no tensors")
    files = {
        name: CheckedFile(manifest.store, name, entry["bytes"], entry["xxh3"])
        for name, entry in manifest.data["files"].items()
    }
    own = threading.local()

    def one(file: CheckedFile, start: int) -> int:
        if not hasattr(own, "room"):
            own.room = BlockBuffer()
        out = own.room.take("", "U8", (min(BLOCK_BYTES, file.size - start),))
        file.read_into(start, memoryview(out))
        if progress is not None:
            progress(out.nbytes)
        return int(out.nbytes)

    blocks = (partial(one, file, start) for file in files.values() for start in range(0, file.size, BLOCK_BYTES))
    total = sum(in_parallel(workers or _cores(), blocks))
    return Verified(where=source.label, tensors=sum(len(s.entries) for s in sources), bytes=total)


def _cores() -> int:
    return min(8, len(os.sched_getaffinity(0)))
