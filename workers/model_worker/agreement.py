"""Comparison of short values between ranks, through the store where they have met: unlike a collective, it cannot wedge."""

from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import PrefixStore, Store

from ...engine.torch_private import default_store


class Agreement:
    """One rank's part in comparisons.

    Args:
        rank: The rank in the default process group.
        flush_s: For how long to wait for ranks that were sent the same message, in seconds.
        timeout_s: For how long to wait for ranks that are at work.
    """

    def __init__(self, rank: int, flush_s: float, timeout_s: float) -> None:
        self._rank, self._flush_s, self._timeout_s = rank, flush_s, timeout_s
        self._store: Store = PrefixStore("drivetrain/agreement", default_store())
        self._stale: dict[tuple[int, ...], list[str]] = {}

    def compare(self, key: str, ranks: Sequence[int], value: str, text: str, *, long: bool = False) -> list[str]:
        """Compare a value with that of other ranks, each of which calls this with the same key.

        Args:
            key: A key that is used once.
            ranks: The ranks.
            value: What must be the same.
            text: What the others are told if it is not.
            long: Whether the others may be at work, instead of having been sent the same message.

        Returns:
            Nothing if the values are the same. Otherwise the text of every rank, or that it did not come.
        """
        store, seconds = self._store, self._timeout_s if long else self._flush_s
        if text:
            store.set(f"{key}/text/{self._rank}", text)
        store.add(f"{key}/value/{value}", 1)
        store.add(f"{key}/rank/{self._rank}", 1)
        if store.add(f"{key}/count", 1) == len(ranks):
            # The last one decides: all others have counted their values.
            same = store.add(f"{key}/value/{value}", 0) == len(ranks)
            self._decide(key, "same" if same else "differ")
            self._clean(tuple(ranks))
        try:
            store.wait([f"{key}/result"], timedelta(seconds=seconds))
        except RuntimeError:
            # A timeout, of a type that depends on the store. Whoever comes later is told so at once.
            self._decide(key, "differ")
        names = [f"{key}/{name}" for name in ("count", "decided", "result", f"value/{value}")]
        self._stale[tuple(ranks)] = [*names, *(f"{key}/rank/{rank}" for rank in ranks)]
        if store.get(f"{key}/result") == b"same":
            return []
        return [self._text(key, rank, seconds) for rank in ranks]

    def _decide(self, key: str, result: str) -> None:
        if self._store.add(f"{key}/decided", 1) == 1:
            self._store.set(f"{key}/result", result)

    def _text(self, key: str, rank: int, seconds: float) -> str:
        if not self._store.check([f"{key}/rank/{rank}"]):
            return f"rank {rank} did not come within {seconds:g} s"
        return self._store.get(f"{key}/text/{rank}").decode() if self._store.check([f"{key}/text/{rank}"]) else ""

    def _clean(self, ranks: tuple[int, ...]) -> None:
        """Delete the keys of the comparison before this one of the same ranks, which all of them have left."""
        for name in self._stale.pop(ranks, []):
            self._store.delete_key(name)
