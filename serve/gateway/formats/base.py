"""The base classes of the APIs."""

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
    """A request for completions of the policy.

    Args:
        conversation: The conversation or prompt to continue.
        sampling: The number of completions, their stop strings, and further options of the OpenAI API.
        max_tokens: The maximum number of tokens of a completion; None for as many as are allowed.
        stream: Whether completions are sent while they are generated.
        tools: The tools that the policy may call, as JSON schemas.
    """

    conversation: Conversation
    sampling: Sampling
    max_tokens: int | None = None
    stream: bool = False
    tools: Sequence[Mapping[str, Any]] = ()

    def check(self, *, name: str, aliases: Sequence[str], temperature: float) -> None:
        """Check that the policy supports the request's options.

        Args:
            name: The name of the policy.
            aliases: Its other names.
            temperature: Its sampling temperature.

        Raises:
            ModelUnknownError: The request names another model.
            ConfigError: The request asks for a sampling distribution other than the one that training assumes.
        """
        asked = self.sampling
        if asked.model and asked.model not in (name, *aliases):
            raise ModelUnknownError(f"the model {asked.model!r:.80} is not served here; this is {name!r}")
        if asked.temperature not in (None, temperature):
            raise ConfigError(
                f"temperature={asked.temperature:g}, but all completions are sampled at {temperature:g}, at which log-probabilities are recorded; "
                "remove it, or set that of the gateway (--temperature; in a run rollout.temperature)"
            )
        # Values that change nothing are accepted.
        for field_name, plain in (("top_p", 1.0), ("top_k", 0)):
            if (value := getattr(asked, field_name)) not in (None, plain):
                raise ConfigError(
                    f"{field_name}={value}: completions are sampled from the whole vocabulary, as training assumes; remove it"
                )


class ModelUnknownError(ConfigError):
    """A request names a model that is not served."""


class SessionEndedError(DrivetrainError):
    """The session has ended, or is full."""


class SessionsFullError(DrivetrainError):
    """The limit on open sessions is reached."""


class SessionUnknownError(DrivetrainError):
    """There is no such session, or the key belongs to another one."""


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
    """Return a completion, with the tool calls in its text.

    Args:
        request: The request.
        index: Its index in the request.
        text: Its text, up to the stop string that ended it.
        is_cut: Whether a limit ended it.
        stop: The stop string that ended it.
        tokens: Its tokens.
        whole_text: The text of its tokens.
    """
    turn = read_answer(text, tools=request.tools, new_id=new_call_id)
    return Answer(
        index=index, turn=turn, text=text, is_cut=is_cut, stop=stop, tokens=tuple(tokens), whole_text=whole_text or text
    )


def new_call_id() -> str:
    """Return an id for a tool call. Some templates require nine letters and digits."""
    # Five random bytes are ten hexadecimal digits, of which nine are kept.
    return secrets.token_hex(5)[:9]


@dataclass(kw_only=True)
class Usage:
    """The token counts of a request.

    Args:
        prompt: The number of tokens that the policy has read.
        written: The number of tokens that it has written.
    """

    prompt: int = 0
    written: int = 0


class AnswerFormat(ABC):
    """The format of a response: a single body, or the events of a stream, in the order of the methods.

    Args:
        model: The name of the model.
        request: The request.
    """

    def __init__(self, model: str, request: AnswerRequest) -> None:
        self.model, self.request = model, request
        self.usage = Usage()
        """Filled in by the server before the response is written; during a stream, it counts the tokens so far."""

    @abstractmethod
    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the body with all completions, in the order of their indices."""

    def begin(self) -> Iterable[bytes]:
        """Return the events at the beginning of a stream."""
        return ()

    @abstractmethod
    def text(self, index: int, text: str) -> Iterable[bytes]:
        """Return the events of a piece of text. Not called for requests with tools, whose text may turn out to be a call."""

    @abstractmethod
    def ended(self, answer: Answer, sent: str) -> Iterable[bytes]:
        """Return the events at the end of a completion.

        Args:
            answer: The completion.
            sent: The beginning of its text that was already sent.
        """

    def end(self) -> Iterable[bytes]:
        """Return the events at the end of a stream."""
        return ()

    @abstractmethod
    def error(self, message: str) -> bytes:
        """Return the event of an error that occurs after the status was sent."""


@dataclass(kw_only=True)
class StoredResponses:
    """The conversations of a session that requests can continue by the id of their last response.

    Args:
        messages: The messages of each conversation including the response, keyed by the response's id.
    """

    messages: dict[str, tuple[ChatTurn, ...]] = field(default_factory=dict)

    def of(self, response_id: str) -> tuple[ChatTurn, ...]:
        """Return the messages of a conversation.

        Raises:
            ConfigError: There is no response with this id.
        """
        if response_id not in self.messages:
            raise ConfigError(f"previous_response_id={response_id!r:.80} is not a response of this session")
        return self.messages[response_id]


def named_event(name: str, data: Mapping[str, Any]) -> bytes:
    """Return a named event of a server-sent event stream."""
    return f"event: {name}\ndata: {json.dumps(dict(data))}\n\n".encode()
