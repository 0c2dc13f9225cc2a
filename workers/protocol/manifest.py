"""The conventions of a flush that controller and workers share: the digest of its requests, their order, and their samples."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from .compute_messages import ComputeRequest, SampleRequest
from .hooks import DataTransferHook, EvaluateHook
from .messages import Id, Request


def digest_of(requests: Iterable[tuple[Id | None, str]]) -> str:
    """Return the digest of a flush: SHA-256 of one line per request, its id as JSON, a space, and its own digest.

    Args:
        requests: The id and the digest of each request, in order.
    """
    text = "".join(f"{json.dumps(number)} {digest}\n" for number, digest in requests)
    return hashlib.sha256(text.encode()).hexdigest()


def order_of(request: ComputeRequest) -> tuple[int, bool, Any]:
    """Return the sort key of the calls of a flush: the number of processes, then the id, with numbers before strings."""
    return request.mesh_size, isinstance(request.id, str), request.id


def needed_ids(request: Request, name: str) -> list[str]:
    """Return the samples that a request needs in the store of a process; they must not be dropped before it has run.

    Args:
        request: The request.
        name: The process, as `pool/rank`.
    """
    if not isinstance(request, ComputeRequest):
        return []
    ids = list(request.ids) if isinstance(request, SampleRequest) else []
    for hook in (*request.pre_hooks, *request.post_hooks):
        if isinstance(hook, EvaluateHook):
            ids += hook.ids
        elif isinstance(hook, DataTransferHook):
            # A process must keep what it is to send, and does not have yet what it is to receive.
            loads = (load for steps in hook.rounds for step in steps for load in step.loads)
            ids += [sample for load in loads if load.source == name for sample in load.ids]
    return ids
