"""The interface of environments, which a policy acts in turn by turn.

    reset(row)  ->  the first observation, if that is not the row's prompt
    step(turn)  ->  the next observation, or the end

A policy reads tokens and writes tokens. The tokens that it has written are never changed: an environment only returns what follows them,
either as messages, which the chat template renders, or as tokens.
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from ..engine.errors import DrivetrainError

LARGEST_REWARD = 1e30
"""The largest absolute value of a reward, which is later stored as float32."""


class EnvironmentResultError(DrivetrainError):
    """An environment returned an invalid result."""


class EpisodeLostError(DrivetrainError):
    """Something that an environment depends on is gone, so its episode must be restarted. Environments raise it."""


@dataclass(frozen=True, kw_only=True)
class EpisodeRow:
    """The data row of an episode.

    Args:
        prompt: The prompt of the row: a string, or the messages of a chat.
        columns: The other columns of the row, by name.
        seed: The seed of the environment's random choices, for reproducible runs.
        temperature: The sampling temperature of turns that are trained on.
    """

    prompt: str | Sequence[Mapping[str, Any]]
    columns: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    temperature: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The completion that the policy has written in a turn.

    Args:
        number: The number of the turn in its episode, from 0.
        tokens: Its token ids, including the one that ended it.
        text: Its text, without special tokens.
        finished: Whether the policy or a stop string ended it, rather than the length limit.
        stop: The stop string that ended it; empty if none did. The tokens include it, `text` ends before it.
        context_length: The number of tokens that the policy has read before it.
    """

    number: int
    tokens: Sequence[int]
    text: str
    finished: bool = True
    stop: str = ""
    context_length: int = 0


@dataclass(frozen=True, kw_only=True)
class Observation:
    """The next input of the policy: messages, a text or tokens.

    Args:
        messages: Messages, each with `role` and `content`, which the chat template renders after the policy's tokens.
        tokens: Token ids, appended as they are.
        text: A text, tokenized as it is, including special tokens.
        reward: The reward of the preceding turn, if it has one.
        after: The number of the turn that this observation follows; None for the last one. An earlier turn begins a branch: a separate
            document, in which the shared turns are not trained on again. -1 begins a separate conversation.
        history: Messages before `messages`. If the chat template cannot render what follows the policy's tokens, all messages are rendered
            as a separate conversation, instead of raising an error.
        tools: The tools offered to the policy, as JSON schemas, instead of those of the environment.
        stop: Strings that end the next turn.
        max_tokens: The maximum number of tokens of the next turn, if less than `rollout.max_tokens`.
        unread: The numbers of turns that were not read because their client disconnected; they are not trained on.
    """

    messages: Sequence[Mapping[str, Any]] = ()
    tokens: Sequence[int] | None = None
    text: str | None = None
    reward: float | None = None
    after: int | None = None
    history: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    stop: Sequence[str] = ()
    max_tokens: int | None = None
    unread: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class Done:
    """The end of an episode.

    Args:
        reward: The reward of the last turn, if it has one.
        metrics: Metrics, averaged over the episodes of a step.
        unread: As in `Observation`.
    """

    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    unread: Sequence[int] = ()


class Environment(ABC):
    """The environment of one episode; each episode has its own instance. `reset`, `step` and `close` may be coroutines.

    Environments run in separate processes, many instances in each. Any exception that they raise counts as a failure of the environment:
    the episode is left out, counted, and never gets a reward. Create state that instances share, such as an index, once in a cached
    function.
    """

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """The tools that the chat template describes to the policy, as JSON schemas."""
        return ()

    @property
    def processes(self) -> int | None:
        """The maximum number of processes that run instances at the same time; None for the configured number."""
        return None

    @property
    def independent(self) -> bool:
        """Whether episodes do not wait for each other to end. Otherwise a call of the generator never waits for all of them."""
        return True

    def reset(self, row: EpisodeRow) -> Any:
        """Begin the episode.

        Args:
            row: Its data row.

        Returns:
            None if the policy reads the row's prompt first; otherwise an `Observation` that replaces it.
        """
        return None

    @abstractmethod
    def step(self, turn: Turn) -> Any:
        """Respond to a turn of the policy.

        Args:
            turn: The turn.

        Returns:
            An `Observation`, or `Done`.
        """

    def close(self) -> Any:
        """Release the resources of the episode. Called once, also after errors.

        Returns:
            True if something keeps running that cannot be stopped; the process then gets no new episodes. Otherwise nothing.
        """
        return None


def check_first(result: Any) -> Observation | None:
    """Check and return the result of `reset`.

    Raises:
        EnvironmentResultError: It is neither None nor an observation, or the observation is invalid.
    """
    if result is None:
        return None
    if not isinstance(result, Observation):
        raise EnvironmentResultError(f"reset returned {_described(result)}; it must be None, or an Observation")
    if result.reward is not None:
        raise EnvironmentResultError(
            f"reset returned an Observation with reward={result.reward}, before any turn; leave it out"
        )
    _check_observation(result, "reset")
    return result


def check_next(result: Any) -> Observation | Done:
    """Check and return the result of `step`.

    Raises:
        EnvironmentResultError: It is neither an `Observation` nor `Done`, or is invalid.
    """
    if not isinstance(result, Observation | Done):
        raise EnvironmentResultError(f"step returned {_described(result)}; it must be an Observation, or Done")
    reward = result.reward
    # Written so that NaN, for which every comparison is false, is refused too.
    if reward is not None and (not isinstance(reward, Real) or not abs(reward) <= LARGEST_REWARD):
        raise EnvironmentResultError(f"step returned reward={reward!r:.40}; it must be a finite number, or None")
    if isinstance(result, Observation):
        _check_observation(result, "step")
        return result
    _check_unread(result.unread, "step")
    if not isinstance(result.metrics, Mapping):
        raise EnvironmentResultError(f"step returned Done with metrics={result.metrics!r:.40}; they must be numbers by name")
    for name, value in result.metrics.items():
        if not isinstance(value, Real) or not math.isfinite(value):
            raise EnvironmentResultError(
                f"step returned Done with metrics[{name!r}]={value!r:.40}; they must be finite numbers"
            )
    return result


def _check_observation(observation: Observation, method: str) -> None:
    tokens, messages, text = observation.tokens, observation.messages, observation.text
    contents = [
        name for name, there in (("messages", messages), ("tokens", tokens is not None), ("text", text is not None)) if there
    ]
    if len(contents) != 1:
        which = "none of messages, tokens and text" if not contents else f"both {' and '.join(contents)}"
        raise EnvironmentResultError(f"{method} returned an Observation with {which}; set exactly one of them")
    if tokens is not None and (
        isinstance(tokens, str) or not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens)
    ):
        raise EnvironmentResultError(
            f"{method} returned an Observation with tokens={tokens!r:.40}; they must be a list of token ids; pass a text as messages, or text"
        )
    if text is not None and not isinstance(text, str):
        raise EnvironmentResultError(f"{method} returned an Observation with text={text!r:.40}; it must be a str")
    for name in ("messages", "history"):
        _check_messages(getattr(observation, name), method, name)
    for name, least in (("after", -1), ("max_tokens", 1)):
        value = getattr(observation, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise EnvironmentResultError(
                f"{method} returned an Observation with {name}={value!r:.40}; it must be an integer of at least {least}, or None"
            )
    _check_unread(observation.unread, method)
    try:
        schemas = [dict(schema) for schema in observation.tools]
        # Encoding finds lone surrogates, which tokenizers reject.
        json.dumps(schemas, ensure_ascii=False).encode()
    except (TypeError, ValueError) as e:
        raise EnvironmentResultError(
            f"{method} returned an Observation with tools={observation.tools!r:.60}; they must be JSON schemas: {e}"
        ) from e
    # A string is a sequence of strings too: its characters.
    if isinstance(observation.stop, str) or not all(isinstance(one, str) and one for one in observation.stop):
        raise EnvironmentResultError(
            f"{method} returned an Observation with stop={observation.stop!r:.40}; it must be a list of non-empty strings"
        )


def _check_unread(unread: Any, method: str) -> None:
    if not isinstance(unread, Sequence) or not all(isinstance(number, int) for number in unread):
        raise EnvironmentResultError(f"{method} returned unread={unread!r:.40}; they must be numbers of turns")


def _check_messages(messages: Any, method: str, name: str) -> None:
    if isinstance(messages, str | Mapping):
        raise EnvironmentResultError(
            f"{method} returned an Observation with {name}={messages!r:.40}; they must be a list of mappings with role and content"
        )
    for message in messages:
        if (
            not isinstance(message, Mapping)
            or not isinstance(message.get("role"), str)
            or not isinstance(message.get("content"), str)
        ):
            raise EnvironmentResultError(
                f"{method} returned an Observation with the message {message!r:.60}; it needs a role and a content, both strings"
            )
        try:
            json.dumps(dict(message), ensure_ascii=False).encode()
        except (TypeError, ValueError) as e:
            raise EnvironmentResultError(
                f"{method} returned an Observation with a message that is not JSON, or holds a lone surrogate: {e}"
            ) from e


def _described(result: Any) -> str:
    if isinstance(result, str):
        return f"the text {result!r:.40}, which could be rendered in several ways: return Observation(messages=[...])"
    return "None" if result is None else f"a {type(result).__name__}"
