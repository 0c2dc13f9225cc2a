"""Executes redistributions: bytes between the stores of workers, within a pool by its process group, between pools by links."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...engine import progress
from ...engine.errors import DataMissingError, DrivetrainError, RemoteError, WorkerLostError
from ...engine.parallel.process_groups import EngineGroups
from .blocks import BlockPool, BlockReader
from .links import Header, Links
from .plan import Load, Round, Step, pool_of, rank_of
from .store import DataStore, empty_pieces


class DataManager:
    """One worker's part in moving samples.

    Args:
        store: The worker's store.
    """

    def __init__(self, store: DataStore) -> None:
        self.store = store
        self.links: Links | None = None
        self.blocks, self.reader = BlockPool(), BlockReader()
        self._groups: EngineGroups | None = None

    def discard(self, header: Header) -> None:
        """Give back the memory of another process that a transfer is in, which is not read here."""
        if header.block is not None:
            # The memory of an ended process is already gone.
            with suppress(WorkerLostError):
                self.reader.read(*header.block)

    def run(self, name: str, rounds: Sequence[Round], title: str) -> None:
        """Take part in a redistribution. Collective over the workers of each step, which all have the same plan.

        If samples are missing at their source, no process waits forever and nothing is stored for them: the error is
        raised at the end, at the source and at the targets.

        Args:
            name: The id of this worker.
            rounds: This process's part of the plan.
            title: The name of the redistribution, the same everywhere.

        Raises:
            DataMissingError: Samples that were to be sent are not here.
            WorkerLostError: A peer of another pool sent nothing in time.
        """
        # Errors are collected, not raised: the peers of later steps wait for this process in any case.
        errors: list[Exception] = []
        for number, steps in enumerate(rounds):
            self._run_round(name, steps, f"{title}/{number}", errors)
        if errors:
            raise errors[0]

    def _run_round(self, name: str, steps: Sequence[Step], title: str, errors: list[Exception]) -> None:
        for step in steps:
            # Broadcasts block, so they run first and in the order of the plan, which all members of a group share.
            if step.kind == "broadcast" and step.loads[0].layout()[1]:
                self._broadcast(name, step.loads[0], errors)
        singles = [load for step in steps if step.kind != "broadcast" for load in step.loads if load.layout()[1]]
        self._store_empty(name, steps)
        pool = pool_of(name)
        inside_pool = [load for load in singles if pool_of(load.source) == pool_of(load.targets[0]) == pool]
        far = [load for load in singles if pool_of(load.source) != pool_of(load.targets[0])]
        # All steps are started at once, so that processes cannot deadlock whatever order they arrive in.
        works: list[Any] = []
        arriving: list[tuple[Load, list[Tensor], Tensor]] = []
        for load in inside_pool:
            if load.source == name:
                # gloo matches the messages between two processes by their order, which is that of the plan on both
                # sides.
                pieces, status = self._pieces(load, errors)
                works += [dist.isend(piece, rank_of(load.targets[0])) for piece in (*pieces, status)]
            else:
                pieces, status = empty_pieces(load), torch.empty(1, dtype=torch.uint8)
                works += [dist.irecv(piece, rank_of(load.source)) for piece in (*pieces, status)]
                arriving.append((load, pieces, status))
        for load in far:
            if load.source == name:
                # Before any wait: sending over a link never blocks, so a peer that waits for this process gets its
                # data.
                self._send(load, title, errors)
        for work in works:
            work.wait()
            progress.advance()
        for load, pieces, status in arriving:
            self._store(load, pieces, status, errors)
        for load in far:
            if load.source != name:
                self._receive(load, title, errors)

    def _store_empty(self, name: str, steps: Sequence[Step]) -> None:
        """Store loads without bytes, such as media of samples that have none: there is nothing to send."""
        for load in (load for step in steps for load in step.loads):
            if name in load.targets and not load.layout()[1]:
                self.store.unpack(load, [])

    def _broadcast(self, name: str, load: Load, errors: list[Exception]) -> None:
        if self._groups is None:
            self._groups = EngineGroups(None)
        ranks = [rank_of(member) for member in (load.source, *load.targets)]
        group = self._groups.get(ranks, "gloo")
        is_source = name == load.source
        pieces, status = self._pieces(load, errors) if is_source else (empty_pieces(load), torch.empty(1, dtype=torch.uint8))
        # The source's success travels last, as a byte of its own: targets do not know beforehand whether the data is
        # there.
        for piece in (*pieces, status):
            dist.broadcast(piece, src=rank_of(load.source), group=group)
        progress.advance()
        if not is_source:
            self._store(load, pieces, status, errors)

    def _send(self, load: Load, title: str, errors: list[Exception]) -> None:
        links = self._linked()
        failed = len(errors)
        pieces, _ = self._pieces(load, errors)
        error = str(errors[failed]) if len(errors) > failed else ""
        links.send(load.targets[0], title, [] if error else [piece.numpy() for piece in pieces], error=error)

    def _receive(self, load: Load, title: str, errors: list[Exception]) -> None:
        links = self._linked()
        header = links.receive_header(load.source, title)
        if header.error:
            errors.append(RemoteError(f"{load.source} failed: {header.error}"))
            return
        pieces = empty_pieces(load)
        links.receive_into(header, [piece.numpy() for piece in pieces])
        self.store.unpack(load, pieces)

    def _pieces(self, load: Load, errors: list[Exception]) -> tuple[list[Tensor], Tensor]:
        """Return the bytes to send, and whether they are those of the load. If it is missing, zeros are sent, so that no target waits forever."""
        try:
            return self.store.pieces(load), torch.ones(1, dtype=torch.uint8)
        except DrivetrainError as e:
            errors.append(e)
            return [torch.zeros_like(piece) for piece in empty_pieces(load)], torch.zeros(1, dtype=torch.uint8)

    def _store(self, load: Load, pieces: list[Tensor], status: Tensor, errors: list[Exception]) -> None:
        if bool(status):
            self.store.unpack(load, pieces)
        else:
            errors.append(RemoteError(f"{load.source} failed: {DataMissingError.of(load.ids)}"))

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
