"""A tiny model with a tokenizer of bytes, in which a character may take several tokens."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from drivetrain.engine.conformance.tiny import save_tiny_model

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{{ p['text'] if p['type'] == 'text' else '<image>' }}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SPECIAL = ["<pad>", "<s>", "</s>"]
VOCABULARY = len(SPECIAL) + 256


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate([*SPECIAL, *alphabet])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    found.chat_template = TEMPLATE
    return found


def save_text_model(folder: Path, family: str = "qwen3", *, seed: int = 0, **overrides: Any) -> Path:
    """Write the model."""
    save_tiny_model(folder, family, seed=seed, vocab_size=VOCABULARY, max_position_embeddings=512, **overrides)
    byte_tokenizer().save_pretrained(folder)
    return folder
