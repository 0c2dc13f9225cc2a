"""The log-probabilities of prompts, computed by the processes that train, as forward passes without gradients."""

import asyncio
from collections.abc import Callable
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
from .turns import in_turn

ATTEMPTS = 3
"""How often something is tried under which processes die."""


@dataclass(eq=False)
class _Score:
    owner: str
    request: AdapterRequest
    folder: str
    done: "asyncio.Future[AdapterReply]"
    attempts: int = 0


class Scoring:
    """The prompts whose log-probabilities are asked for.

    Args:
        group: The processes.
        tokens: The number of tokens that are computed at a time.
        wake: Called when there is something to do.
    """

    def __init__(self, group: TrainingGroup, tokens: int, wake: Callable[[], None]) -> None:
        self._group, self._tokens, self._wake = group, tokens, wake
        self._waiting: list[_Score] = []
        self._last = ""
        """The user who was served last."""
        self._held: dict[str, None] = {}
        """The checkpoints that are held, the one that was used least recently first."""

    async def score(self, owner: str, folder: str, batch: PackedBatch, *, top_k: int = 0) -> AdapterReply:
        """Return the log-probabilities of a batch's labels, or of its several targets of each token, with the factors of a checkpoint.

        Args:
            owner: Who asks. Users are served in turn.
            folder: The folder of the checkpoint; empty for the model without any adapter.
            batch: The documents.
            top_k: How many of the most likely next tokens of each token to return too.

        Raises:
            DrivetrainError: They cannot be computed.
        """
        done: asyncio.Future[AdapterReply] = asyncio.get_running_loop().create_future()
        request = AdapterRequest(
            adapter=_name(folder) if folder else None,
            # The loss is not used, only the log-probabilities; its formula still reads weights.
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
        """Whether there is something to do."""
        return bool(self._waiting)

    def forget(self) -> None:
        """Note that the processes have been started anew, and hold nothing."""
        self._held.clear()

    async def compute(self) -> None:
        """Compute as much as is computed at a time.

        Raises:
            WorkerLostError: A process died. What it was computing is computed again, a limited number of times.
        """
        chosen: list[_Score] = []
        tokens = 0
        # What is computed at a time has a limited number of tokens, and no more checkpoints than the processes hold.
        # The first that exceeds a limit ends the choice, so that nothing is overtaken.
        for one in in_turn(self._waiting, [one.owner for one in self._waiting], self._last):
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
            # A checkpoint that cannot be loaded fails its own prompts only.
            sound = [one for one in chosen if one.folder not in errors]
            computed = iter(await self._group.forward_backward([one.request for one in sound]) if sound else [])
            replies = [
                AdapterReply(loss=0.0, error=errors[one.folder]) if one.folder in errors else next(computed) for one in chosen
            ]
        except WorkerLostError as e:
            for one in chosen:
                one.attempts += 1
                if one.attempts >= ATTEMPTS and not one.done.done():
                    one.done.set_exception(
                        BadRequestError(f"the processes have died under this prompt: {reason(e)}", status=500)
                    )
            # The others stay, and are computed again after the restart.
            self._waiting = [one for one in self._waiting if not one.done.done()]
            raise
        except DrivetrainError as e:
            replies = [AdapterReply(loss=0.0, error=reason(e))] * len(chosen)
        done = set(chosen)
        self._waiting = [one for one in self._waiting if one not in done]
        for one, reply in zip(chosen, replies, strict=True):
            # The request may have been cancelled meanwhile.
            if one.done.done():
                continue
            if reply.error:
                one.done.set_exception(BadRequestError(reply.error))
            else:
                one.done.set_result(reply)

    async def _hold(self, folder: str) -> None:
        name = _name(folder)
        if name in self._held:
            # Inserted again at the end, as the one that was used last.
            self._held[name] = self._held.pop(name)
            return
        if len(self._held) >= self._group.snapshots:
            oldest = next(iter(self._held))
            # Before the call, and below only after it: a call that fails must not leave a name here that is not held.
            del self._held[oldest]
            await self._group.drop(oldest)
        await self._group.evaluate(name, folder)
        self._held[name] = None


def _name(folder: str) -> str:
    return f"score:{Path(folder).parent.name}"
