"""Receipts of transfers of weights: what every process says that it has sent or loaded."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...engine.errors import WorkerError


@dataclass(frozen=True, kw_only=True)
class WeightReceipt:
    """What all processes of a transfer agree on.

    Args:
        version: The version of the weights; None if the transfer named none.
        tensors: The number of tensors.
        bytes: Their size.
        digest: The digest of their names and bytes.
    """

    version: int | None
    tensors: int
    bytes: int
    digest: str


def agreed_receipt(replies: Mapping[str, Mapping[str, Any] | None]) -> WeightReceipt:
    """Return the receipt that all processes have given.

    Args:
        replies: The receipt of each process, by worker; None of one that has neither sent nor loaded anything.

    Raises:
        WorkerError: They differ; the message says which processes have what.
    """
    receipts = {worker: WeightReceipt(**reply) for worker, reply in replies.items() if reply is not None}
    found = sorted({*receipts.values()}, key=lambda r: -sum(other == r for other in receipts.values()))
    if len(found) > 1:
        shown = "; ".join(
            f"{', '.join(worker for worker, own in receipts.items() if own == receipt)}: {receipt.tensors} tensors, version "
            f"{receipt.version}, digest {receipt.digest[:12]}"
            for receipt in found
        )
        raise WorkerError(f"the processes have different weights after the transfer ({shown}); sync them again")
    return found[0]
