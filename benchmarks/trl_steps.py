"""Steps of TRL's trainers on the documents of the step benchmark, in TRL's environment (`make bench-trl`). Prints one line of JSON.

    .venv-trl/bin/python benchmarks/trl_steps.py --task sft | dpo | rm

All documents of a step form one padded batch, because TRL cannot pack separate documents without flash attention. `dpo` has pairs that
share a prompt, like `benchmarks.preference --shared`.
"""

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast, TrainerCallback
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

sys.path.insert(0, str(Path(__file__).parent))
import workload  # type: ignore[import-not-found]  # this package is not installed here

WARMUP = 2


class Stopwatch(TrainerCallback):
    """Records the CPU time of every step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Record the time."""
        self._start = time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Record the time."""
        self.seconds.append(time.process_time() - self._start)


def rows(task: str, steps: int) -> list[dict[str, Any]]:
    """Return the dataset of a trainer, in the order of the steps."""
    found: list[dict[str, Any]] = []
    for step in range(steps):
        texts, supervised = workload.documents(step)
        if task == "sft":
            found += [
                {"input_ids": t, "labels": [x if on else -100 for x, on in zip(t, s, strict=True)]}
                for t, s in zip(texts, supervised, strict=True)
            ]
        elif task == "rm":
            found += [{"chosen_ids": texts[i], "rejected_ids": texts[i + 1]} for i in range(0, len(texts), 2)]
        else:
            texts, supervised = workload.sharing_pairs(texts)
            for i in range(0, len(texts), 2):
                prompt = supervised[i].index(True)
                parts = {"prompt": texts[i][:prompt], "chosen": texts[i][prompt:], "rejected": texts[i + 1][prompt:]}
                # This trainer accepts only text, so use one word per token.
                found.append({name: "".join(f" t{token}" for token in part) for name, part in parts.items()})
    return found


def trainer_of(task: str, steps: int, folder: str, watch: Stopwatch) -> Any:
    """Return TRL's trainer."""
    torch.manual_seed(0)
    tokens = {f"t{i}": i for i in range(workload.VOCABULARY)}
    words = Tokenizer(models.WordLevel(tokens, unk_token="t2"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t0", pad_token="t1")
    shared: dict[str, Any] = {
        "output_dir": folder,
        "max_steps": steps,
        "per_device_train_batch_size": workload.EXAMPLES if task == "sft" else workload.EXAMPLES // 2,
        "learning_rate": 1e-4,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "max_length": None,
        "train_sampling_strategy": "sequential",
    }
    config = workload.model_config()
    config.pad_token_id = 1
    data = Dataset.from_list(rows(task, steps))
    made: dict[str, Any] = {"train_dataset": data, "processing_class": tokenizer, "callbacks": [watch]}
    if task == "sft":
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        settings = SFTConfig(**shared, dataset_kwargs={"skip_prepare_dataset": True})
        return SFTTrainer(model=model, args=settings, **made)
    if task == "dpo":
        # It loads the reference from the policy's path.
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(f"{folder}/model")
        model = AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float32)
        return DPOTrainer(model=model, args=DPOConfig(**shared), **made)
    config.num_labels = 1
    reward = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    return RewardTrainer(model=reward, args=RewardConfig(**shared), **made)


def main() -> None:
    """Train and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=("sft", "dpo", "rm"), default="sft")
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        trainer_of(args.task, WARMUP + args.steps, folder, watch).train()
    seconds = statistics.median(watch.seconds[WARMUP:])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    print(
        json.dumps(
            {
                "case": f"TRL, {args.task}",
                "trl_tokens_per_cpu_s": round(workload.TOKENS / seconds, 1),
                "trl_s": round(seconds, 3),
                "peak_mb": round(peak),
            }
        )
    )


if __name__ == "__main__":
    main()
