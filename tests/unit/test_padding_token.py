"""The padding token of exported classifiers."""

from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config

from drivetrain.engine.hf.padding import padding_token

WORDS = ["a", "b"]


def tokenizer_of(special: list[str], template: str = "", **named: str) -> Any:
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*WORDS, *special])}, unk_token=special[0]))
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=made, additional_special_tokens=special, **named)
    tokenizer.chat_template = template
    return tokenizer


QWEN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|box|>", "<|vision_pad|>"]
LLAMA = ["<unk>", "<s>", "</s>"]
TEMPLATE = "<|im_start|>{{ messages }}<|im_end|>"


@pytest.mark.parametrize(
    ("special", "named", "config", "ends", "wanted"),
    [
        # The tokenizer's own, which pads batches, then the config's, if neither is an end.
        (QWEN, {"eos_token": "<|im_end|>", "pad_token": "<|box|>"}, "<|vision_pad|>", [], "<|box|>"),
        (QWEN, {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}, "<|box|>", [], "<|box|>"),
        # Generation may stop at the tokenizer's; among the others, one with a fitting name, and none of the template.
        (QWEN, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}, None, ["<|endoftext|>"], "<|vision_pad|>"),
        (QWEN[:4], {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}, None, [], "<|box|>"),
        (QWEN[:3], {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}, None, [], None),
        # What begins a text ends none.
        (LLAMA, {"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}, "</s>", [], "<s>"),
        (LLAMA[:2], {"eos_token": "<s>", "unk_token": "<unk>"}, None, [], "<unk>"),
        (LLAMA[:1], {"eos_token": "<unk>", "bos_token": "<unk>", "unk_token": "<unk>"}, "<unk>", [], None),
    ],
)
def test_a_batch_is_padded_with_a_token_that_ends_no_sequence(
    special: list[str], named: dict[str, str], config: str | None, ends: list[str], wanted: str | None
) -> None:
    tokenizer = tokenizer_of(special, TEMPLATE, **named)
    pad = None if config is None else tokenizer.convert_tokens_to_ids(config)
    settings = Qwen3Config(vocab_size=len(tokenizer), pad_token_id=pad, eos_token_id=None, bos_token_id=None)
    token = padding_token(tokenizer, settings, tokenizer.convert_tokens_to_ids(ends))
    assert (token and tokenizer.convert_ids_to_tokens(token)) == wanted


@pytest.mark.parametrize(("pad", "wanted"), [(None, None), (0, 0), (2, None), (-1, None), (9, 9), (10, None)])
def test_without_a_tokenizer_only_the_models_own_token_can_pad(pad: int | None, wanted: int | None) -> None:
    config = Qwen3Config(pad_token_id=pad, vocab_size=10)
    assert padding_token(None, config, {2}) == wanted
