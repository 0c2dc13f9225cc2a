"""The input and the outcome of a reward function."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

OutcomeKind = Literal["value", "not_applicable", "timeout", "error"]
OUTCOME_KINDS: tuple[OutcomeKind, ...] = ("value", "not_applicable", "timeout", "error")


@dataclass(frozen=True, kw_only=True)
class RewardSample:
    """A completion to a prompt.

    Args:
        prompt: A string, or the messages of a chat, each with `role` and `content`.
        completion: The text of the completion.
        completion_ids: Its token ids.
        truncated: Whether it ended at the length limit.
        columns: The other columns of the prompt's row in the data, by name.
        turns: With an environment: the turns of the policy (role `assistant`) and the messages between them. The completion is the
            last turn.
        environment_reward: The sum of the environment's rewards, if it has returned any.
        failure: Why the environment failed; such a completion is not scored, and is left out.
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
    """The outcome of one reward function for one completion.

    Args:
        kind: `value`; `not_applicable`, if the function does not apply to the completion; `timeout`; or `error`.
        value: The reward, if there is one.
        message: The error message, if there was an error.
        seconds: The duration of the call, in seconds; for a call with many completions, this completion's share.
    """

    kind: OutcomeKind
    value: float | None = None
    message: str = ""
    seconds: float = 0.0
