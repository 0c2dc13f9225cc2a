"""The response formats of the OpenAI API."""

import base64
import secrets
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...generation.tokens import Token
from .responses import CompletionPiece, Response
from .text import Texts


class CompletionFormat:
    """The format of the response to one request.

    Args:
        chat: Whether it is a chat.
        model: The name of the model.
        texts: The tokenizer.
        log_probs: Whether the response includes log-probabilities.
        token_ids: Whether the response includes token ids.
    """

    def __init__(self, *, chat: bool, model: str, texts: Texts, log_probs: bool, token_ids: bool) -> None:
        self._chat, self._texts, self._log_probs, self._token_ids = chat, texts, log_probs, token_ids
        kind = "chat.completion" if chat else "text_completion"
        prefix = "chatcmpl" if chat else "cmpl"
        self._base = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._whole, self._part = {"object": kind}, {"object": f"{kind}.chunk" if chat else kind}
        self._begun: set[int] = set()
        self._offsets: dict[int, int] = {}

    def answer(self, responses: Sequence[Response], usage: dict[str, int]) -> dict[str, Any]:
        """Return a response with all completions."""
        choices = []
        for response in responses:
            text = response.writer.text
            content = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
            choices.append(self._choice(response, content, response.tokens, response.finish_reason))
        return {**self._base, **self._whole, "choices": choices, "usage": usage}

    def chunk(self, piece: CompletionPiece) -> dict[str, Any] | None:
        """Return a piece of a completion as an event of a stream; None if it has nothing for the client."""
        response = piece.response
        details = (self._log_probs or self._token_ids) and piece.tokens
        if not piece.text and not piece.ended and not details:
            return None
        content: dict[str, Any] = {"text": piece.text}
        if self._chat:
            delta = {"content": piece.text} if piece.text or not piece.ended else {}
            # Clients take the role from the first chunk of a completion.
            if response.index not in self._begun:
                delta = {"role": "assistant", "content": "", **delta}
                self._begun.add(response.index)
            content = {"delta": delta}
        choice = self._choice(response, content, piece.tokens, response.finish_reason if piece.ended else None)
        return {**self._base, **self._part, "choices": [choice]}

    def usage_chunk(self, usage: dict[str, int]) -> dict[str, Any]:
        """Return the token counts as the last event of a stream."""
        return {**self._base, **self._part, "choices": [], "usage": usage}

    def _choice(
        self, response: Response, content: dict[str, Any], tokens: Sequence[Token], reason: str | None
    ) -> dict[str, Any]:
        choice = {"index": response.index, **content, "finish_reason": reason, "logprobs": None}
        if self._log_probs:
            choice["logprobs"] = self._chat_log_probs(tokens) if self._chat else self._log_probs_of(response, tokens)
        if self._token_ids:
            choice["token_ids"] = [token.token for token in tokens]
            choice["weight_versions"] = [token.version for token in tokens]
            # Once, with the last chunk: a prompt may be much longer than a chunk.
            if reason is not None:
                choice["prompt_token_ids"] = response.prompt
        return choice

    def _chat_log_probs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        entries = []
        for token in tokens:
            text = self._texts.token(token.token)
            entries.append({"token": text, "logprob": token.log_prob, "bytes": list(text.encode()), "top_logprobs": []})
        return {"content": entries, "refusal": None}

    def _log_probs_of(self, response: Response, tokens: Sequence[Token]) -> dict[str, Any]:
        # Offsets count the characters of all chunks of a completion.
        offset = self._offsets.get(response.index, 0)
        texts, offsets = [self._texts.token(token.token) for token in tokens], []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        self._offsets[response.index] = offset
        log_probs = [token.log_prob for token in tokens]
        return {"tokens": texts, "token_logprobs": log_probs, "top_logprobs": None, "text_offset": offsets}


def usage_of(prompts: Sequence[Sequence[int]], responses: Sequence[Response]) -> dict[str, int]:
    """Return the token counts of a request: each prompt counts once, including its images."""
    # Only a chat has images, and it has one prompt. The worker counts the tokens of images, so the difference is added.
    images = max(
        (response.prompt_tokens - len(response.prompt) for response in responses if response.prompt_tokens), default=0
    )
    prompt, completion = sum(map(len, prompts)) + images, sum(len(response.tokens) for response in responses)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def embedding_answer(model: str, embeddings: Sequence[Any], tokens: int, encoding: str) -> dict[str, Any]:
    """Return a response with embeddings.

    Args:
        model: The name of the model.
        embeddings: The embeddings, tensors `[D]`.
        tokens: The number of tokens of all texts.
        encoding: `float` for lists of numbers, `base64` for float32 in little endian.
    """
    arrays = [np.asarray(one.tolist(), dtype="<f4") for one in embeddings]
    data = [
        {
            "object": "embedding",
            "index": i,
            "embedding": base64.b64encode(array.tobytes()).decode() if encoding == "base64" else array.tolist(),
        }
        for i, array in enumerate(arrays)
    ]
    return {"object": "list", "model": model, "data": data, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
