"""Weight sync between roles: 1.2 GB in one process against plain copies, and between two pools against a bare socket; the changes of 0.6 GB in bfloat16
after an AdamW step against all weights; and only adapters of rank 16 against the merged weights of a model with 180M parameters.

    python -m benchmarks.rl_sync

Measurements alternate; the results are medians. `of_bare` is the ratio of the times, bare to ours; `of_all` is that of all weights to
changes or adapters, in bytes and seconds. The weights are normal with a standard deviation of 0.02, and each step moves every weight by
the learning rate, up or down.
"""

import json
import multiprocessing as mp
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from drivetrain.engine.checkpoint.local_shards import host_bytes
from drivetrain.engine.config import LoraConfig, ModelConfig
from drivetrain.engine.conformance.tiny import save_tiny_model
from drivetrain.generation.options import RolloutConfig
from drivetrain.workers.groups.process import ProcessWorkerGroup
from drivetrain.workers.process.role_host import RoleSpec
from drivetrain.workers.roles.dispatch import register
from drivetrain.workers.roles.generator import RolloutWorker
from drivetrain.workers.roles.reference import ReferenceWorker, ReferenceWorkerConfig

TENSORS, ELEMENTS = 150, 2 * 2**20
ROUNDS = 5


class Weights:
    """A role of 150 float32 tensors of 8 MB each."""

    def __init__(self, config: Any) -> None:
        self._tensors = {f"weight.{i}": torch.full((ELEMENTS,), float(i)) for i in range(TENSORS)}

    @contextmanager
    def weights(self) -> Iterator[Any]:
        """Stream the tensors."""
        yield iter(self._tensors.items())

    def load_weights(self, weights: Any) -> None:
        """Copy tensors into those of this role."""
        for name, tensor in weights:
            self._tensors[name].copy_(tensor)

    @register("all")
    def copy(self) -> float:
        """Copy all tensors once; return the seconds."""
        targets = [torch.empty_like(tensor).fill_(0) for tensor in self._tensors.values()]
        start = time.perf_counter()
        for target, tensor in zip(targets, self._tensors.values(), strict=True):
            target.copy_(tensor)
        return time.perf_counter() - start


class RoundedWeights(Weights):
    """A role that trains 150 tensors in float32, and streams them in bfloat16."""

    def __init__(self, config: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        self._tensors = {f"weight.{i}": 0.02 * torch.randn(ELEMENTS, generator=generator) for i in range(TENSORS)}

    @contextmanager
    def weights(self) -> Iterator[Any]:
        """Stream the tensors, rounded."""
        yield ((name, tensor.bfloat16()) for name, tensor in self._tensors.items())

    @register("all")
    def update(self, lr: float) -> None:
        """Move every weight by the learning rate, as AdamW does."""
        for tensor in self._tensors.values():
            tensor += lr * (torch.randint(0, 2, tensor.shape) * 2 - 1)


def report(case: str, ours: list[float], bare: list[float]) -> None:
    """Print the medians."""
    one, other = statistics.median(ours), statistics.median(bare)
    size = TENSORS * ELEMENTS * 4 / 1e9
    row = {"case": case, "seconds": round(one, 3), "gb_per_s": round(size / one, 2), "of_bare": round(other / one, 3)}
    print(json.dumps(row), flush=True)


def timed_sync(group: ProcessWorkerGroup) -> float:
    """Return the seconds of a transfer."""
    start = time.perf_counter()
    group.sync_weights("source", "target")
    return time.perf_counter() - start


def colocated() -> None:
    """Copy within a process."""
    roles = {name: RoleSpec(worker=Weights, config=None) for name in ("source", "target")}
    with ProcessWorkerGroup(roles, pools={"main": 1}) as group:
        timed_sync(group)
        ours, bare = [], []
        for _ in range(ROUNDS):
            bare.append(group["source"].copy())
            ours.append(timed_sync(group))
    report("sync in one process", ours, bare)


def between_pools() -> None:
    """Copy between two processes, and send as much through a socket."""
    roles = {name: RoleSpec(worker=Weights, config=None, pool=name) for name in ("source", "target")}
    with tempfile.TemporaryDirectory() as folder, ProcessWorkerGroup(roles, pools={"source": 1, "target": 1}) as group:
        timed_sync(group)
        ours, bare = [], []
        for i in range(ROUNDS):
            bare.append(through_a_socket(f"{folder}/{i}"))
            ours.append(timed_sync(group))
    report("sync between pools", ours, bare)


def changes() -> None:
    """Copy only the changes between two processes, and all weights."""
    roles = {name: RoleSpec(worker=RoundedWeights, config=None, pool=name) for name in ("source", "target")}
    with ProcessWorkerGroup(roles, pools={"source": 1, "target": 1}) as group:
        group.sync_weights("source", "target", changes=True)
        for lr in (1e-6, 1e-5):
            all_s, changes_s, sent, whole = [], [], [], 0
            for _ in range(ROUNDS):
                group["source"].update(lr)
                all_s.append(timed_sync(group))
                start = time.perf_counter()
                receipt = group.sync_weights("source", "target", changes=True)
                changes_s.append(time.perf_counter() - start)
                sent.append(receipt.sent_bytes)
                whole = receipt.bytes
            one, other = statistics.median(changes_s), statistics.median(all_s)
            row = {
                "case": f"changes after a step with lr={lr:g}, bfloat16",
                "mb_sent": round(statistics.median(sent) / 1e6, 1),
                "mb_all": round(whole / 1e6, 1),
                "bytes_of_all": round(whole / statistics.median(sent), 1),
                "seconds": round(one, 3),
                "seconds_of_all": round(other / one, 2),
            }
            print(json.dumps(row), flush=True)


def adapters() -> None:
    """Send only the adapters between two processes, and the merged weights."""
    sizes: dict[str, Any] = {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
    }
    with tempfile.TemporaryDirectory() as root:
        folder = save_tiny_model(Path(root) / "model", "qwen3", **sizes, num_key_value_heads=8, head_dim=64, vocab_size=32000)
        model = ModelConfig(path=str(folder), lora=LoraConfig(rank=16))
        roles = {
            "source": RoleSpec(worker=ReferenceWorker, config=ReferenceWorkerConfig(model=model)),
            "target": RoleSpec(worker=RolloutWorker, config=RolloutConfig(model=model, dtype="bfloat16"), pool="target"),
        }
        with ProcessWorkerGroup(roles, pools={"main": 1, "target": 1}) as group:
            seconds: dict[bool, list[float]] = {False: [], True: []}
            sent = {False: 0, True: 0}
            for round_number in range(ROUNDS + 1):
                for alone, times in seconds.items():
                    start = time.perf_counter()
                    # Sync twice, so that adapters replace earlier adapters, as in a run.
                    receipt = group.sync_weights("source", "target", adapters=alone)
                    if alone:
                        start = time.perf_counter()
                        receipt = group.sync_weights("source", "target", adapters=True)
                    if round_number:
                        times.append(time.perf_counter() - start)
                    sent[alone] = receipt.sent_bytes
    one, other = (statistics.median(seconds[alone]) for alone in (True, False))
    row = {
        "case": "adapters alone, bfloat16",
        "mb_sent": round(sent[True] / 1e6, 1),
        "mb_all": round(sent[False] / 1e6, 1),
        "bytes_of_all": round(sent[False] / sent[True], 1),
        "seconds": round(one, 3),
        "seconds_of_all": round(other / one, 2),
    }
    print(json.dumps(row), flush=True)


def through_a_socket(path: str) -> float:
    """Send as many bytes to another process; return the seconds until it has them."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(1)
    receiver = mp.get_context("fork").Process(target=_receive, args=(path,))
    receiver.start()
    connection, _ = listener.accept()
    tensors = [torch.zeros(ELEMENTS) for _ in range(8)]
    connection.recv(1)
    start = time.perf_counter()
    for i in range(TENSORS):
        connection.sendall(host_bytes(tensors[i % 8]))
    connection.recv(1)
    seconds = time.perf_counter() - start
    receiver.join()
    return seconds


def _receive(path: str) -> None:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    targets = [host_bytes(torch.ones(ELEMENTS)) for _ in range(8)]
    connection.sendall(b"r")
    for i in range(TENSORS):
        view = targets[i % 8]
        while view:
            view = view[connection.recv_into(view) :]
    connection.sendall(b"d")
    os._exit(0)


if __name__ == "__main__":
    colocated()
    between_pools()
    changes()
    adapters()
