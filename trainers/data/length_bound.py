"""Detection of texts that certainly have too many tokens, without tokenizing them, which takes minutes for millions of tokens.

Let `m(b)` be the number of bytes of the longest token that contains the byte `b`. The bytes of a token of length `l` have `m(b) >= l`, so
the sum of `1 / m(b)` over its bytes is at most 1, and a text has at least as many tokens as that sum over all of its bytes. This holds
where tokens cover the whole text, which is the case for byte-level BPE and BPE with byte fallback. White space does not count, because
tokenizers may drop it, and tokens that strip the text around them cover any amount of it.
"""

import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

QUICK = 100_000
"""Texts of up to this many characters are tokenized without a check."""
SPACES = ("▁", *filter(str.isspace, map(chr, range(128, 0x3001))))
"""Non-ASCII characters that do not count: the one for a space in SentencePiece vocabularies, and white space."""
FORMS = ("NFC", "NFD", "NFKC", "NFKD")
"""Normalizers that leave an already normalized text unchanged."""
HARMLESS = ("Prepend", "Strip")
"""Normalizers that only add text, or drop white space."""
KEEPS = ("ByteLevel", "Metaspace", "Split", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit", "BertPreTokenizer")
"""Pre-tokenizers that drop nothing but white space, unless they remove what they match."""
# The number of bytes that are counted at once: `np.bincount` converts its input to
# int64, which takes eight times the memory.
CHUNK = 2**20


class TooManyTokens(Exception):
    """A text has more tokens than allowed. It is caught where the row is known.

    Args:
        least: A lower bound on its number of tokens.
    """

    def __init__(self, least: int) -> None:
        super().__init__(least)
        self.least = least


class LimitedTokenizer:
    """A wrapper of a tokenizer that rejects texts that certainly have too many tokens.

    Args:
        tokenizer: A fast tokenizer.
        most: The maximum number of tokens.
    """

    def __init__(self, tokenizer: Any, most: int) -> None:
        self._tokenizer, self._most = tokenizer, most

    def __getattr__(self, name: str) -> Any:
        # An object that is being unpickled does not have its attributes yet.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def __call__(self, text: str, **options: Any) -> Any:
        """Tokenize a text.

        Raises:
            TooManyTokens: It certainly has more tokens than allowed.
        """
        self._check(text)
        return self._tokenizer(text, **options)

    def apply_chat_template(self, messages: Any, *, tokenize: bool, **options: Any) -> Any:
        """Render a chat, and tokenize it if `tokenize`.

        Raises:
            TooManyTokens: It certainly has more tokens than allowed.
        """
        if tokenize and sum(len(str(value)) for message in messages for value in message.values()) > max(QUICK, self._most):
            # Options that begin with `return_` are only valid for tokenized output.
            render = {name: value for name, value in options.items() if not name.startswith("return_")}
            self._check(self._tokenizer.apply_chat_template(messages, tokenize=False, **render))
        return self._tokenizer.apply_chat_template(messages, tokenize=tokenize, **options)

    def _check(self, text: Any) -> None:
        if not isinstance(text, str) or len(text) <= max(QUICK, self._most):
            return
        least = self._bound.least(text)
        if least > self._most:
            raise TooManyTokens(least)

    @cached_property
    def _bound(self) -> "LengthBound":
        return LengthBound(self._tokenizer)


class LengthBound:
    """A lower bound on the number of tokens of a text.

    Args:
        tokenizer: A fast tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        pipeline = json.loads(tokenizer.backend_tokenizer.to_str())
        self._normalizers = list(_parts(pipeline["normalizer"], "normalizers"))
        splits = list(_parts(pipeline["pre_tokenizer"], "pretokenizers"))
        # A normalizer may change the text before the tokenizer searches it for added tokens.
        added = [text for token in pipeline["added_tokens"] for text in (token["content"], token["content"].lower())]
        self._longest = _longest_tokens(pipeline["model"], splits, added)
        """`[256]`: `m(b)`; None if tokens may not cover the whole text."""

    def least(self, text: str) -> int:
        """Return a lower bound on the number of tokens of a text; 0 if none is known for this kind of tokenizer.

        Args:
            text: The text.
        """
        normalized = self._normalized(text)
        if self._longest is None or normalized is None:
            return 0
        counts = np.zeros(256, np.int64)
        # Unpaired surrogates are not an error here: tokenizing such a text reports them.
        encoded = np.frombuffer(normalized.encode("utf-8", "surrogatepass"), np.uint8)
        for start in range(0, len(encoded), CHUNK):
            counts += np.bincount(encoded[start : start + CHUNK], minlength=256)
        counts[[byte for byte in range(128) if chr(byte).isspace()]] = 0
        if not normalized.isascii():
            for space in SPACES:
                count = normalized.count(space)
                for byte in space.encode():
                    counts[byte] -= count
        # Subtract more than the rounding error of the sum.
        return int((counts / self._longest).sum() * (1 - 1e-9))

    def _normalized(self, text: str) -> str | None:
        """Return the text as the tokenizer normalizes it, up to white space and added text; None if that is unknown."""
        for normalizer in self._normalizers:
            kind = normalizer["type"]
            if kind in FORMS and (text.isascii() or (unicodedata.is_normalized(kind, text) and _is_assigned(text))):
                continue
            if kind == "Lowercase" and text.isascii():
                text = text.lower()
            elif not (
                kind in HARMLESS
                or (kind == "StripAccents" and text.isascii())
                or (kind == "Replace" and normalizer["pattern"] == {"String": " "})
            ):
                return None
        return text


def _is_assigned(text: str) -> bool:
    """Return whether Python's Unicode database has all characters of a text; the normalization of others is unknown here."""
    return all(unicodedata.category(character) != "Cn" for character in set(text))


def _parts(part: Mapping[str, Any] | None, inner: str) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of a pipeline's step, which may be a sequence of them."""
    if part is None:
        return
    if part["type"] == "Sequence":
        for each in part[inner]:
            yield from _parts(each, inner)
    else:
        yield part


def _keeps(split: Mapping[str, Any]) -> bool:
    return split["type"] in KEEPS and split.get("behavior") != "Removed"


def _splits_characters(splits: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether pre-tokens have one character, or consist of line breaks, which `.` does not match."""
    if len(splits) != 1 or splits[0]["type"] != "Split":
        return False
    return splits[0]["pattern"] == {"Regex": "."} and splits[0]["behavior"] == "Isolated" and not splits[0]["invert"]


def _longest_tokens(
    model: Mapping[str, Any], splits: Sequence[Mapping[str, Any]], added: Sequence[str]
) -> NDArray[np.float64] | None:
    """Return `m(b)` of every byte; None if parts of a text may have no token, or one of any length."""
    # Start at 1: at least every byte on its own is a token.
    tokens, longest = model["vocab"], np.ones(256)
    written: list[bytes] = []
    if _splits_characters(splits) and model["type"] != "Unigram" and model.get("unk_token") in tokens:
        # Every character is a token, known or not, whose bytes are at most four.
        longest[128:] = 4
    elif model["type"] != "BPE" or not all(map(_keeps, splits)):
        return None
    elif any(split["type"] == "ByteLevel" for split in splits):
        # Importing the tokenizer modules of transformers is slow, so import them only here.
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
        if not all(character in tokens for character in byte_of):
            return None
        written = [bytes(byte_of.get(character, 0) for character in token) for token in tokens]
    elif model.get("byte_fallback") and all(f"<0x{byte:02X}>" in tokens for byte in range(256)):
        written = [token.encode() for token in tokens]
    else:
        return None
    for token in (*written, *(content.encode() for content in added)):
        # White space does not count in the text, so it does not count in tokens either.
        visible = token.translate(None, b" \t\n\r\f\v").replace(SPACES[0].encode(), b"")
        if visible:
            present = np.frombuffer(visible, np.uint8)
            longest[present] = np.maximum(longest[present], len(visible))
    return longest
