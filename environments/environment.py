"""The interface of environments: what a policy acts in, turn by turn. Does not import torch.

    reset(row)  ->  what the policy reads first, if that is not the row's prompt
    step(turn)  ->  what it reads next, or the end

A policy is given tokens and writes tokens. What it has written stays as it is: an environment returns only what comes behind it, as messages,
which the chat template renders, or as tokens.
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
"""The largest absolute value of a reward, which is a float32 later."""


class EnvironmentResultError(DrivetrainError):
    """An environment returned something that it must not."""


class EpisodeLostError(DrivetrainError):
    """Whatever an environment depends on is gone, so that its episode has to begin anew; to be raised by an environment."""


@dataclass(frozen=True, kw_only=True)
class EpisodeRow:
    """What an episode is about.

    Args:
        prompt: The prompt of the row: a text, or the messages of a chat.
        columns: The other columns of the row, by name.
        seed: A number for whatever the environment draws, so that another run draws the same.
        temperature: The temperature at which turns are sampled that are learned from.
    """

    prompt: str | Sequence[Mapping[str, Any]]
    columns: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    temperature: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What the policy has written in a turn.

    Args:
        number: The number of the turn in its episode, from 0.
        tokens: Its token ids, with the one that ended it.
        text: Its text, without special tokens.
        finished: Whether the policy or a stop string has ended it, and not the limit of its length.
        stop: The stop string that has ended it, with which its tokens end, and before which `text` does; empty if none has.
        context_length: The number of tokens that the policy has read for it.
    """

    number: int
    tokens: Sequence[int]
    text: str
    finished: bool = True
    stop: str = ""
    context_length: int = 0


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What the policy reads next: messages, a text or tokens.

    Args:
        messages: Messages, each with `role` and `content`, which the chat template renders behind what the policy has written.
        tokens: Token ids, which are put there as they are.
        text: A text, which is tokenized as it is, special tokens included.
        reward: The reward of the turn before it, if it has one.
        after: The number of the turn that it follows; None for the last one. Another turn than the last one begins a branch, a document of its own in
            which the turns that both have are not learned again; -1 begins a conversation of its own.
        history: Messages before `messages`. If the chat template does not say what follows what the policy has written, all of them are rendered as a
            conversation of its own, instead of being an error.
        tools: The tools that the policy is told about, as JSON schemas, instead of those of the environment.
        stop: Strings at which the next turn ends.
        max_tokens: The number of tokens of the next turn, if it is less than `rollout.max_tokens`.
        unread: The numbers of turns that nobody has read, because whoever asked for them went away; they are not learned.
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
        metrics: Numbers that are averaged over the episodes of a step.
        unread: As in an observation.
    """

    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    unread: Sequence[int] = ()


class Environment(ABC):
    """An environment of one episode: there is an instance for each. `reset`, `step` and `close` may be coroutines.

    They run in separate processes, many instances in each, and whatever they raise is a failure of the environment: the episode is left out
    and counted, and never has a reward. What instances share, such as an index, is best made once, by a cached function.
    """

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """The tools that the chat template tells the policy about, as JSON schemas."""
        return ()

    @property
    def processes(self) -> int | None:
        """How many processes may run instances at the same time; None for as many as the settings say."""
        return None

    @property
    def independent(self) -> bool:
        """Whether no episode waits for another one to end. Otherwise a call of the generator never waits for all."""
        return True

    def reset(self, row: EpisodeRow) -> Any:
        """Begin the episode.

        Args:
            row: What it is about.

        Returns:
            None if the policy reads the row's prompt first; otherwise an `Observation` instead of that.
        """
        return None

    @abstractmethod
    def step(self, turn: Turn) -> Any:
        """Answer what the policy has written.

        Args:
            turn: What it has written.

        Returns:
            An `Observation`, or `Done`.
        """

    def close(self) -> Any:
        """Free what the episode holds. Called once, also after errors.

        Returns:
            True if something continues that cannot be ended, so that the process gets no new episodes; otherwise nothing.
        """
        return None


def check_first(result: Any) -> Observation | None:
    """Return what `reset` has returned.

    Raises:
        EnvironmentResultError: It is neither None nor an observation, or one that cannot be used.
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
    """Return what `step` has returned.

    Raises:
        EnvironmentResultError: It is neither an observation nor the end, or one that cannot be used.
    """
    if not isinstance(result, Observation | Done):
        raise EnvironmentResultError(f"step returned {_described(result)}; it must be an Observation, or Done")
    reward = result.reward
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
        raise EnvironmentResultError(f"{method} returned an Observation with {which}; give one of them")
    if tokens is not None and (
        isinstance(tokens, str) or not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens)
    ):
        raise EnvironmentResultError(
            f"{method} returned an Observation with tokens={tokens!r:.40}; they must be a list of token ids; a text goes into messages, or text"
        )
    if text is not None and not isinstance(text, str):
        raise EnvironmentResultError(f"{method} returned an Observation with text={text!r:.40}; it must be a text")
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
        json.dumps(schemas, ensure_ascii=False).encode()
    except (TypeError, ValueError) as e:
        raise EnvironmentResultError(
            f"{method} returned an Observation with tools={observation.tools!r:.60}; they must be JSON schemas: {e}"
        ) from e
    if isinstance(observation.stop, str) or not all(isinstance(one, str) and one for one in observation.stop):
        raise EnvironmentResultError(
            f"{method} returned an Observation with stop={observation.stop!r:.40}; it must be a list of texts that are not empty"
        )


def _check_unread(unread: Any, method: str) -> None:
    if not isinstance(unread, Sequence) or not all(isinstance(number, int) for number in unread):
        raise EnvironmentResultError(f"{method} returned unread={unread!r:.40}; they must be numbers of turns")


def _check_messages(messages: Any, method: str, name: str) -> None:
    if isinstance(messages, str | Mapping):
        raise EnvironmentResultError(
            f"{method} returned an Observation with {name}={messages!r:.40}; they must be a list of role and content"
        )
    for message in messages:
        if (
            not isinstance(message, Mapping)
            or not isinstance(message.get("role"), str)
            or not isinstance(message.get("content"), str)
        ):
            raise EnvironmentResultError(
                f"{method} returned an Observation with the message {message!r:.60}; it needs a role and a content, both texts"
            )
        try:
            json.dumps(dict(message), ensure_ascii=False).encode()
        except (TypeError, ValueError) as e:
            raise EnvironmentResultError(
                f"{method} returned an Observation with a message that is no JSON, or holds half of a character: {e}"
            ) from e


def _described(result: Any) -> str:
    if isinstance(result, str):
        return f"the text {result!r:.40}, which nobody has said how to render: give Observation(messages=[...])"
    return "None" if result is None else f"a {type(result).__name__}"
