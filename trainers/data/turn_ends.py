"""The tokens that end an assistant turn.

Most templates write such a token after each assistant turn. Those of GLM write none: generation stops at the token that opens the next
turn, `<|user|>` or, after a tool call, `<|observation|>`. A model learns to stop only if it is trained on that token.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Self

from ...engine.config import ModelConfig
from ...engine.hf.generation import end_tokens


def ends_to_learn(model: ModelConfig) -> frozenset[int] | None:
    """Return the ids of the tokens at which generation with a model stops; None for a value head, which scores chats as they are rendered.

    Raises:
        ModelError: The model's config or its generation settings cannot be read.
    """
    return end_tokens(model) if model.head == "lm" else None


@dataclass(frozen=True)
class TurnEnds:
    """The tokens that may end a turn, as texts.

    Args:
        stopping: The tokens at which generation stops.
        special: All special tokens. A template may end its turns with one that is not in `stopping`; generation must then be set to stop
            at it.
    """

    stopping: tuple[str, ...]
    special: tuple[str, ...]

    @classmethod
    def of(cls, tokenizer: Any, ends: Collection[int]) -> Self:
        """Look up the tokens in a tokenizer.

        Args:
            tokenizer: The model's tokenizer.
            ends: The ids of the tokens at which generation stops; the tokenizer's end-of-sequence token is added to them.
        """
        # Only added tokens are recognized at any place in a text.
        added = tokenizer.added_tokens_decoder
        # Some tokenizers list a special token only in one of the two places.
        special = (*(token.content for token in added.values() if token.special), *tokenizer.all_special_tokens)
        stopping = [added[i].content for i in {*ends, tokenizer.eos_token_id} if i in added]
        return cls(tuple(stopping), tuple(dict.fromkeys(special)))

    def ended(self, completion: str) -> bool:
        """Return whether the text of a turn contains its end, after which only white space may follow."""
        return completion.rstrip().endswith((*self.stopping, *self.special))

    def opening(self, following: str) -> str:
        """Return the stop token with which the text after a turn begins, or an empty text."""
        return next((token for token in self.stopping if following.startswith(token)), "")
