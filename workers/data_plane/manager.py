"""Executes redistributions: bytes between the stores of workers, within a pool by its process group, between pools by links."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...engine import progress
from ...engine.errors import DrivetrainError, RemoteError
from ...engine.parallel.process_groups import EngineGroups
from .links import Links
from .plan import Load, Round, Step, pool_of, rank_of
from .store import DataStore


@dataclass(eq=False)
class _Transfer:
    """One load on its way from or to this process, with its bytes."""

    load: Load
    data: Tensor


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
        arriving: list[_Transfer] = []
        for load in near:
            if load.source == name:
                works.append(dist.isend(self._packed(load, errors), rank_of(load.targets[0])))
            else:
                transfer = _Transfer(load, torch.empty(load.layout()[1], dtype=torch.uint8))
                works.append(dist.irecv(transfer.data, rank_of(load.source)))
                arriving.append(transfer)
        for load in far:
            if load.source == name:
                self._send(load, title, errors)
        for work in works:
            work.wait()
            progress.advance()
        for transfer in arriving:
            self._store(transfer)
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
        is_source = name == load.source
        data = self._packed(load, errors) if is_source else torch.empty(load.layout()[1], dtype=torch.uint8)
        dist.broadcast(data, src=rank_of(load.source), group=group)
        progress.advance()
        if not is_source:
            self._store(_Transfer(load, data))

    def _send(self, load: Load, title: str, errors: list[Exception]) -> None:
        links = self._linked()
        failed = len(errors)
        data = self._packed(load, errors)
        error = str(errors[failed]) if len(errors) > failed else ""
        links.send(load.targets[0], title, data.numpy(), error=error)

    def _receive(self, load: Load, title: str, errors: list[Exception]) -> None:
        links = self._linked()
        header = links.receive_header(load.source, title)
        if header.error:
            errors.append(RemoteError(f"{load.source} failed: {header.error}"))
            return
        transfer = _Transfer(load, torch.empty(header.size, dtype=torch.uint8))
        links.receive_into(header, transfer.data.numpy())
        self._store(transfer)

    def _packed(self, load: Load, errors: list[Exception]) -> Tensor:
        try:
            data = self.store.pack(load)
        except DrivetrainError as e:
            errors.append(e)
            data = torch.zeros(load.layout()[1], dtype=torch.uint8)
        self.bytes_sent += data.numel()
        return data

    def _store(self, transfer: _Transfer) -> None:
        self.bytes_received += transfer.data.numel()
        self.store.unpack(transfer.load, transfer.data)

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
