"""Comparison of short values between ranks through the rendezvous store, which cannot deadlock like a collective."""

import time
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import PrefixStore, Store

from ...engine import progress
from ...engine.torch_private import default_store

# A wait of the store cannot be interrupted, so long waits are divided into slices, between which progress is reported.
_SLICE_S = 2.0


class Agreement:
    """One rank's part in comparisons.

    Args:
        rank: The rank in the default process group.
        flush_s: The time limit for ranks that received the same message, in seconds.
        timeout_s: The time limit for ranks that are computing, in seconds.
        name: Distinguishes the comparisons of successive workers in one process.
    """

    def __init__(self, rank: int, flush_s: float, timeout_s: float, name: str = "") -> None:
        self._rank, self._flush_s, self._timeout_s = rank, flush_s, timeout_s
        self._store: Store = PrefixStore(f"drivetrain/agreement/{name}", default_store())
        self._shared: dict[tuple[int, ...], list[str]] = {}
        self._own: dict[tuple[int, ...], tuple[list[str], list[str]]] = {}
        self._last: dict[tuple[int, ...], tuple[str, ...]] = {}

    def compare(self, key: str, ranks: Sequence[int], value: str, text: str, *, long: bool = False) -> list[str]:
        """Compare a value with that of other ranks, which all call this with the same key.

        Args:
            key: The name of the comparison. These ranks may compare under the same key again.
            ranks: The ranks.
            value: The value that must be equal.
            text: This rank's error message if the values differ.
            long: Whether the others may be computing, rather than having received the same message.

        Returns:
            An empty list if the values are equal. Otherwise the text of every rank, or that it did not arrive.
        """
        store, members = self._store, tuple(ranks)
        # The counters of the last comparison may still be in the store, and those of the one before are deleted by each rank
        # as it enters this one, when others may have counted already. So three comparisons in a row have different keys.
        last = self._last.get(members, ())
        while key in last:
            key += "/again"
        self._last[members] = (*last[-1:], key)
        # All ranks have finished the comparison before the last one, because they have reached the last one.
        before_last, self._own[members] = self._own.get(members, ([], []))[0], (self._own.get(members, ([], []))[1], [])
        for name in before_last:
            store.delete_key(name)
        if text:
            store.set(f"{key}/text/{self._rank}", text)
        # The value is counted before the rank, so that the rank that completes the count sees the values of all.
        store.add(f"{key}/value/{value}", 1)
        store.add(f"{key}/rank/{self._rank}", 1)
        if store.add(f"{key}/count", 1) == len(ranks):
            # The last rank decides: all others have already counted their values.
            same = store.add(f"{key}/value/{value}", 0) == len(ranks)
            self._decide(key, "same" if same else "differ")
            # All ranks have left the comparison before this one.
            for name in self._shared.pop(members, []):
                store.delete_key(name)
        seconds = self._timeout_s if long else self._flush_s
        self._wait(key, seconds, working=long)
        self._shared[members] = [f"{key}/{name}" for name in ("count", "decided", "result", *(f"rank/{r}" for r in ranks))]
        self._own[members][1].extend([f"{key}/value/{value}", f"{key}/text/{self._rank}"])
        if store.get(f"{key}/result") == b"same":
            return []
        return [self._text(key, rank, seconds) for rank in ranks]

    def _wait(self, key: str, seconds: float, *, working: bool) -> None:
        deadline = time.monotonic() + seconds
        while True:
            left = deadline - time.monotonic()
            try:
                self._store.wait([f"{key}/result"], timedelta(seconds=max(min(left, _SLICE_S), 0.01)))
                return
            except RuntimeError:
                # A timeout, of a type that depends on the store; without a store, the next call fails too.
                if left <= _SLICE_S:
                    # Ranks that arrive later get the result immediately.
                    self._decide(key, "differ")
                    return
            if working:
                # Waiting for a rank that computes is progress; that rank has its own watchdog.
                progress.advance()

    def _decide(self, key: str, result: str) -> None:
        # A rank whose time is over and the last rank to arrive may decide at the same moment. `add` is atomic, so there
        # is one result.
        if self._store.add(f"{key}/decided", 1) == 1:
            self._store.set(f"{key}/result", result)

    def _text(self, key: str, rank: int, seconds: float) -> str:
        if not self._store.check([f"{key}/rank/{rank}"]):
            return f"rank {rank} did not join within {seconds:g} s"
        return self._store.get(f"{key}/text/{rank}").decode() if self._store.check([f"{key}/text/{rank}"]) else ""
