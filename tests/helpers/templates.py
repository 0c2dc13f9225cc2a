"""Chat templates of different habits, and a tokenizer for them."""

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from drivetrain.trainers.template.check import TEXTS

CALLS = "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}"
CHATML = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}" + CALLS + "<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
STRIPS = CHATML.replace("{{ m.content }}", "{{ m.content | trim }}")
DROPS_THOUGHTS = CHATML.replace(
    "{{ m.content }}",
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}",
)
# The end of the last message is another one than that of those before, as gpt-oss has it.
OTHER_END = CHATML.replace("<e>\n", "{{ '<r>' if loop.last and m.role == 'assistant' else '<e>' }}\n")
NO_END = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    + CALLS
    + "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
ONLY_CHATS = "{% if messages[-1].role == 'tool' or tools %}{{ raise_exception('no tools here') }}{% endif %}" + CHATML
TAKES_TEXT = CHATML.replace("{{ call.function | tojson }}", "{{ call.function.name + call.function.arguments }}")
ADDED = ["<s>", "<e>", "<r>", "<user>", "<assistant>", "<tool>", "<system>"]


def tokenizer(template: str, *, added: list[str] = ADDED) -> Any:
    """A tokenizer of bytes, in which frequent pairs are merged."""
    bytes_of_text = Tokenizer(models.BPE())
    bytes_of_text.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_of_text.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=added, show_progress=False
    )
    bytes_of_text.train_from_iterator([":4" * 50, *TEXTS], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=bytes_of_text, eos_token=added[1] if len(added) > 1 else None)
    fast.chat_template = template
    return fast
