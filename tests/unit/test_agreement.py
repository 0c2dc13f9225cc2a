"""Comparisons between ranks, here threads that share a store."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from drivetrain.workers.process import agreement
from drivetrain.workers.process.agreement import Agreement


@pytest.mark.parametrize("keys", ["a", "ab", "abc", "aab"])
def test_keys_may_be_compared_again(keys: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(agreement, "default_store", lambda: store)
    ranks = range(3)

    def compare(rank: int) -> list[list[str]]:
        part = Agreement(rank, flush_s=10.0, timeout_s=10.0)
        results = [part.compare(key, ranks, "same", "") for key in keys * 40]
        # The negative control: a difference is reported, with the texts of all ranks.
        return [*results, part.compare(keys[0], ranks, f"rank {rank % 2}", f"text {rank}")]

    with ThreadPoolExecutor(len(ranks)) as threads:
        for results in threads.map(compare, ranks):
            assert results[:-1] == [[]] * (40 * len(keys))
            assert results[-1] == ["text 0", "text 1", "text 2"]
