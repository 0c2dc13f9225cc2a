"""Blocks of host memory: no piece overlaps another one, and little is wasted."""

import itertools
import random

import pytest
import torch

from drivetrain.engine import pinned
from drivetrain.engine.pinned import empty_together, place


@pytest.mark.parametrize("sizes", [[], [0], [1], [0, 0, 7], [1023, 1025, 1], [2**20], [3000] * 50])
def test_pieces_do_not_overlap(sizes: list[int]) -> None:
    places, blocks = place(sizes, 4096)
    taken: dict[int, list[tuple[int, int]]] = {}
    for size, (block, start) in zip(sizes, places, strict=True):
        assert start % 512 == 0
        assert start + size <= blocks[block]
        taken.setdefault(block, []).append((start, start + size))
    for ranges in taken.values():
        # Empty pieces have no place of their own.
        ranges = sorted(r for r in ranges if r[0] < r[1])
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
    assert all(size & (size - 1) == 0 for size in blocks)


def test_little_is_wasted() -> None:
    # The moments of Qwen3 4B on one rank, where each tensor alone would be rounded up by 43% in all.
    layer = [2560 * n for n in (4096, 1024, 1024, 4096, 9728, 9728, 9728)] + [2560, 2560, 128, 128]
    sizes = [4 * n for n in [151936 * 2560, *layer * 36, 2560] for _ in range(2)]
    alone = sum(1 << max(size - 1, 0).bit_length() for size in sizes)
    assert alone > 1.4 * sum(sizes)
    _, blocks = place(sizes, pinned.BLOCK_BYTES)
    assert sum(blocks) < 1.06 * sum(sizes)


def test_tensors_are_as_their_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "BLOCK_BYTES", 4096)
    choice = random.Random(0)
    likes = [
        torch.zeros(
            [choice.randrange(20) for _ in range(choice.randrange(4))],
            dtype=choice.choice((torch.float32, torch.bfloat16, torch.uint8)),
        )
        for _ in range(40)
    ]
    tensors = empty_together(likes, pinned=False)
    for number, (like, tensor) in enumerate(zip(likes, tensors, strict=True)):
        assert (like.shape, like.dtype) == (tensor.shape, tensor.dtype)
        assert tensor.is_contiguous()
        tensor.fill_(number)
    assert all((tensor == number).all() for number, tensor in enumerate(tensors))
