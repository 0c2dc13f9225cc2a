"""The built-in toy task, in which a tiny model learns to add: its data, tokenizer and untrained model, generated from a seed.

Every unordered pair of operands is in exactly one split: training, evaluation during training (which may decide when it ends), or test
afterwards. So no answer of the latter two can have been memorized.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DIGITS = "0123456789"
SPECIAL = ["<pad>", "<end>", "<user>", "<assistant>"]
LIMIT = 100
"""The exclusive upper bound of the operands."""
EVAL, TEST = 150, 450
"""The numbers of held-out unordered pairs, for evaluation and for the test."""

TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def question(a: int, b: int) -> list[dict[str, str]]:
    """Return the user turn of a chat."""
    return [{"role": "user", "content": f"{a}+{b}="}]


def pairs(seed: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]], list[tuple[int, int]]]:
    """Split all operand pairs into those for training, for evaluations and for the test; (a, b) and (b, a) stay together."""
    unordered = [(a, b) for a in range(LIMIT) for b in range(a, LIMIT)]
    random.Random(seed).shuffle(unordered)

    def both(part: list[tuple[int, int]]) -> list[tuple[int, int]]:
        return [pair for a, b in part for pair in ([(a, b)] if a == b else [(a, b), (b, a)])]

    return both(unordered[EVAL + TEST :]), both(unordered[:EVAL]), both(unordered[EVAL : EVAL + TEST])


def write_data(folder: Path, seed: int) -> None:
    """Write `train.jsonl`, `eval.jsonl` and `test.jsonl` in `messages` format."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in zip(("train", "eval", "test"), pairs(seed), strict=True):
        with open(folder / f"{name}.jsonl", "w") as file:
            for a, b in part:
                messages = [*question(a, b), {"role": "assistant", "content": str(a + b)}]
                file.write(json.dumps({"messages": messages}) + "\n")


def write_prompts(folder: Path, seed: int, *, shuffled: bool = False) -> None:
    """Write the questions of `train.jsonl` as `prompts.jsonl` and those of `eval.jsonl` as `held-out.jsonl`, with answers.

    Args:
        folder: The folder.
        seed: The seed of the split.
        shuffled: Whether the answers of `prompts.jsonl` are those of other questions, so that rewards carry no learning signal.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in zip(("prompts", "held-out"), pairs(seed)[:2], strict=True):
        answers = [str(a + b) for a, b in part]
        if shuffled and name == "prompts":
            random.Random(seed).shuffle(answers)
        with open(folder / f"{name}.jsonl", "w") as file:
            for (a, b), answer in zip(part, answers, strict=True):
                file.write(json.dumps({"prompt": question(a, b), "answer": answer}) + "\n")


def make_tokenizer(special: Sequence[str] = SPECIAL) -> Any:
    """Build a tokenizer with one token per character and a chat template.

    Args:
        special: The special tokens; the first two are the padding token and the end token of an answer.
    """
    from tokenizers import Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    words = [*special, *DIGITS, "+", "="]
    # One token per character, so that a model of this size can learn the task, and every position of a sum is a token.
    tokenizer = Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    tokenizer.decoder = Fuse()
    fast: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        additional_special_tokens=list(special[2:]),
        # Generation in plain transformers continues at the end of each row, so padding must be before the text.
        padding_side="left",
    )
    fast.chat_template = TEMPLATE
    return fast


def write_model(folder: Path, seed: int, special: Sequence[str] = SPECIAL) -> None:
    """Write an untrained Qwen3-type model of 0.4 million parameters, with its tokenizer, in Hugging Face format.

    Args:
        folder: The folder of the model.
        seed: The seed of its weights.
        special: The special tokens of its tokenizer.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_tokenizer(special)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    # The seed is only for these weights, which are made on the CPU: leave the random state of the program unchanged.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def accuracy(model_folder: Path, data: Path, show: int = 0) -> float:
    """Compute the fraction of exact answers with greedy decoding, in plain transformers.

    Args:
        model_folder: The folder of the model in Hugging Face format.
        data: A jsonl file written by `write_data`.
        show: The number of questions to print with their answers.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    chats = [json.loads(line)["messages"] for line in data.read_text().splitlines()]
    prompts = [tokenizer.apply_chat_template(c[:1], tokenize=False, add_generation_prompt=True) for c in chats]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False, return_token_type_ids=False)
    with torch.no_grad():
        # A sum has at most three digits, followed by the end token.
        out = model.generate(**inputs, max_new_tokens=4, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    answers = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    for chat, answer in list(zip(chats, answers, strict=True))[:show]:
        print(f"  {chat[0]['content']}{answer}{'' if answer == chat[1]['content'] else '   (wrong)'}")
    return sum(answer == chat[1]["content"] for chat, answer in zip(chats, answers, strict=True)) / len(chats)
