"""Executes redistributions: bytes between the stores of workers, within a pool by its process group, between pools by links."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...engine import progress
from ...engine.errors import DrivetrainError, RemoteError
from ...engine.parallel.process_groups import EngineGroups
from .links import Links
from .plan import Load, Round, Step, pool_of, rank_of
from .store import DataStore, pieces_of


class DataManager:
    """One worker's part in moving samples.

    Args:
        store: The worker's store.
    """

    def __init__(self, store: DataStore) -> None:
        self.store = store
        self.links: Links | None = None
        self.bytes_sent = self.bytes_received = 0
        """The sizes of all loads that this process has sent and received."""
        self._groups: EngineGroups | None = None

    def run(self, name: str, rounds: Sequence[Round], title: str) -> None:
        """Take part in a redistribution. Collective over the places of each step, which all have the same plan.

        If samples are missing here, the others receive zeros instead, so that nobody waits for ever; the error is raised at the
        end, and the caller has to tell the others.

        Args:
            name: This process's place.
            rounds: This process's part of the plan.
            title: The name of the redistribution, the same everywhere.

        Raises:
            DataMissingError: Samples that were to be sent are not here.
            WorkerLostError: A peer of another pool sent nothing in time.
        """
        errors: list[Exception] = []
        for number, steps in enumerate(rounds):
            self._run_round(name, steps, f"{title}/{number}", errors)
        if errors:
            raise errors[0]

    def _run_round(self, name: str, steps: Sequence[Step], title: str, errors: list[Exception]) -> None:
        for step in steps:
            if step.kind == "broadcast" and step.loads[0].layout()[1]:
                self._broadcast(name, step.loads[0], errors)
        singles = [load for step in steps if step.kind != "broadcast" for load in step.loads if load.layout()[1]]
        self._store_empty(name, steps)
        pool = pool_of(name)
        near = [load for load in singles if pool_of(load.source) == pool_of(load.targets[0]) == pool]
        far = [load for load in singles if pool_of(load.source) != pool_of(load.targets[0])]
        # All at once: in whatever order the other processes come, none waits for one that waits for it.
        works: list[Any] = []
        arriving: list[tuple[Load, Tensor]] = []
        for load in near:
            if load.source == name:
                works += [dist.isend(piece, rank_of(load.targets[0])) for piece in self._pieces(load, errors)]
            else:
                data = torch.empty(load.layout()[1], dtype=torch.uint8)
                works += [dist.irecv(piece, rank_of(load.source)) for piece in pieces_of(load, data)]
                arriving.append((load, data))
        for load in far:
            if load.source == name:
                self._send(load, title, errors)
        for work in works:
            work.wait()
            progress.advance()
        for load, data in arriving:
            self._store(load, data)
        for load in far:
            if load.source != name:
                self._receive(load, title, errors)

    def _store_empty(self, name: str, steps: Sequence[Step]) -> None:
        """Store loads without bytes, such as media of samples that have none: there is nothing to send."""
        for load in (load for step in steps for load in step.loads):
            if name in load.targets and not load.layout()[1]:
                self.store.unpack(load, torch.empty(0, dtype=torch.uint8))

    def _broadcast(self, name: str, load: Load, errors: list[Exception]) -> None:
        if self._groups is None:
            self._groups = EngineGroups(None)
        ranks = [rank_of(member) for member in (load.source, *load.targets)]
        group = self._groups.get(ranks, "gloo")
        if name == load.source:
            for piece in self._pieces(load, errors):
                dist.broadcast(piece, src=rank_of(load.source), group=group)
        else:
            data = torch.empty(load.layout()[1], dtype=torch.uint8)
            for piece in pieces_of(load, data):
                dist.broadcast(piece, src=rank_of(load.source), group=group)
            self._store(load, data)
        progress.advance()

    def _send(self, load: Load, title: str, errors: list[Exception]) -> None:
        links = self._linked()
        failed = len(errors)
        pieces = self._pieces(load, errors)
        error = str(errors[failed]) if len(errors) > failed else ""
        links.send(load.targets[0], title, [] if error else [piece.numpy() for piece in pieces], error=error)

    def _receive(self, load: Load, title: str, errors: list[Exception]) -> None:
        links = self._linked()
        header = links.receive_header(load.source, title)
        if header.error:
            errors.append(RemoteError(f"{load.source} failed: {header.error}"))
            return
        data = torch.empty(load.layout()[1], dtype=torch.uint8)
        links.receive_into(header, [piece.numpy() for piece in pieces_of(load, data)])
        self._store(load, data)

    def _pieces(self, load: Load, errors: list[Exception]) -> list[Tensor]:
        """Return the bytes to send; zeros if they are not here, so that nobody waits for them for ever."""
        try:
            pieces = self.store.pieces(load)
        except DrivetrainError as e:
            errors.append(e)
            pieces = pieces_of(load, torch.zeros(load.layout()[1], dtype=torch.uint8))
        self.bytes_sent += sum(piece.numel() for piece in pieces)
        return pieces

    def _store(self, load: Load, data: Tensor) -> None:
        self.bytes_received += data.numel()
        self.store.unpack(load, data)

    def _linked(self) -> Links:
        if self.links is None:
            raise RemoteError("this worker has no connections to other pools; send listen and peers first")
        return self.links

    def close(self) -> None:
        """Free groups and connections."""
        if self._groups is not None:
            self._groups.close()
        if self.links is not None:
            self.links.close()
