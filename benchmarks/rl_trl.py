"""Steps of TRL's GRPOTrainer on the task of `rl_case`, in a separate environment (`make bench-trl`). Prints one JSON object."""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria, StoppingCriteriaList, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).parent))
import rl_case as case  # type: ignore[import-not-found]  # this package is not installed here

ANSWERS_PER_PASS = 16
"""The micro-batch size of the update, in completions; larger batches of this model are slower."""


class Lengths(StoppingCriteria):
    """Ends every row at its assigned length."""

    def __init__(self, prompt: int) -> None:
        self._prompt = prompt
        self._lengths = torch.tensor([length for answers in case.ANSWERS for length in answers])

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Return which rows end."""
        # TRL counts the following end token as a part of the completion.
        return input_ids.shape[1] - self._prompt >= self._lengths - 1


class Stopwatch(TrainerCallback):
    """Records the time at the end of every step."""

    def __init__(self) -> None:
        self.ends = [(time.perf_counter(), case.usage()["cpu"])]

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Record the time."""
        self.ends.append((time.perf_counter(), case.usage()["cpu"]))


def main(folder: Path) -> None:
    """Train and print the numbers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # Finished rows are padded, and TRL looks for this token as the end of a completion.
    tokenizer.pad_token = tokenizer.eos_token
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generate = model.generate

    def with_lengths(*args: Any, **options: Any) -> Any:
        prompt = options["input_ids"].shape[1]
        return generate(*args, **options, stopping_criteria=StoppingCriteriaList([Lengths(prompt)]))

    model.generate = with_lengths
    watch = Stopwatch()
    config = GRPOConfig(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=ANSWERS_PER_PASS,
        gradient_accumulation_steps=len(case.PROMPTS) * case.GROUP // ANSWERS_PER_PASS,
        num_generations=case.GROUP,
        max_completion_length=max(length for answers in case.ANSWERS for length in answers),
        temperature=1.0,
        beta=0.0,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        max_steps=case.STEPS,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=case.reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": text} for text in case.prompts()]),
        processing_class=tokenizer,
        callbacks=[watch],
    )
    trainer.train()
    lengths = [entry["completions/mean_length"] for entry in trainer.state.log_history if "completions/mean_length" in entry]
    (first, cpu), (last, last_cpu) = watch.ends[1], watch.ends[-1]
    steps = len(watch.ends) - 2
    print(
        json.dumps(
            {
                "seconds": (last - first) / steps,
                "cpu": (last_cpu - cpu) / steps,
                "peak_gib": case.usage()["peak_gib"],
                "mean_length": lengths[-1],
            }
        )
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as root:
        case.write_model(Path(root))
        case.write_tokenizer(Path(root))
        main(Path(root))
