"""Messages of requests that share a model: single prompts whose tokens are streamed, and texts to embed."""

from typing import Any, ClassVar

from msgspec import Struct

from .messages import U32, Count, Id, Reply, Request


class Stream(Request, kw_only=True):
    """Generate a completion. Needs an id. Its tokens arrive in `tokens` messages before the reply.

    Args:
        role: The role, whose worker has a generator.
        prompt: The token ids of the prompt.
        options: The sampling options; null uses the default ones.
        row: The number of the prompt, which seeds the completion together with the seed of the options and `sample`.
        sample: The number of the completion among those to the prompt.
        images: The images of the prompt as data URIs, in the order of its image tokens.
    """

    values: ClassVar[tuple[str, ...]] = ("options",)

    role: str
    prompt: list[U32]
    options: Any = None
    row: Count = 0
    sample: Count = 0
    images: list[str] = []


class StreamOk(Reply, kw_only=True):
    """The reply to `stream`.

    Args:
        finish_reason: Why the completion ended: `stop`, `length`, or `aborted` after a `cancel`.
        prompt_tokens: The number of tokens of the prompt, including those of its images; 0 if generation did not begin.
    """

    finish_reason: str
    prompt_tokens: Count = 0


class NewTokens(Struct, array_like=True):
    """Tokens of a completion.

    Args:
        request: The id of the request.
        tokens: The token ids.
        log_probs: Their log-probabilities.
        version: The version of the weights that generated them.
    """

    request: Id
    tokens: list[U32]
    log_probs: list[float]
    version: int


class Tokens(Reply, kw_only=True):
    """The tokens that a step of a generator has added to its running completions. Sent unprompted, without an id.

    Args:
        responses: The tokens of each completion.
    """

    responses: list[NewTokens]


class Embed(Request, kw_only=True):
    """Compute the embedding of a text. Needs an id.

    Args:
        role: The role, whose worker has an embedding model.
        tokens: The token ids of the text.
    """

    role: str
    tokens: list[U32]


class EmbedOk(Reply, kw_only=True):
    """The reply to `embed`.

    Args:
        embedding: The embedding `[D]` in float32.
    """

    values: ClassVar[tuple[str, ...]] = ("embedding",)

    embedding: Any
