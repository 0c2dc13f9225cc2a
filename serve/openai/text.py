"""Tokenization of prompts and chats, and incremental decoding of completions."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer

from ...engine.errors import ConfigError, ModelError
from ...engine.hf.tokenizer import TOKENIZER_FILES
from ...trainers.data.media import for_template, lists_content


class Texts:
    """The tokenizer of a model.

    Args:
        folder: The model's folder.
        trust_remote_code: Whether code in it may run.

    Raises:
        ModelError: It has no tokenizer, or one that cannot decode token by token.
    """

    def __init__(self, folder: Path, *, trust_remote_code: bool = False) -> None:
        # From a folder with only a config, transformers builds an empty tokenizer, which finds no tokens in any text.
        if not any((folder / file).is_file() for file in TOKENIZER_FILES):
            raise ModelError(f"{folder} has no tokenizer ({', '.join(TOKENIZER_FILES)}); copy its files next to config.json")
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        except (OSError, ValueError, KeyError) as e:
            raise ModelError(f"{folder} has no usable tokenizer: {e}") from e
        self._backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if self._backend is None:
            raise ModelError(
                f"the tokenizer of {folder} is not from the tokenizers library, so it cannot decode token by token"
            )

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt.

        Raises:
            UnicodeError: It has an unpaired surrogate, which the tokenizer would report as a wrong type.
        """
        # Only for the error that it may raise.
        text.encode()
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def token(self, token: int) -> str:
        """Return the text of a single token."""
        text: str = self.tokenizer.decode([token])
        return text

    @cached_property
    def _lists_content(self) -> bool:
        return lists_content(self.tokenizer)

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Return the tokens of a conversation, with the generation prompt.

        Raises:
            ConfigError: The tokenizer has no chat template, or the template rejects the messages.
        """
        if not self.tokenizer.chat_template:
            raise ConfigError("the model's tokenizer has no chat template; use /v1/completions, or train on chats")
        try:
            encoded = self.tokenizer.apply_chat_template(
                for_template(messages, lists=self._lists_content), add_generation_prompt=True, tokenize=True, return_dict=True
            )
        except Exception as e:  # templates raise anything on unexpected messages
            raise ConfigError(f"the messages do not fit the model's chat template: {e}") from e
        ids: list[int] = encoded["input_ids"]
        return ids

    def stream(self, stops: Sequence[str]) -> "TextStream":
        """Return an incremental decoder, which stops before any of the stop strings."""
        return TextStream(self._backend, stops)


class TextStream:
    """The incrementally decoded text of a completion.

    Args:
        backend: The tokenizer.
        stops: The strings before which the text ends.
    """

    def __init__(self, backend: Any, stops: Sequence[str]) -> None:
        self._backend, self._stops = backend, [stop for stop in stops if stop]
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._held = ""
        self._tokens: list[int] = []
        self.text = ""
        """All text returned so far."""
        self.stop = ""
        """The stop string that ended the text, if any."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return bool(self.stop)

    def add(self, token: int) -> str:
        """Add a token; return the text that is final by now, which cannot be the beginning of a stop string."""
        if self.stopped:
            return ""
        self._tokens.append(token)
        # None while a character is incomplete: one character may be spread over several tokens.
        self._held += self._decoder.step(self._backend, token) or ""
        positions = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if positions:
            # The first stop string in the text, not the first one in the list.
            at, self.stop = min(positions)
            return self._give(at)
        # What may be the beginning of a stop string is held back, until the next tokens show whether it is.
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        return self._give(len(self._held) - keep)

    def end(self) -> str:
        """Return the held-back text at the end of the completion: a partial character, or the beginning of a stop string."""
        if self.stopped:
            return ""
        # The decoder never returns an incomplete character at the end; decoding everything at once does.
        whole = str(self._backend.decode(self._tokens, skip_special_tokens=True))
        if whole.startswith(self.text + self._held):
            self._held = whole[len(self.text) :]
        return self._give(len(self._held))

    def _give(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        self.text += text
        return text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of a text that is a prefix of a stop string."""
    # At most all but one character: a whole stop string would have been found.
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
