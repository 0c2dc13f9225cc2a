"""What a reward scores, and what becomes of a score. Does not import torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

OutcomeKind = Literal["value", "not_applicable", "timeout", "error"]
OUTCOME_KINDS: tuple[OutcomeKind, ...] = ("value", "not_applicable", "timeout", "error")


@dataclass(frozen=True, kw_only=True)
class RewardSample:
    """A completion to a prompt.

    Args:
        prompt: A text, or the messages of a chat, each with `role` and `content`.
        completion: The text of the completion.
        completion_ids: Its token ids.
        truncated: Whether it ended because of the length limit.
        columns: The other columns of the prompt's row in the data, by name.
        turns: With an environment: the turns of the policy (role `assistant`) and what it was told between them, as messages. Its completion is the
            last turn.
        environment_reward: The sum of the rewards that the environment has given, if it has.
        failure: Why the environment failed; no reward scores such a completion, and it is left out.
    """

    prompt: str | Sequence[Mapping[str, Any]]
    completion: str
    completion_ids: Sequence[int] = ()
    truncated: bool = False
    columns: Mapping[str, Any] = field(default_factory=dict)
    turns: Sequence[Mapping[str, Any]] = ()
    environment_reward: float | None = None
    failure: str = ""


@dataclass(frozen=True, kw_only=True)
class RewardOutcome:
    """What one reward function made of one completion.

    Args:
        kind: `value`; `not_applicable`, if the function says that the completion is not its concern; `timeout`; or `error`.
        value: The reward, if there is one.
        message: What went wrong, if anything did.
        seconds: How long the call took; of a call for many completions, its share.
    """

    kind: OutcomeKind
    value: float | None = None
    message: str = ""
    seconds: float = 0.0
