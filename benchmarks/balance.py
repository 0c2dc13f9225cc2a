"""Imbalance of data-parallel shards on lognormal lengths: our algorithm against sorted greedy assignment.

    python -m benchmarks.balance

Imbalance is the maximum cost of a rank divided by the mean, minus one; reported are the median and the worst of 50 batches.
"""

import heapq
import json
import statistics
from collections.abc import Sequence

import numpy as np

from drivetrain.engine.packing.microbatch import attention_ratio, balance, cost

BATCHES = 50


def lengths(count: int, seed: int) -> list[int]:
    """Return lognormal lengths like those of chats: median 400, clipped to 16..16384."""
    values = np.random.default_rng(seed).lognormal(np.log(400), 1.0, count)
    return np.clip(values, 16, 16384).astype(int).tolist()


def sorted_greedy(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Assign sequences in descending order of cost, each to the rank with the lowest load (Graham 1969)."""
    heap = [(0.0, p) for p in range(parts)]
    shares: list[list[int]] = [[] for _ in range(parts)]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, part = heapq.heappop(heap)
        shares[part].append(i)
        heapq.heappush(heap, (load + costs[i], part))
    return shares


def imbalance(costs: Sequence[float], shares: Sequence[Sequence[int]]) -> float:
    """Return the maximum load divided by the mean load, minus one."""
    loads = [sum(costs[i] for i in share) for share in shares]
    return max(loads) / (sum(loads) / len(loads)) - 1


def main() -> None:
    """Print one line of JSON for each setting."""
    ratio = attention_ratio(2048)
    for samples, ranks in ((64, 8), (256, 8), (256, 32), (1024, 64)):
        ours, greedy = [], []
        for seed in range(BATCHES):
            sizes = lengths(samples, seed)
            costs = [cost(n, ratio) for n in sizes]
            ours.append(imbalance(costs, balance(sizes, ranks, ratio=ratio)))
            greedy.append(imbalance(costs, sorted_greedy(costs, ranks)))
        row: dict[str, object] = {"case": f"{samples} samples on {ranks} ranks"}
        for name, values in (("ours", ours), ("sorted_greedy", greedy)):
            row |= {f"{name}_median": f"{statistics.median(values):.2e}", f"{name}_worst": f"{max(values):.2e}"}
        print(json.dumps(row))


if __name__ == "__main__":
    main()
