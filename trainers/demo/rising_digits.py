"""The embedded preference task: of two numbers that begin with the digit asked for, the one whose digits rise is better.

Both have the same digits, so that which digits a model likes says nothing. Made from a seed. Every chosen number is either in the training data or held out, never both.
"""

import json
import random
from pathlib import Path
from typing import Any

DIGITS = 5
TRAIN, HELD_OUT = 1200, 300


def write_pairs(folder: Path, seed: int) -> None:
    """`train.jsonl` and `eval.jsonl`: prompt, chosen and rejected, as chats."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    # No digit twice: an untrained model with tied embeddings likes to repeat itself.
    rising = [n for n in range(10 ** (DIGITS - 1), 10**DIGITS) if list(str(n)) == sorted({*str(n)})]
    draw.shuffle(rising)
    held = rising[: len(rising) // 5]
    for name, numbers, count in (("train", rising[len(held) :], TRAIN), ("eval", held, HELD_OUT)):
        with open(folder / f"{name}.jsonl", "w") as file:
            for _ in range(count):
                chosen = str(draw.choice(numbers))
                rejected = chosen
                while rejected == chosen:
                    rejected = chosen[0] + "".join(draw.sample(chosen[1:], DIGITS - 1))
                sides = {
                    side: [{"role": "assistant", "content": text}]
                    for side, text in (("chosen", chosen), ("rejected", rejected))
                }
                file.write(json.dumps({"prompt": [{"role": "user", "content": f"{chosen[0]}="}], **sides}) + "\n")


def preference_accuracy(model_folder: Path, data: Path, *, reward: bool, show: int = 0) -> float:
    """Share of pairs whose chosen side a model finds better, in plain transformers.

    Args:
        model_folder: Hugging Face format.
        data: a jsonl file of `write_pairs`.
        reward: by a reward model's score; else by the log-probability of the answer.
        show: how many pairs to print.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    kind: Any = AutoModelForSequenceClassification if reward else AutoModelForCausalLM
    more = {"num_labels": 1} if reward else {}
    torch.manual_seed(0)
    model: Any = kind.from_pretrained(model_folder, dtype=torch.float32, **more).eval()
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    numbers: dict[str, Any] = {}
    for side in ("chosen", "rejected"):
        texts = [tokenizer.apply_chat_template(row["prompt"] + row[side], tokenize=False) for row in rows]
        # All are of one length, so there is nothing to pad.
        ids = tokenizer(texts, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            if reward:
                numbers[side] = model(input_ids=ids).logits[:, 0]
            else:
                logs = model(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[:, :, 0]
                numbers[side] = logs[:, -(DIGITS + 1) :].sum(1)
    better = numbers["chosen"] > numbers["rejected"]
    for row, a, b, hit in list(zip(rows, numbers["chosen"], numbers["rejected"], better, strict=True))[:show]:
        names = " over ".join(row[side][0]["content"] for side in ("chosen", "rejected"))
        print(f"  {row['prompt'][0]['content']} {names}: {float(a):.2f}, {float(b):.2f}{'' if hit else '   (wrong)'}")
    return float(better.float().mean())
