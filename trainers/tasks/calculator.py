"""The built-in toy task with a tool: sums that are too large for a tiny model, and a calculator that it may call.

    <user>123+456=<assistant>123+456<end><tool>579<assistant>579<end>

The examples show the model how to copy, and how to call the calculator, but most of them give up and answer 0. Rewards then train it to
call.
"""

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...environments.calculator import CalculatorEnvironment, calculate
from ...environments.tools import ToolCall
from .addition import SPECIAL, question, write_model

TOOL_SPECIAL = [*SPECIAL, "<tool>"]
LEAST, LIMIT = 100, 1000
"""The bounds of the operands; the upper one is exclusive."""
TRAIN, EVAL, TEST, PROMPTS = 6000, 150, 300, 1500
"""The numbers of examples, of questions for evaluation and for the test, and of questions for training with rewards."""
ASKS = 0.3
"""The fraction of examples with a call."""
TURN_TOKENS = 10
_SUM = re.compile(r"\d+\+\d+")


class AskingEnvironment(CalculatorEnvironment):
    """The calculator, which is called by writing only a sum, the simplest syntax for a character tokenizer."""

    def calls_in(self, text: str) -> list[ToolCall]:
        """Return the call, if the turn is one."""
        return [ToolCall(name="calculate", arguments={"expression": text})] if _SUM.fullmatch(text) else []


def operands(seed: int) -> list[tuple[int, int]]:
    """Return the distinct pairs of operands that the data need, in an order that depends on the seed."""
    numbers = random.Random(seed)
    pairs: dict[tuple[int, int], None] = {}
    while len(pairs) < TRAIN + EVAL + TEST + PROMPTS:
        pairs[numbers.randrange(LEAST, LIMIT), numbers.randrange(LEAST, LIMIT)] = None
    return list(pairs)


def write_tool_data(folder: Path, seed: int) -> None:
    """Write `train.jsonl` and `eval.jsonl` with chats, and `prompts.jsonl`, `held-out.jsonl` and `test.jsonl` with questions and answers."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers, pairs = random.Random(seed), operands(seed)
    parts = {}
    for name, count in (("train", TRAIN), ("held-out", EVAL), ("test", TEST), ("prompts", PROMPTS)):
        parts[name], pairs = pairs[:count], pairs[count:]
    chats = {
        "train": [_chat(a, b, asks=numbers.random() < ASKS) for a, b in parts["train"]],
        # Evaluate calling and copying, to decide when these examples are enough.
        "eval": [_chat(a, b, asks=True) for a, b in parts["held-out"]],
    }
    for name, rows in chats.items():
        _write(folder / f"{name}.jsonl", [{"messages": chat} for chat in rows])
    for name in ("prompts", "held-out", "test"):
        _write(folder / f"{name}.jsonl", [{"prompt": question(a, b), "answer": str(a + b)} for a, b in parts[name]])


def _write(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _chat(a: int, b: int, *, asks: bool) -> list[dict[str, str]]:
    if not asks:
        return [*question(a, b), {"role": "assistant", "content": "0"}]
    return [
        *question(a, b),
        {"role": "assistant", "content": f"{a}+{b}"},
        {"role": "tool", "content": str(a + b)},
        {"role": "assistant", "content": str(a + b)},
    ]


def write_tool_model(folder: Path, seed: int) -> None:
    """Write an untrained model whose tokenizer has a token for the turns of the tool."""
    write_model(folder, seed, TOOL_SPECIAL)


def tool_accuracy(model_folder: Path, data: Path, show: int = 0) -> float:
    """Compute the fraction of exact answers with greedy decoding, in plain transformers, with the calculator.

    Args:
        model_folder: The folder of the model in Hugging Face format.
        data: A jsonl file of `write_tool_data` with questions and answers.
        show: The number of questions to print with their turns.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()

    def turns(chats: list[list[dict[str, str]]]) -> list[str]:
        prompts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False, return_token_type_ids=False)
        with torch.no_grad():
            out = model.generate(**inputs, max_new_tokens=TURN_TOKENS, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        texts: list[str] = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return texts

    rows = [json.loads(line) for line in data.read_text().splitlines()]
    chats = [list(row["prompt"]) for row in rows]
    first = turns(chats)
    asking = [i for i, text in enumerate(first) if _SUM.fullmatch(text)]
    results = {i: calculate(first[i]) for i in asking}
    for i in asking:
        chats[i] += [{"role": "assistant", "content": first[i]}, {"role": "tool", "content": results[i]}]
    # A second turn only for those that have called; the others have given their answer.
    second = dict(zip(asking, turns([chats[i] for i in asking]) if asking else [], strict=True))
    for i, row in enumerate(rows[:show]):
        asked = f"{first[i]} -> {results[i]}, " if i in results else ""
        right = second.get(i, first[i]) == row["answer"]
        print(f"  {row['prompt'][0]['content']} {asked}{second.get(i, first[i])}{'' if right else '   (wrong)'}")
    return sum(second.get(i, first[i]) == row["answer"] for i, row in enumerate(rows)) / len(rows)
