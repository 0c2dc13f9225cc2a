"""The turns of a policy as a tree, and the documents that the tree is split into.

prompt | turn 0 | observation | turn 1 | observation | turn 2        a conversation
               \\_ observation | turn 3                               a branch: the input after turn 0 was changed
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from .result import Generation


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyTurn:
    """A turn of the policy.

    Args:
        number: Its number, in the order in which turns ended.
        parent: The turn before it; None for the first one of a conversation.
        observed: The tokens between the previous turn and this one; for the first turn, the prompt.
        tokens: Its tokens.
        log_probs: Their log-probabilities.
        versions: The versions of the weights that generated them.
        finished: Whether the policy ended it, rather than a limit.
    """

    number: int
    parent: "PolicyTurn | None"
    observed: tuple[int, ...]
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    versions: tuple[int, ...]
    finished: bool

    def context(self) -> list[int]:
        """Return all tokens of its conversation, up to the end of this turn."""
        return [token for turn in path_of(self) for token in (*turn.observed, *turn.tokens)]


AnyTurn = TypeVar("AnyTurn", bound=PolicyTurn)


def path_of(turn: AnyTurn) -> list[AnyTurn]:
    """Return the turns of a conversation, from its first one to this one."""
    path: list[AnyTurn] = []
    last: AnyTurn | None = turn
    while last is not None:
        path.append(last)
        # All turns of a tree have the same class.
        last = last.parent  # type: ignore[assignment]
    return path[::-1]


@dataclass(frozen=True, kw_only=True, eq=False)
class Trajectory(Generic[AnyTurn]):
    """A conversation as a document.

    Args:
        turns: Its turns.
        new: The index of its first turn that this document trains on; earlier turns are trained on in a previous document.
        spans: The start and end of each turn's tokens after the prompt.
        generation: The document. Its prompt is the first input of the policy; `sampled` marks the tokens after it that are trained on.
    """

    turns: tuple[AnyTurn, ...]
    new: int
    spans: tuple[tuple[int, int], ...]
    generation: Generation


def trajectories_of(turns: Sequence[AnyTurn]) -> list[Trajectory[AnyTurn]]:
    """Return the conversations of turns in order, one for each turn without a successor.

    Each turn is trained on exactly once: turns that conversations share are trained on in the first of them.

    Args:
        turns: The turns. Turns without tokens and without a successor are left out.
    """
    inner: set[int] = set()
    # From the last turn on, so that turns without tokens at the end of a conversation do not count as successors.
    for turn in reversed(turns):
        if turn.tokens or id(turn) in inner:
            inner.add(id(turn.parent))
    trajectories: list[Trajectory[AnyTurn]] = []
    learned: set[int] = set()
    for leaf in turns:
        if id(leaf) in inner or not leaf.tokens:
            continue
        path = path_of(leaf)
        # Conversations share their first turns only, so the count of turns already trained on is the index of the first
        # new one.
        new = sum(id(turn) in learned for turn in path)
        learned |= {id(turn) for turn in path}
        trajectories.append(_trajectory(path, new))
    return trajectories


def _trajectory(path: Sequence[AnyTurn], new: int) -> Trajectory[AnyTurn]:
    response: list[int] = []
    log_probs: list[float] = []
    versions: list[int] = []
    sampled: list[bool] = []
    spans = []
    for number, turn in enumerate(path):
        observed = turn.observed if number else ()
        # Observed tokens, and turns that an earlier document trains on, carry no loss and have no values.
        unlearned = len(observed) + (0 if number >= new else len(turn.tokens))
        begin = len(response) + len(observed)
        response += (*observed, *turn.tokens)
        spans.append((begin, len(response)))
        log_probs += [0.0] * unlearned
        versions += [-1] * unlearned
        sampled += [False] * unlearned
        if number >= new:
            log_probs += turn.log_probs
            versions += turn.versions
            sampled += [True] * len(turn.tokens)
    generation = Generation(
        prompt=list(path[0].observed),
        response=response,
        log_probs=log_probs,
        versions=versions,
        finish_reason="stop" if path[-1].finished else "length",
        sampled=sampled,
    )
    return Trajectory(turns=tuple(path), new=new, spans=tuple(spans), generation=generation)
