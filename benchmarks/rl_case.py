"""The task of the reinforcement learning benchmarks, for this project and TRL. Imports nothing of this project, to run in TRL's environment.

16 prompts of about a hundred tokens with 8 completions each, whose lengths are lognormal and stored in `rl_lengths.json`; or, with
`RL_LENGTHS=equal` in the environment, 8 prompts of 100 tokens with 4 completions of 64 tokens each. The model has 22 million parameters
and is untrained; every completion has exactly its assigned length.
"""

import json
import os
import random
from pathlib import Path
from typing import Any

LENGTHS: dict[str, Any] = json.loads((Path(__file__).parent / "rl_lengths.json").read_text())
if os.environ.get("RL_LENGTHS") == "equal":
    LENGTHS = {"prompts": [100] * 8, "answers": [[64] * 4] * 8}
PROMPTS: list[int] = LENGTHS["prompts"]
ANSWERS: list[list[int]] = LENGTHS["answers"]
GROUP = len(ANSWERS[0])
VOCABULARY = 8192
PAD, BOS, EOS = 0, 1, 2
STEPS = 3
"""The number of steps of a run; the first is not measured."""


def write_model(folder: Path) -> None:
    """Write the model, which the generation and serving benchmarks also use."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=VOCABULARY,
        hidden_size=384,
        intermediate_size=1152,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with one token per word."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": PAD, "<bos>": BOS, "<eos>": EOS, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left")
    fast.save_pretrained(folder)


def prompts() -> list[str]:
    """Return the prompts."""
    rng = random.Random(0)
    return [" ".join(f"w{rng.randrange(3, VOCABULARY)}" for _ in range(length)) for length in PROMPTS]


def write_task(folder: Path) -> None:
    """Write the model, the tokenizer and the prompts, as `prompts.jsonl`."""
    write_model(folder)
    write_tokenizer(folder)
    rows = [json.dumps({"prompt": text}) for text in prompts()]
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")


def reward(completions: list[str], **columns: Any) -> list[float]:
    """Score completions by one of their letters, with TRL's signature."""
    return [float(completion.count("7") % 5) for completion in completions]


def usage() -> dict[str, float]:
    """Return the CPU seconds of this process and its finished children, and its peak memory in GiB."""
    import resource

    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    cpu = own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
    return {"cpu": cpu, "peak_gib": own.ru_maxrss / 2**20}
