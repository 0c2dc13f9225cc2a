"""What the interfaces have in common."""

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....engine.errors import ConfigError, DrivetrainError
from ...openai.schema import Sampling
from ..conversations import Answer, Conversation
from ..messages import ChatTurn, read_answer


@dataclass(frozen=True, kw_only=True)
class AnswerRequest:
    """A request for answers of the policy.

    Args:
        conversation: What is to be answered.
        sampling: How many answers, where they stop, and what else the interface of OpenAI can ask for.
        max_tokens: The number of tokens of an answer; None for as many as there may be.
        stream: Whether answers are sent while they are written.
        tools: The tools that the policy may call, as JSON schemas.
    """

    conversation: Conversation
    sampling: Sampling
    max_tokens: int | None = None
    stream: bool = False
    tools: Sequence[Mapping[str, Any]] = ()

    def check(self, *, name: str, aliases: Sequence[str], temperature: float) -> None:
        """Check that the policy can answer as it is asked.

        Args:
            name: The name of the policy.
            aliases: Its other names.
            temperature: The temperature at which it answers.

        Raises:
            ModelUnknownError: Another model is asked for.
            ConfigError: Answers are to be drawn otherwise than they are learned from.
        """
        asked = self.sampling
        if asked.model and asked.model not in (name, *aliases):
            raise ModelUnknownError(f"the model {asked.model!r:.80} is not served here; this is {name!r}")
        if asked.temperature not in (None, temperature):
            raise ConfigError(
                f"temperature={asked.temperature:g}, but all answers are sampled at {temperature:g}, at which log-probabilities are recorded; leave "
                "it out, or set that of the gateway (--temperature; in a run rollout.temperature)"
            )
        for field_name, plain in (("top_p", 1.0), ("top_k", 0)):
            if (value := getattr(asked, field_name)) not in (None, plain):
                raise ConfigError(
                    f"{field_name}={value}: answers are drawn from the whole vocabulary, as they are learned; leave it out"
                )


class ModelUnknownError(ConfigError):
    """A model is asked for that is not served."""


class SessionEndedError(DrivetrainError):
    """The session has ended, or is full."""


class SessionsFullError(DrivetrainError):
    """There are as many sessions as there may be."""


class SessionUnknownError(DrivetrainError):
    """There is no such session, or the key is not its own."""


def answer_of(
    request: AnswerRequest,
    index: int,
    text: str,
    *,
    is_cut: bool,
    stop: str = "",
    tokens: Sequence[int] = (),
    whole_text: str = "",
) -> Answer:
    """Return an answer, with the calls of tools that its text holds.

    Args:
        request: The request.
        index: Its number among the answers to the request.
        text: Its text, before the stop string that ended it.
        is_cut: Whether a limit has ended it.
        stop: The stop string that has ended it.
        tokens: Its tokens.
        whole_text: The text of its tokens.
    """
    turn = read_answer(text, tools=request.tools, new_id=new_call_id)
    return Answer(
        index=index, turn=turn, text=text, is_cut=is_cut, stop=stop, tokens=tuple(tokens), whole_text=whole_text or text
    )


def new_call_id() -> str:
    """Return an id for a call of a tool. Some templates want nine letters and digits."""
    return secrets.token_hex(5)[:9]


@dataclass(kw_only=True)
class Usage:
    """The numbers of tokens of a request.

    Args:
        prompt: Those that the policy has read.
        written: Those that it has written.
    """

    prompt: int = 0
    written: int = 0


class AnswerFormat(ABC):
    """How answers to a request are written: all at once, or as the events of a stream, in the order of the methods.

    Args:
        model: The name of the model.
        request: The request.
    """

    def __init__(self, model: str, request: AnswerRequest) -> None:
        self.model, self.request = model, request
        self.usage = Usage()
        """Filled in by whoever answers, before the answer is written; of what is written until then while a stream goes on."""

    @abstractmethod
    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the body with all answers, in the order of their numbers."""

    def begin(self) -> Iterable[bytes]:
        """Return the events at the beginning of a stream."""
        return ()

    @abstractmethod
    def text(self, index: int, text: str) -> Iterable[bytes]:
        """Return the events of a part of an answer's text. Not called for requests with tools, whose text may become a call."""

    @abstractmethod
    def ended(self, answer: Answer, sent: str) -> Iterable[bytes]:
        """Return the events at the end of an answer.

        Args:
            answer: The answer.
            sent: The beginning of its text that was sent before.
        """

    def end(self) -> Iterable[bytes]:
        """Return the events at the end of a stream."""
        return ()

    @abstractmethod
    def error(self, message: str) -> bytes:
        """Return the event of an error, when the status was sent long ago."""


@dataclass(kw_only=True)
class StoredResponses:
    """The conversations of a session that can be gone on with by the id of their last answer.

    Args:
        messages: The messages of each, with the answer, by its id.
    """

    messages: dict[str, tuple[ChatTurn, ...]] = field(default_factory=dict)

    def of(self, response_id: str) -> tuple[ChatTurn, ...]:
        """Return the messages of a conversation.

        Raises:
            ConfigError: There is none of this id.
        """
        if response_id not in self.messages:
            raise ConfigError(f"previous_response_id={response_id!r:.80} is no response of this session")
        return self.messages[response_id]


def named_event(name: str, data: Mapping[str, Any]) -> bytes:
    """Return a part of a stream of server-sent events that have names."""
    return f"event: {name}\ndata: {json.dumps(dict(data))}\n\n".encode()
