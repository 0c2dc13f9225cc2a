"""The padding token of an exported sequence classifier.

Transformers' classifiers score a sequence at its last token that is not `pad_token_id`, and training scores it at its last token. Both
are the same token only if no sequence ends with the padding token. Many models violate this: their padding token is the end-of-sequence
token.
"""

from collections.abc import Collection
from typing import Any

from transformers import PreTrainedConfig


def padding_token(tokenizer: Any | None, config: PreTrainedConfig, ends: Collection[int]) -> int | None:
    """Return a token that pads a batch and never ends a sequence; None if the vocabulary has none.

    The model's own padding token is kept if possible. Otherwise it is a special token that the chat template does not use, preferably not
    one that begins a text or stands for unknown text.

    Args:
        tokenizer: The model's tokenizer; None if it has none.
        config: The model's config.
        ends: The ids of the tokens that end generation.
    """
    if tokenizer is None:
        return config.pad_token_id if _fits(config.pad_token_id, config, ends) else None
    ends = {*ends, tokenizer.eos_token_id}
    special = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    template = str(tokenizer.chat_template or "")
    late = (tokenizer.bos_token_id, tokenizer.unk_token_id)
    unused = [i for i, content in special.items() if content not in template and i not in late]
    # Some vocabularies contain a token for this purpose that their tokenizer does not declare.
    unused.sort(key=lambda i: ("pad" not in special[i].lower(), i))
    candidates = (tokenizer.pad_token_id, config.pad_token_id, *unused, *late)
    return next((i for i in candidates if _fits(i, config, ends)), None)


def _fits(token: int | None, config: PreTrainedConfig, ends: Collection[int]) -> bool:
    return token is not None and 0 <= token < config.get_text_config().vocab_size and token not in ends
