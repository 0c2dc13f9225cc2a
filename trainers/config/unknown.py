"""Hints for unknown settings: the closest name, or our name for another program's setting."""

import difflib
from collections.abc import Collection

FOREIGN = {
    "learning_rate": "optim.lr",
    "num_train_epochs": "trainer.epochs",
    "num_epochs": "trainer.epochs",
    "per_device_train_batch_size": "data.batch_size",
    "micro_batch_size": "engine.micro_batch.max_tokens",
    "gradient_accumulation_steps": "data.batch_size",
    "max_seq_length": "data.max_length",
    "sequence_len": "data.max_length",
    "lr_scheduler_type": "optim.schedule",
    "load_in_4bit": "model.quantization",
    "load_in_8bit": "model.quantization",
    "gradient_checkpointing": "engine.recompute",
    "model_name_or_path": "model.path",
    "dataset_name": "data.train",
    "dataset": "data.train",
    "train_on_inputs": "data.train_on",
    "max_grad_norm": "optim.clip_grad_norm",
    "warmup_steps": "optim.warmup_steps",
    "lora_r": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "target_modules": "model.lora.targets",
    "logging_steps": "trainer.loggers",
    "eval_steps": "trainer.eval_every",
    "save_steps": "trainer.save_every",
    "early_stopping_patience": "trainer.patience",
    "report_to": "trainer.loggers",
    "output_dir": "trainer.output_dir",
    "seed": "engine.seed",
    "resume_from_checkpoint": "trainer.resume",
    "lora_dropout": "model.lora.dropout",
    "lora_rank": "model.lora.rank",
    "lora_target": "model.lora.targets",
    "modules_to_save": "model.lora.modules_to_save",
    "additional_target": "model.lora.modules_to_save",
    "cutoff_len": "data.max_length",
    "num_generations": "rl.group_size",
    "max_completion_length": "rollout.max_tokens",
    "max_prompt_length": "data.max_length",
    "adv_estimator": "rl.advantage.estimator",
}
"""Names that other programs use for a setting, mapped to ours."""
ALWAYS = {
    **dict.fromkeys(
        ("packing", "sample_packing", "neat_packing", "use_remove_padding", "padding_free"),
        "samples are always packed, without padding and without attention across samples; there is nothing to set",
    ),
    **dict.fromkeys(
        ("attn_implementation", "flash_attn", "flash_attention", "flash_attention_2", "use_flash_attention"),
        "attention over packed samples always uses the fastest kernel that is exact for the model; there is nothing to set",
    ),
    **dict.fromkeys(
        ("bf16", "fp16"),
        "the dtype is engine.precision.compute, by default bfloat16 on GPUs; weights are trained in float32",
    ),
    **dict.fromkeys(
        ("deepspeed", "fsdp", "fsdp_config", "zero_stage", "ddp"),
        "the model is sharded over all processes of --nproc; other layouts are engine.parallel.*",
    ),
}
"""Other programs' settings that have no counterpart here, and the explanation to print."""


def hint_for(name: str, names: Collection[str]) -> str:
    """Return a hint about an unknown setting, as the end of a sentence.

    Args:
        name: The dotted name.
        names: The names of all settings.
    """
    last = name.rpartition(".")[2]
    if last in ALWAYS:
        return f": {ALWAYS[last]}"
    ours = {k.rpartition(".")[2] for k in names}
    # The same name in another section or program is a better guess than a similar spelling.
    full = FOREIGN.get(last) if FOREIGN.get(last) in names else None
    if full is None and last in ours:
        # Of several, the one that is nested the least.
        full = min((k for k in names if k.rpartition(".")[2] == last), key=lambda k: (k.count("."), k))
    if full is None:
        close_matches = difflib.get_close_matches(name, names, n=1, cutoff=0.7) or difflib.get_close_matches(
            last, ours, n=1, cutoff=0.7
        )
        full = next((k for k in sorted(names) if close_matches and k.endswith(close_matches[0])), None)
    return f"{f'; did you mean {full!r}?' if full else ''} (--help lists all settings)"
