"""Roles that give and take weights over a communicator, and what can go wrong between them; importable by the processes of a group."""

import gc
import hashlib
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from drivetrain.workers.process import param_broadcast
from drivetrain.workers.process.pool_communicator import Broadcast, PoolCommunicator
from drivetrain.workers.roles.dispatch import register
from helpers.supervised import die


@dataclass(frozen=True, kw_only=True)
class Nothing:
    """No settings."""


def tensors(seed: int) -> list[tuple[str, torch.Tensor]]:
    """Return tensors of all kinds: several in a bucket of 4096 bytes, one that is larger, odd sizes, none, and extreme values."""
    numbers = torch.Generator().manual_seed(seed)
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 65504.0], dtype=torch.float16)
    return [
        ("a", torch.randn(3, 5, generator=numbers)),
        ("half", odd + seed),
        ("empty", torch.empty(0, 4)),
        ("scalar", torch.tensor(seed, dtype=torch.int64)),
        ("extreme", torch.tensor([-(2**31), 2**31 - 1, -100], dtype=torch.int32)),
        ("large", torch.randn(70, 30, generator=numbers)),
        ("brain", torch.randn(33, generator=numbers).to(torch.bfloat16)),
        ("transposed", torch.randn(40, 20, generator=numbers).t()),
        ("last", torch.randn(1000, generator=numbers)),
    ]


def digest_of(pairs: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return the digest of names, types, shapes and bytes."""
    hasher = hashlib.sha256()
    for name, tensor in pairs:
        hasher.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        hasher.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


class Party:
    """What both sides have: something that goes wrong in this process next time, and its communicators."""

    def __init__(self, config: Nothing) -> None:
        self.trouble, self.seed = "", 0
        self.loaded: list[tuple[str, torch.Tensor]] = []
        param_broadcast.BUCKET_BYTES = 4096

    @register("all")
    def set_trouble(self, trouble: str, rank: int, seed: int = 0) -> None:
        self.seed = seed
        self.trouble = trouble if dist.get_rank() == rank else ""
        if self.trouble in ("damages", "has no room", "dies", "is late"):
            PoolCommunicator.broadcast = _troubled(self.trouble)  # type: ignore[method-assign]

    @register("all")
    def communicators(self) -> list[str]:
        return sorted(
            found.id for found in gc.get_objects() if isinstance(found, PoolCommunicator) and found._group is not None
        )


_broadcast = PoolCommunicator.broadcast


def _troubled(trouble: str) -> Any:
    calls = 0

    def broadcast(self: PoolCommunicator, data: torch.Tensor) -> Broadcast:
        nonlocal calls
        calls += 1
        if calls == 2:
            PoolCommunicator.broadcast = _broadcast  # type: ignore[method-assign]
            if trouble == "damages":
                data[5] ^= 1
            elif trouble == "dies":
                die(None)
            elif trouble == "is late":
                time.sleep(600)
            else:
                raise MemoryError("no room for a bucket")
        return _broadcast(self, data)

    return broadcast


class Giver(Party):
    """Gives the tensors of its seed, whose ranks gather each of them together."""

    @contextmanager
    def weights(self) -> Iterator[Any]:
        if self.trouble == "gives nothing":
            raise RuntimeError("there are no weights")
        yield self._stream()

    def _stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        for i, (name, tensor) in enumerate(tensors(self.seed)):
            dist.all_reduce(torch.ones(1))  # as an engine gathers a tensor
            if i == 6 and self.trouble == "gives too little":
                raise RuntimeError("no more weights")
            yield name, tensor


class Taker(Party):
    """Keeps what it takes."""

    @register("all")
    def end(self) -> None:
        die(None)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.loaded = []
        for name, tensor in weights:
            if name == "scalar" and self.trouble == "takes not":
                raise ValueError("scalar is not wanted")
            self.loaded.append((name, tensor.clone()))

    @register("all")
    def digests(self) -> list[str]:
        """Return the digest of what each process has."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, digest_of(self.loaded))
        return found
