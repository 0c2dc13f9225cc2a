"""Roles that fail, die, hang and give weights, for tests of groups; importable by the processes of a group."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from drivetrain.engine import progress
from drivetrain.engine.errors import BatchError
from drivetrain.workers.data_plane import digests
from drivetrain.workers.roles.actor import ActorWorker
from drivetrain.workers.roles.dispatch import register
from helpers.supervised import die


def fails_on_nine(answers: Any) -> list[float]:
    """A reward function."""
    if any(9 in a.prompt for a in answers):
        raise ValueError("a nine")
    return [float(a.fields.get("worth", 1)) for a in answers]


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """What goes wrong, and where.

    Args:
        rank: the rank where it does; -1 is none.
        note: a file for the time of a death, or None.
        text: anything.
    """

    rank: int = 1
    note: Path | None = None
    text: str = ""


class OddError(Exception):
    """An error of a class that no controller knows."""


class Troubled:
    """A role without an engine, one rank of which fails, dies or hangs on request."""

    def __init__(self, config: Trouble) -> None:
        self.trouble = config
        self.loaded: dict[str, torch.Tensor] = {}

    @property
    def mine(self) -> bool:
        return dist.get_rank() == self.trouble.rank

    @register("all")
    def fail(self, kind: str) -> int:
        if self.mine:
            raise {"value": ValueError, "batch": BatchError, "odd": OddError, "memory": torch.OutOfMemoryError}[kind]("not me")
        return dist.get_rank()

    @register("all")
    def fail_beside_a_barrier(self) -> str:
        if self.mine:
            raise RuntimeError("not me")
        dist.barrier()
        return "met"

    @register("all")
    def die(self) -> None:
        if self.mine:
            print("this was my last output", flush=True)
            die(self.trouble.note)
        dist.barrier()

    @register("all")
    def hang(self) -> None:
        if self.mine:
            time.sleep(600)
        dist.barrier()

    @register("all")
    def stop(self) -> None:
        """As if the machine had stalled: not even the I/O thread runs."""
        if self.mine:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()

    @register("all")
    def work_slowly(self, seconds: float) -> str:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.1)
            progress.advance()
        return "done"

    @register("all")
    def echo(self, *values: Any, **options: Any) -> Any:
        return [list(values), options]

    @register("all")
    def pid(self) -> int:
        return os.getpid()

    @register("all")
    def flood(self, size: int) -> str:
        """Print more than a pipe holds."""
        print("x" * size, flush=True)
        return "flooded"

    @register("all")
    def large(self, size: int) -> str:
        return "y" * size

    @register("all")
    def write(self, text: str) -> str:
        """Print from Python and from a C library."""
        import ctypes

        print(text, flush=True)
        libc = ctypes.CDLL(None)
        libc.puts(text.encode())
        libc.fflush(None)
        return text

    @register("all")
    def leave(self) -> None:
        if self.mine:
            sys.exit(3)

    @register("all")
    def stats(self) -> dict[str, Any]:
        return {"kl": 0.1, "names": ["a"]}

    @register("all")
    def buffer(self) -> torch.Tensor:
        """A tensor that the role goes on working with."""
        if not hasattr(self, "_buffer"):
            self._buffer = torch.zeros(2**22)
        self._buffer += 1
        return self._buffer

    @register("all")
    def on_device(self) -> torch.Tensor:
        return torch.ones(1, dtype=torch.int32, device="cuda" if torch.cuda.is_available() else "cpu")

    @register("all")
    def gather(self, tag: str, ballast: torch.Tensor | None = None) -> list[Any]:
        """What all ranks were called with."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, tag)
        return found

    @register("dp", returns="rows", columns="columns")
    def score(self, batch: Any, *, columns: Any = None) -> dict[str, torch.Tensor]:
        return {"scores": torch.full((batch.num_sequences,), float(dist.get_rank()))}

    @register("all")
    def total(self) -> float:
        return float(sum(float(t.float().sum()) for t in self.loaded.values()))

    @contextmanager
    def weights(self) -> Iterator[Any]:
        yield self._some()

    def _some(self) -> Iterator[Any]:
        for i in range(20):
            if i == 5 and self.mine:
                if self.trouble.note is None:
                    raise RuntimeError("no more weights")
                die(self.trouble.note)
            yield f"weight {i}", torch.full((100,), float(i), dtype=torch.bfloat16)

    def close(self) -> None:
        if self.trouble.text == "cannot be closed":
            raise RuntimeError("it cannot be closed")

    def load_weights(self, weights: Any) -> None:
        if self.trouble.text == "reads too little":
            return
        for name, tensor in weights:
            note = self.trouble.note
            if self.trouble.text == "dies while fed" and len(self.loaded) == 5 and not (note and note.exists()):
                die(note)
            self.loaded[name] = tensor


class DiesWhileBuilt(Troubled):
    """A role of which one process is killed while it is built."""

    def initialize(self) -> None:
        if self.mine:
            die(self.trouble.note)
        dist.barrier()


class FailsWhileBuilt(Troubled):
    """A role that one process cannot build."""

    def __init__(self, config: Trouble) -> None:
        super().__init__(config)
        if self.mine:
            raise RuntimeError("not built")


class FailingActor(ActorWorker):
    """An actor whose second process runs out of memory in its forward pass, and whose groups cannot be destroyed meanwhile."""

    def initialize(self) -> "FailingActor":
        super().initialize()
        distributed: Any = dist
        distributed.destroy_process_group = lambda group=None: time.sleep(600)
        if dist.get_rank() == 1:
            engine: Any = self.engine
            engine.forward_step = self._fail
        return self

    def _fail(self, *_: Any) -> None:
        raise torch.OutOfMemoryError("planted failure")


class LateFailure(ActorWorker):
    """An actor whose update fails when the weights have changed already."""

    @register("minibatches")
    def update(self, *args: Any, **options: Any) -> Any:
        super().update(*args, **options)
        raise RuntimeError("too late")


class Carrier:
    """A role without an engine that works on batches, on all ranks of its pool or on some."""

    def __init__(self, config: Any, ranks: Any = None) -> None:
        self.ranks = ranks
        self.loaded: list[tuple[str, torch.Tensor]] = []

    @register("dp")
    def double(self, batch: Any, *, slowly: float = 0.0) -> dict[str, torch.Tensor]:
        time.sleep(slowly)
        return {"doubled": batch.token_fields["x"] * 2}

    @register("dp")
    def double_in_place(self, batch: Any) -> dict[str, torch.Tensor]:
        return {"doubled": batch.token_fields["x"].mul_(2)}

    @register("dp", returns="rows")
    def rank(self, batch: Any) -> dict[str, torch.Tensor]:
        return {"rank": torch.full((batch.num_sequences,), dist.get_rank())}

    @register("dp", returns="objects")
    def lists(self, batch: Any) -> list[list[int]]:
        return [batch.select([i]).input_ids.tolist() for i in range(batch.num_sequences)]

    @register("dp", returns="numbers")
    def count(self, batch: Any) -> dict[str, float]:
        return {"tokens": float(batch.num_tokens)}

    @register("all")
    def wait(self, seconds: float) -> float:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.05)
            progress.advance()
        return seconds

    @contextmanager
    def weights(self) -> Iterator[Any]:
        yield (
            (f"w{i}", torch.arange(5 + i, dtype=torch.bfloat16 if i % 2 else torch.float64).reshape(1, -1)) for i in range(6)
        )

    def load_weights(self, weights: Any) -> None:
        self.loaded = [(name, tensor.clone()) for name, tensor in weights]

    @register("all")
    def held(self) -> list[tuple[str, torch.Tensor]]:
        return self.loaded


def samples(count: int, seconds: float = 0.0) -> list[dict[str, Any]]:
    """A data set."""
    time.sleep(seconds)
    return Samples({"input_ids": [i] * (i % 3 + 1), "x": [float(i)] * (i % 3 + 1)} for i in range(count))


class Samples(list[Any]):
    """Samples that take their time to load."""

    def __getitem__(self, index: Any) -> Any:
        time.sleep(0.2)
        return super().__getitem__(index)


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A model's folder."""

    path: str


class OnDevice(torch.Tensor):
    """A tensor that passes for one on a device."""


class FolderSource:
    """A role that gives the weights of a folder, not always as it should."""

    def __init__(self, config: Folder, ranks: Any = None) -> None:
        self.config, self.damage = config, ""

    @register("all")
    def set_damage(self, damage: str) -> None:
        """What goes wrong next time: lost, doubled, dies, or another factor of the weights; `one`: an element is another; or `device`: they
        pass for tensors there.
        """
        self.damage = damage
        if damage == "device":
            digests.is_in_host = lambda tensor: not isinstance(tensor, OnDevice)  # type: ignore[assignment]

    @contextmanager
    def weights(self) -> Iterator[Any]:
        yield self._stream()

    def _stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        from drivetrain.engine.hf.weights import stored_weights

        factor = float(self.damage) if self.damage.replace(".", "").isdigit() else 1.0
        for i, (name, tensor) in enumerate(stored_weights(self.config.path)):
            if i == 3 and self.damage == "dies":
                die(None)
            if i == 3 and self.damage == "lost":
                continue
            if i == 3 and self.damage == "one":
                tensor.view(-1)[7] += 1
            yield name, (tensor * factor).as_subclass(OnDevice if self.damage == "device" else torch.Tensor)
            if i == 3 and self.damage == "doubled":
                yield name, tensor
