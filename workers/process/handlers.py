"""The functions that serve the operations of a model worker."""

import logging
import os
from datetime import timedelta

import msgspec

from ...engine.errors import ConfigError
from ..protocol import comm_id as comm_ids
from ..protocol import compute_messages as c
from ..protocol import messages as m
from .worker import ModelWorker, OpError

logger = logging.getLogger(__name__)


def hello(worker: ModelWorker, request: m.Hello) -> m.Welcome:
    """Check the version of the protocol and the number of ranks."""
    settings = worker.settings
    if request.protocol != m.PROTOCOL:
        raise OpError(
            "bad_request",
            f"the controller speaks version {request.protocol} of the protocol, this worker version {m.PROTOCOL}; install the same "
            "version of drivetrain on both sides",
        )
    if request.world_size not in (None, settings.world_size):
        raise OpError(
            "bad_request",
            f"the controller expects {request.world_size} ranks, but this worker was started with --world-size "
            f"{settings.world_size}",
        )
    worker.pool = request.pool
    return m.Welcome(protocol=m.PROTOCOL, rank=settings.rank, world_size=settings.world_size, pid=os.getpid())


def ping(worker: ModelWorker, request: m.Ping) -> m.Pong:
    """Return the rank and device of this worker."""
    settings = worker.settings
    return m.Pong(rank=settings.rank, world_size=settings.world_size, cuda_device=settings.device)


def cancel(worker: ModelWorker, request: m.Cancel) -> m.CancelOk:
    """Remove a request from the queue, or end it early."""
    return m.CancelOk(found=worker.cancel_request(request))


def shutdown(worker: ModelWorker, request: m.Shutdown) -> m.Bye:
    """Free all roles; the request loop then ends, even if they raise errors."""
    try:
        worker.close()
    except Exception:
        logger.exception("a role could not be closed")
    return m.Bye()


# ---- the communicator ---------------------------------------------------------------------------------------------------


def init(worker: ModelWorker, request: m.Init) -> m.InitOk:
    """Join the other ranks at the address in the id."""
    settings = worker.settings
    try:
        comm_id = comm_ids.parse(request.comm_id)
    except comm_ids.CommIdError as e:
        raise OpError("bad_request", str(e)) from None
    if worker.joined is not None:
        other = "" if worker.joined == comm_id else ", by another comm_id: are there two controllers?"
        raise OpError("nccl_init_failed", f"rank {settings.rank} already has its communicator{other}")
    # Code that is not passed the settings, such as `init_distributed`, reads the rank and the device from the
    # environment.
    settings.export()
    import torch

    from .rendezvous import join

    if torch.cuda.is_available() and settings.device >= torch.cuda.device_count():
        raise OpError(
            "cuda_unavailable",
            f"rank {settings.rank} has --local-rank {settings.device}, but there are {torch.cuda.device_count()} GPUs; start one "
            "worker for each, or set CUDA_VISIBLE_DEVICES= (empty) to run on the CPU",
        )
    if not torch.cuda.is_available():
        # One thread unless the user says otherwise: torch's default is a thread per core, for each of the workers on
        # this machine.
        threads = os.environ.get("OMP_NUM_THREADS", "1")
        torch.set_num_threads(int(threads) if threads.isdigit() and int(threads) else 1)
    # The store takes the socket over and closes it.
    listener, worker.listener = worker.listener, None
    join(
        comm_id,
        settings.rank,
        settings.world_size,
        wait_s=settings.init_s,
        timeout=timedelta(seconds=settings.timeout_s),
        listener=listener,
    )
    worker.joined = comm_id
    return m.InitOk()


def nccl_sanity_check(worker: ModelWorker, request: m.NcclSanityCheck) -> m.NcclSanityResult:
    """Sum one number over all ranks."""
    import torch
    import torch.distributed as dist

    check_joined()
    device = torch.device("cuda", worker.settings.device) if torch.cuda.is_available() else torch.device("cpu")
    # Neither NCCL nor gloo supports uint32; a sum over fewer than 2^31 ranks is the same in int32.
    one = torch.ones(1, dtype=torch.int32, device=device)
    dist.all_reduce(one)
    observed = int(one.item())
    if observed != worker.settings.world_size:
        raise OpError("nccl_sanity_failed", f"the ranks add up to {observed}, but there are {worker.settings.world_size}")
    return m.NcclSanityResult(observed_sum=observed)


def check_joined() -> None:
    """Check that the process group is initialized.

    Raises:
        OpError: It is not.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        raise OpError("nccl_not_initialised", "process group not initialized; send init first")


# ---- roles --------------------------------------------------------------------------------------------------------------


def initialize(worker: ModelWorker, request: c.Initialize) -> c.RankInfo:
    """Build the worker of a role."""
    if worker.settings.world_size > 1:
        check_joined()
    if request.role in worker.host:
        raise OpError("already_loaded", f"there is a role {request.role!r} already; choose another name")
    if not callable(request.worker):
        raise OpError("bad_request", f"worker={request.worker!r:.60}; give the name of a worker class")
    info = worker.host.build(
        request.role, request.worker, request.config, request.generator, request.dataset, sorted(request.ranks)
    )
    # A copy, because the loop sets the id of the reply, and the host keeps the original.
    return msgspec.structs.replace(info)


def call(worker: ModelWorker, request: c.Call) -> c.CallOk:
    """Run a method of a role."""
    check_role(worker, request.role)
    check_method(worker, request.role, request.method)
    result = worker.host.call(request.role, request.method, request.args, request.options)
    return c.CallOk(result=result if request.wants_result else None)


def empty(worker: ModelWorker, request: c.Empty) -> c.EmptyOk:
    """Do nothing but the hooks."""
    return c.EmptyOk()


def check_role(worker: ModelWorker, role: str) -> None:
    """Check that a role exists.

    Raises:
        OpError: It does not.
    """
    if role not in worker.host:
        raise OpError("model_not_loaded", f"there is no role {role!r}; send initialize first")


def check_method(worker: ModelWorker, role: str, method: str) -> None:
    """Check that a role has a method that requests can call.

    Raises:
        OpError: It does not.
    """
    from ..roles.dispatch import dispatch_of

    try:
        dispatch_of(worker.host.owner(role, method), method)
    except ConfigError as e:
        raise OpError("bad_request", str(e)) from None
