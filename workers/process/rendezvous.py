"""The rendezvous of all ranks at the address in a communicator id. Also used by a Python controller that is itself rank 0."""

import socket
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from ...engine.errors import TopologyError, first_line
from ...engine.parallel.process_groups import init_distributed
from ..protocol import comm_id as comm_ids
from ..protocol.comm_id import CommId

_failed: list[Store] = []
"""The stores of failed rendezvous, kept because the other ranks read the missing ranks from them."""


def join(
    comm_id: CommId,
    rank: int,
    world_size: int,
    *,
    wait_s: float,
    timeout: timedelta,
    listener: socket.socket | None = None,
) -> torch.device:
    """Join the other ranks and create the default process group. Collective.

    Args:
        comm_id: The address and the run.
        rank: This process's rank.
        world_size: The number of ranks.
        wait_s: The time limit for the other ranks, in seconds.
        timeout: The timeout of later collectives.
        listener: For rank 0, the socket that already listens at the address; None opens it.

    Returns:
        This process's device.

    Raises:
        TopologyError: A rank did not join, joined twice, has a different number of ranks or belongs to another run.
        CommIdError: Rank 0 cannot listen at the address.
    """
    # An earlier attempt may have used the same address.
    _failed.clear()
    deadline = time.monotonic() + wait_s
    store = open_store(comm_id, rank, wait_s, listener)
    _failed.append(store)
    _wait_for_all_ranks(store, rank, world_size, deadline, wait_s)
    device = init_distributed(timeout, store=PrefixStore("default", store), rank=rank, world_size=world_size)
    if device.type == "cuda":
        # NCCL connects in the first collective; an error there counts as an error of the rendezvous.
        dist.all_reduce(torch.zeros(1, device=device))
        torch.cuda.synchronize(device)
    _failed.clear()
    return device


def open_store(comm_id: CommId, rank: int, wait_s: float, listener: socket.socket | None = None) -> Store:
    """Return the store at an address: rank 0 opens it, and the other ranks connect to it.

    Args:
        comm_id: The address and the run.
        rank: This process's rank.
        wait_s: The time limit for rank 0, in seconds.
        listener: For rank 0, the socket that already listens at the address; None opens it.

    Raises:
        TopologyError: Rank 0 did not join, or belongs to another run.
        CommIdError: Rank 0 cannot listen at the address.
    """
    deadline = time.monotonic() + wait_s
    where = f"{comm_id.host}:{comm_id.port}"
    if rank == 0:
        listener = listener or comm_ids.listen(comm_id.host, comm_id.port)
        store: Store = TCPStore(
            comm_id.host,
            comm_id.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=wait_s),
            # Otherwise the store would listen at every address of the machine.
            master_listen_fd=listener.detach(),
        )
        store.set("run", comm_id.run.hex())
        return store
    try:
        store = _connect(comm_id, wait_s)
        store.wait(["run"], timedelta(seconds=max(deadline - time.monotonic(), 0.1)))
    except (dist.DistError, TimeoutError) as e:
        raise TopologyError(
            f"rank 0 did not come to {where} within {wait_s:g} s: {first_line(e)}; start it, or check that this machine reaches that address"
        ) from e
    if store.get("run").decode() != comm_id.run.hex():
        raise TopologyError(f"the comm_id is of another run than the one that meets at {where}; give all ranks the same")
    return store


def _connect(comm_id: CommId, wait_s: float) -> Store:
    """Return the store of rank 0.

    Raises:
        TimeoutError: The listener at the address does not answer: rank 0 is about to join, or it is another program.
    """
    stores: list[Store] = []
    errors: list[Exception] = []

    def connect() -> None:
        try:
            stores.append(TCPStore(comm_id.host, comm_id.port, wait_for_workers=False, timeout=timedelta(seconds=wait_s)))
        except Exception as e:  # raised by the caller
            errors.append(e)

    # torch connects without a timeout once the address accepts.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(wait_s)
    if errors:
        raise errors[0]
    if not stores:
        raise TimeoutError("the address accepts connections, but does not answer")
    return stores[0]


def _wait_for_all_ranks(store: Store, rank: int, world_size: int, deadline: float, wait_s: float) -> None:
    # `add` is atomic, so of two processes with the same rank the second one sees the first one.
    if store.add(f"count/{rank}", 1) > 1:
        raise TopologyError(f"two processes have come as rank {rank}; give every worker a --rank of its own")
    store.set(f"rank/{rank}", str(world_size))
    keys = [f"rank/{other}" for other in range(world_size)]
    for other, key in enumerate(keys):
        try:
            store.wait([key], timedelta(seconds=max(deadline - time.monotonic(), 0.1)))
        except dist.DistError as e:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            raise TopologyError(
                f"{'ranks' if len(missing) > 1 else 'rank'} {', '.join(map(str, missing))} of {world_size} did not join within "
                f"{wait_s:g} s; send init to every rank, and check --world-size"
            ) from e
        # Compared on arrival: with different sizes, some ranks would wait for ranks that do not exist.
        if (size := int(store.get(key))) != world_size:
            raise TopologyError(
                f"rank {rank} has --world-size {world_size}, but rank {other} has {size}; give all ranks the same"
            )
