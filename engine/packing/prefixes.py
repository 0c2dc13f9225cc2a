"""Families of documents with a common prefix; see `sharing`."""

from collections.abc import Sequence
from dataclasses import dataclass

LONGEST_RUN = 1024
"""The maximum number of documents that share a parent. A larger family has several parents, which costs next to nothing."""


@dataclass(frozen=True, kw_only=True)
class Prefixes:
    """The families of a batch's documents.

    Args:
        families: The family of each document; -1 for one that shares nothing.
        parents: The number of tokens of each family's parent.
    """

    families: tuple[int, ...]
    parents: tuple[int, ...]

    @classmethod
    def of_prompts(cls, prompts: Sequence[int], lengths: Sequence[int]) -> "Prefixes":
        """Return the families of completions of prompts.

        Args:
            prompts: The number of each completion's prompt.
            lengths: The number of tokens in each completion's prompt.
        """
        numbers = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
        tokens = dict(zip(prompts, lengths, strict=True))
        return cls(
            families=tuple(numbers[prompt] for prompt in prompts),
            # The last token of the prompt belongs to the completions.
            parents=tuple(max(0, tokens[prompt] - 1) for prompt in numbers),
        )

    @classmethod
    def join(cls, parts: Sequence["Prefixes"]) -> "Prefixes":
        """Return the families of several batches, one after the other, which share no families."""
        families: list[int] = []
        parents: list[int] = []
        for part in parts:
            families += [family if family < 0 else family + len(parents) for family in part.families]
            parents += part.parents
        return cls(families=tuple(families), parents=tuple(parents))

    def saved(self) -> int:
        """Return the number of tokens that sharing saves, if no family is cut."""
        counts = [0] * len(self.parents)
        for family in self.families:
            if family >= 0:
                counts[family] += 1
        return sum((count - 1) * parent for count, parent in zip(counts, self.parents, strict=True))

    def select(self, sequences: Sequence[int]) -> "Prefixes":
        """Return the families of some documents, in the given order."""
        return Prefixes(families=tuple(self.families[i] for i in sequences), parents=self.parents)


def best_runs(shared: Sequence[int]) -> list[tuple[int, int, int]]:
    """Cut a sorted list of documents into the runs that save the most tokens.

    Args:
        shared: The length of the common prefix of each document and the next one.

    Returns:
        The first document, the end, and the number of tokens in the parent, for each run that saves tokens.
    """
    # Dynamic programming over the sorted list: `best[n]` is the most tokens that runs among the first n documents
    # save, and `cut[n]` is the first document of the last of these runs.
    best, cut = [0] * (len(shared) + 2), [0] * (len(shared) + 2)
    for end in range(1, len(shared) + 2):
        # Only the last document, or a run of several that ends with it.
        best[end], cut[end] = best[end - 1], end - 1
        # Above any length: a minimum over the run follows. The parent has one token less than the documents share,
        # because the last shared token belongs to the children.
        parent = 1 << 62
        for first in range(end - 2, max(-1, end - 1 - LONGEST_RUN), -1):
            parent = min(parent, shared[first] - 1)
            if parent < 1:
                break
            saved = best[first] + (end - first - 1) * parent
            if saved > best[end]:
                best[end], cut[end] = saved, first
    runs = []
    end = len(shared) + 1
    # Follow the cuts back from the end. A run of one document saves nothing and is left out.
    while end > 0:
        first = cut[end]
        if end - first > 1:
            runs.append((first, end, min(shared[first : end - 1]) - 1))
        end = first
    return runs[::-1]
