"""The request bodies of the OpenAI API that the service accepts. Unknown fields are ignored."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, StrictBool, model_validator

TokenIds = list[Annotated[int, Field(ge=0, lt=2**31)]]
Stop = str | Annotated[list[str], Field(max_length=16)] | None


class Sampling(BaseModel):
    """The fields that requests for text share.

    Unsupported fields are rejected rather than silently ignored: penalties, biases, tools, response formats, templates.
    """

    refused: ClassVar[tuple[str, ...]] = (
        "frequency_penalty",
        "presence_penalty",
        "logit_bias",
        "tools",
        "functions",
        "chat_template",
    )
    """The fields that must be empty."""

    model: str = ""
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1)] = 1
    stop: Stop = None
    stop_token_ids: TokenIds = []
    ignore_eos: bool = False
    seed: int | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool = False
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    generation_config: str | None = None

    @model_validator(mode="after")
    def _refuse(self) -> "Sampling":
        refused = [name for name in self.refused if getattr(self, name)]
        if self.response_format and self.response_format.get("type") != "text":
            refused.append("response_format")
        if self.chat_template_kwargs:
            refused.append("chat_template_kwargs")
        if refused:
            raise ValueError(f"{', '.join(refused)}: this service does not support it; remove it")
        return self

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with token counts."""
        return bool((self.stream_options or {}).get("include_usage"))


class CompletionRequest(Sampling):
    """A request for a completion of a prompt, which is a text or token ids."""

    prompt: str | TokenIds | list[str] | list[TokenIds]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    # The API's number of alternatives: 0 is the log-probability of the token itself, and alternatives are not
    # supported.
    logprobs: Annotated[int, Field(ge=0, le=0)] | StrictBool | None = None
    echo: Literal[False] = False
    suffix: None = None
    best_of: Literal[1] | None = None

    def length(self, default: int) -> int | None:
        """Return the length limit when the request has none: the chat client's own, or the default of this path."""
        return None if self.generation_config else default

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        # A flat list of numbers is a single prompt of token ids, not several prompts. An empty list has no prompts.
        if self.prompt and all(isinstance(one, int) for one in self.prompt):
            return [[one for one in self.prompt if isinstance(one, int)]]
        return [one for one in self.prompt if not isinstance(one, int)]

    @property
    def wants_log_probs(self) -> bool:
        """Whether the response includes log-probabilities."""
        return self.logprobs is not None and self.logprobs is not False


class ChatRequest(Sampling):
    """A request for the next message of a conversation."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None

    @property
    def wants_log_probs(self) -> bool:
        """Whether the response includes log-probabilities."""
        return bool(self.logprobs)


class EmbeddingRequest(BaseModel):
    """A request for the embeddings of inputs, which are texts or token ids."""

    model: str = ""
    input: str | TokenIds | list[str] | list[TokenIds]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None

    def texts(self) -> list[str | list[int]]:
        """Return the texts."""
        if isinstance(self.input, str):
            return [self.input]
        if self.input and all(isinstance(one, int) for one in self.input):
            return [[one for one in self.input if isinstance(one, int)]]
        return [one for one in self.input if not isinstance(one, int)]


class ModelName(BaseModel):
    """The name of a model."""

    model: str


class WeightsRequest(BaseModel):
    """A request to load new weights."""

    name: str
