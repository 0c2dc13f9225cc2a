"""Log-probabilities of prompts, computed by the training processes as forward passes without gradients."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ...engine.errors import DrivetrainError, WorkerLostError
from ...engine.loss import output_shape
from ...engine.packing.batch import PackedBatch
from ...losses.token_sums import TokenSumLoss
from ...workers.roles.adapters import AdapterReply, AdapterRequest
from .errors import BadRequestError, reason
from .training_group import TrainingGroup
from .turns import round_robin

ATTEMPTS = 3
"""The number of times that a request is computed if processes die during it; then it fails."""


@dataclass(eq=False)
class _Score:
    owner: str
    request: AdapterRequest
    folder: str
    done: "asyncio.Future[AdapterReply]"
    attempts: int = 0


class Scoring:
    """The queue of prompts whose log-probabilities are requested.

    Args:
        group: The training processes.
        tokens: The maximum number of tokens in one call of the processes, unless a single prompt has more.
        wake: Called when a prompt is added to the queue.
    """

    def __init__(self, group: TrainingGroup, tokens: int, wake: Callable[[], None]) -> None:
        self._group, self._tokens, self._wake = group, tokens, wake
        self._waiting: list[_Score] = []
        self._last = ""
        """The user who was served last."""
        self._held: dict[str, None] = {}
        """The names of the checkpoints that the processes have loaded, the least recently used first. The values are unused."""

    async def score(self, owner: str, folder: str, batch: PackedBatch, *, top_k: int = 0) -> AdapterReply:
        """Return the log-probabilities of a batch's labels, or of its `targets` if it has several per token, under a checkpoint.

        Args:
            owner: The hash of the requesting key. Keys are served round-robin.
            folder: The folder of the checkpoint; empty for the base model.
            batch: The documents.
            top_k: The number of most likely next tokens to return per token.

        Raises:
            DrivetrainError: The log-probabilities cannot be computed.
        """
        done: asyncio.Future[AdapterReply] = asyncio.get_running_loop().create_future()
        request = AdapterRequest(
            adapter=_name(folder) if folder else None,
            # Only the log-probabilities are used. The loss needs weights nevertheless.
            batch=batch.with_fields(loss_weights=torch.zeros(output_shape("log_probs", batch))),
            loss=TokenSumLoss("cross_entropy"),
            forward_only=True,
            top_k=top_k,
        )
        self._waiting.append(_Score(owner, request, folder, done))
        self._wake()
        return await done

    @property
    def is_waiting(self) -> bool:
        """Whether prompts are waiting."""
        return bool(self._waiting)

    def forget(self) -> None:
        """Mark all checkpoints as not loaded, after the processes were restarted."""
        self._held.clear()

    async def compute(self) -> None:
        """Compute the next waiting prompts in one call of the processes, and set their results.

        Raises:
            WorkerLostError: A process died. Prompts that were being computed stay in the queue, up to `ATTEMPTS` times.
        """
        chosen: list[_Score] = []
        tokens = 0
        # A call has a limited number of tokens, and no more checkpoints than the processes can hold. The first prompt that
        # exceeds a limit ends the selection, so that later prompts cannot overtake it.
        for one in round_robin(self._waiting, [one.owner for one in self._waiting], self._last):
            folders = {other.folder for other in (*chosen, one)} - {""}
            tokens += one.request.batch.num_tokens
            if len(folders) > self._group.snapshots or (chosen and tokens > self._tokens):
                break
            chosen.append(one)
            self._last = one.owner
        errors: dict[str, str] = {}
        try:
            for folder in dict.fromkeys(one.folder for one in chosen if one.folder):
                try:
                    await self._hold(folder)
                except WorkerLostError:
                    raise
                except DrivetrainError as e:
                    errors[folder] = reason(e)
            # If a checkpoint cannot be loaded, only its own prompts fail.
            sound = [one for one in chosen if one.folder not in errors]
            computed = iter(await self._replies(sound))
            replies = [
                AdapterReply(loss=0.0, error=errors[one.folder]) if one.folder in errors else next(computed) for one in chosen
            ]
        except WorkerLostError as e:
            for one in chosen:
                one.attempts += 1
                if one.attempts >= ATTEMPTS and not one.done.done():
                    one.done.set_exception(
                        BadRequestError(
                            f"the training processes died {one.attempts} times while this prompt was computed: {reason(e)}",
                            status=500,
                        )
                    )
            # The other prompts stay in the queue, and are computed again after the restart.
            self._waiting = [one for one in self._waiting if not one.done.done()]
            raise
        done = set(chosen)
        self._waiting = [one for one in self._waiting if one not in done]
        for one, reply in zip(chosen, replies, strict=True):
            # The request may have been cancelled in the meantime.
            if one.done.done():
                continue
            if reply.error:
                one.done.set_exception(BadRequestError(reply.error))
            else:
                one.done.set_result(reply)

    async def _replies(self, scores: Sequence[_Score]) -> list[AdapterReply]:
        """Compute prompts in one call; if it fails, compute each of them alone, so that only those that cause the error fail.

        Raises:
            WorkerLostError: A process died.
        """
        if not scores:
            return []
        try:
            return list(await self._group.forward_backward([one.request for one in scores]))
        except WorkerLostError:
            raise
        except DrivetrainError as e:
            if len(scores) == 1:
                return [AdapterReply(loss=0.0, error=reason(e))]
        return [reply for one in scores for reply in await self._replies([one])]

    async def _hold(self, folder: str) -> None:
        name = _name(folder)
        if name in self._held:
            # Moved to the end, as the most recently used.
            self._held[name] = self._held.pop(name)
            return
        if len(self._held) >= self._group.snapshots:
            oldest = next(iter(self._held))
            # Removed before its call and, below, added after its call: if a call fails, no name may remain here whose
            # checkpoint is not loaded.
            del self._held[oldest]
            await self._group.drop(oldest)
        await self._group.evaluate(name, folder)
        self._held[name] = None


def _name(folder: str) -> str:
    return f"score:{Path(folder).parent.name}"
