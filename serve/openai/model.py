"""The served model as the service sees it: tokenization, limits, chats."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig

from ...engine.errors import ConfigError
from ...engine.hf.shape import context_of
from ...engine.hf.weights import WeightFolder
from ...generation.embeddings.folder import read_folder
from ...generation.options import SamplingOptions
from ...trainers.chat import CHAT_SETTINGS
from .schema import Sampling
from .text import Texts


class ServedModel:
    """The served model.

    Args:
        folder: Its folder.
        generates: Whether it generates text; otherwise it embeds texts.
        room: The maximum number of tokens of a prompt and its completion together; None until `limit` is called.
        aliases: Other names that requests may use for it.
        trust_remote_code: Whether code in the folder may run.

    Raises:
        ModelError: It has no tokenizer, or its folder is damaged.
    """

    def __init__(
        self, folder: Path, *, generates: bool, room: int | None, aliases: Sequence[str] = (), trust_remote_code: bool = False
    ) -> None:
        self.generates, self.aliases = generates, tuple(aliases)
        self._folder = folder
        self.texts = Texts(folder, trust_remote_code=trust_remote_code)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        context = context_of(config.get_text_config())
        # 0 and None mean that there is no limit from that side.
        self._room = min(room or sys.maxsize, context or sys.maxsize)
        self._embedding = None if generates else read_folder(folder)

    def limit(self, room: int) -> None:
        """Set the maximum number of tokens of a prompt and its completion together, at most the model's positions."""
        self._room = min(self._room, room)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the model's tensors, keyed by their names on disk."""
        return WeightFolder(self._folder, str).shapes()

    def check_length(self, characters: int) -> None:
        """Reject a text that cannot fit, before it is tokenized.

        Raises:
            ConfigError: It has more characters than any text of that many tokens.
        """
        # A cheap bound, so that no thread spends minutes on tokenizing a text that is refused afterwards.
        if characters > self._room * _MAX_CHARACTERS:
            raise ConfigError(f"the text has {characters} characters, which cannot fit into {self._room} tokens; shorten it")

    def options(self, body: Sampling, prompt: int, max_tokens: int | None) -> SamplingOptions:
        """Return the sampling options of a request.

        Args:
            body: The request.
            prompt: The number of tokens of the prompt.
            max_tokens: The length limit of the request; None for all that fits.

        Raises:
            ConfigError: The prompt leaves no room for a completion, or an option is out of range.
        """
        room = self._room - prompt
        if room < 1:
            raise ConfigError(
                f"the prompt has {prompt} tokens, which leaves no room for a completion in {self._room}; shorten it"
            )
        settings = _client_settings(body)
        temperature = body.temperature if body.temperature is not None else settings.get("temperature", 1.0)
        return SamplingOptions(
            # A limit that is too large is shortened to what fits, instead of refused.
            max_tokens=min(max_tokens or settings.get("max_new_tokens") or room, room),
            temperature=float(temperature),
            top_p=float(body.top_p if body.top_p is not None else settings.get("top_p", 1.0)),
            top_k=body.top_k if body.top_k is not None else settings.get("top_k", 0),
            stop_tokens=tuple(body.stop_token_ids),
            ignore_eos=body.ignore_eos,
            seed=body.seed,
        )

    def embedding_tokens(self, text: str) -> list[int]:
        """Return the tokens of a text to embed, with the prompt and the length limit that the model folder specifies."""
        assert self._embedding is not None
        ids = self.texts.encode(self._embedding.prompt + text)
        limit = self._embedding.max_tokens
        # Truncated by the tokenizer, which keeps special tokens at the end, such as the one that is pooled.
        return ids if limit is None or len(ids) <= limit else self._truncated(self._embedding.prompt + text, limit)

    def _truncated(self, text: str, limit: int) -> list[int]:
        ids: list[int] = self.texts.tokenizer(text, truncation=True, max_length=limit)["input_ids"]
        return ids

    def parse_messages(self, messages: Sequence[dict[str, Any]], max_images: int) -> tuple[list[dict[str, Any]], list[str]]:
        """Return messages for the chat template, and the data URIs of their images.

        Raises:
            ConfigError: A message has no role, its content has an unsupported type, or there are too many images.
        """
        parsed: list[dict[str, Any]] = []
        images: list[str] = []
        for i, message in enumerate(messages):
            content = message.get("content")
            if not isinstance(message.get("role"), str) or not isinstance(content, str | list):
                raise ConfigError(f"messages.{i} needs a role and a content, which is a text or a list of parts")
            if isinstance(content, list):
                content = [_part(i, part, images) for part in content]
                # As a plain text, because templates of text models take no lists of parts.
                if all(part["type"] == "text" for part in content):
                    content = "".join(part["text"] for part in content)
            parsed.append({"role": message["role"], "content": content})
        if len(images) > max_images:
            raise ConfigError(f"the messages have {len(images)} images; at most {max_images} are allowed")
        return parsed, images


def _part(number: int, part: Any, images: list[str]) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "image_url":
        image = part.get("image_url")
        uri = image.get("url") if isinstance(image, dict) else image
        # URLs are refused, because fetching them would let clients reach other machines through this one.
        if not isinstance(uri, str) or not uri.startswith("data:image/"):
            raise ConfigError(f"messages.{number}: images are accepted only as data URIs (data:image/png;base64,...)")
        images.append(uri)
        return {"type": "image"}
    raise ConfigError(f"messages.{number}: a part of type {kind!r} is not supported; only text and image_url")


def _client_settings(body: Sampling) -> dict[str, Any]:
    """Return the settings that the chat client of transformers sends in a separate field."""
    if body.generation_config is None:
        return {}
    try:
        settings = json.loads(body.generation_config)
    except ValueError as e:
        raise ConfigError(f"generation_config is not valid JSON: {e}") from None
    if not isinstance(settings, dict):
        raise ConfigError("generation_config is not a JSON object")
    defaults = GenerationConfig().to_dict()
    client_settings: dict[str, Any] = {}
    for name, value in settings.items():
        kind = CHAT_SETTINGS.get(name)
        if value is None or name in _NO_SETTINGS:
            continue
        if kind is None:
            if value != defaults.get(name):
                raise ConfigError(f"generation_config.{name}={value!r:.50}: this service does not support it; remove it")
        # In Python, True is an int, but not a number of tokens.
        elif isinstance(value, bool) != (kind is bool) or not isinstance(value, int | float if kind is float else kind):
            raise ConfigError(f"generation_config.{name}={value!r:.50}; it must be a {kind.__name__}")
        else:
            client_settings[name] = value
    # Greedy decoding is temperature 0 here.
    if client_settings.pop("do_sample", None) is False:
        client_settings["temperature"] = 0.0
    return client_settings


_NO_SETTINGS = ("bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "_from_model_config", "use_cache")
_MAX_CHARACTERS = 64
"""The maximum number of characters per token, for the check of texts that cannot fit."""
