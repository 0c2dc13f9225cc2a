"""The axes of rotary embeddings on several position axes (M-RoPE, arXiv:2409.12191).

A section is the number of frequencies that belong to an axis: time, height, width.
"""

from collections.abc import Sequence


def in_sections(sections: Sequence[int]) -> tuple[int, ...]:
    """Return the axis of each frequency if the frequencies of an axis are adjacent."""
    return tuple(axis for axis, count in enumerate(sections) for _ in range(count))


def interleaved(sections: Sequence[int]) -> tuple[int, ...]:
    """Return the axis of each frequency if axes alternate until the sections of height and width are used up (Qwen 3 VL)."""
    axes, count = len(sections), sum(sections)
    # What is left when the sections of height and width are used up belongs to time.
    return tuple(i % axes if i < axes * sections[i % axes] else 0 for i in range(count))
