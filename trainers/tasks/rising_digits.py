"""The built-in preference task: of two numbers that begin with the given digit, the one with rising digits is better.

Both numbers have the same digits, so a preference for certain digits does not help. The data are generated from a seed. Every
chosen number is in exactly one split: training, evaluation during training, or test.
"""

import json
import random
from pathlib import Path
from typing import Any

DIGITS = 5
TRAIN, EVAL, TEST = 1200, 200, 300
"""The numbers of pairs."""


def write_pairs(folder: Path, seed: int) -> None:
    """Write `train.jsonl`, `eval.jsonl` and `test.jsonl`, with prompt, chosen and rejected as chats."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    # No digit occurs twice, since an untrained model with tied embeddings tends to repeat tokens.
    rising = [n for n in range(10 ** (DIGITS - 1), 10**DIGITS) if list(str(n)) == sorted({*str(n)})]
    rng.shuffle(rising)
    tenth = len(rising) // 10
    parts = (("train", rising[3 * tenth :], TRAIN), ("eval", rising[:tenth], EVAL), ("test", rising[tenth : 3 * tenth], TEST))
    for name, numbers, count in parts:
        with open(folder / f"{name}.jsonl", "w") as file:
            for _ in range(count):
                chosen = str(rng.choice(numbers))
                rejected = chosen
                while rejected == chosen:
                    rejected = chosen[0] + "".join(rng.sample(chosen[1:], DIGITS - 1))
                sides = {
                    side: [{"role": "assistant", "content": text}]
                    for side, text in (("chosen", chosen), ("rejected", rejected))
                }
                file.write(json.dumps({"prompt": [{"role": "user", "content": f"{chosen[0]}="}], **sides}) + "\n")


def preference_accuracy(model_folder: Path, data: Path, *, reward: bool, show: int = 0) -> float:
    """Compute the fraction of pairs in which a model prefers the chosen side, in plain transformers.

    Args:
        model_folder: The folder of the model in Hugging Face format.
        data: A jsonl file written by `write_pairs`.
        reward: Whether to compare the scores of a reward model instead of the log-probabilities of the answers.
        show: The number of pairs to print.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    kind: Any = AutoModelForSequenceClassification if reward else AutoModelForCausalLM
    model_options = {"num_labels": 1} if reward else {}
    # The head of an untrained reward model is initialized at random.
    torch.manual_seed(0)
    model: Any = kind.from_pretrained(model_folder, dtype=torch.float32, **model_options).eval()
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    numbers: dict[str, Any] = {}
    for side in ("chosen", "rejected"):
        texts = [tokenizer.apply_chat_template(row["prompt"] + row[side], tokenize=False) for row in rows]
        # All texts have the same length, so no padding is needed.
        ids = tokenizer(texts, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            if reward:
                numbers[side] = model(input_ids=ids).logits[:, 0]
            else:
                log_probs = model(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[:, :, 0]
                # The digits of the answer and the end token.
                numbers[side] = log_probs[:, -(DIGITS + 1) :].sum(1)
    better = numbers["chosen"] > numbers["rejected"]
    for row, a, b, hit in list(zip(rows, numbers["chosen"], numbers["rejected"], better, strict=True))[:show]:
        names = " over ".join(row[side][0]["content"] for side in ("chosen", "rejected"))
        print(f"  {row['prompt'][0]['content']} {names}: {float(a):.2f}, {float(b):.2f}{'' if hit else '   (wrong)'}")
    return float(better.float().mean())
