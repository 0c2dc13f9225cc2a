"""Every setting of a trainer. Imports no torch."""

from dataclasses import dataclass
from typing import Any, Literal

from ..engine.config import EngineConfig, ModelConfig, OptimConfig, setting

Format = Literal["auto", "messages", "prompt_completion", "text"]
TooLong = Literal["error", "skip", "truncate_left", "truncate_right"]
Turns = Literal["auto", "together", "apart"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is learned from."""

    train: tuple[str, ...] = setting(
        (), "jsonl, json or parquet files, folders of them, or Hub names (org/name[/config][:split])"
    )
    weights: tuple[float, ...] | None = setting(
        None, "share of each source of data.train in an epoch, as relative weights; null: as large as the sources are"
    )
    eval: tuple[str, ...] = setting((), "the same, to evaluate on")
    format: Format = setting(
        "auto", "messages: chats; prompt_completion: two texts or chats; text: all of it; auto: by the columns"
    )
    turns: Turns = setting(
        "auto",
        "a chat's answers: together in one sample; apart, each with what came before it; auto: apart where the chat template needs it",
    )
    chat_template_kwargs: dict[str, Any] = setting(
        factory=dict, help="variables for the chat template, as in data.chat_template_kwargs.enable_thinking=false"
    )
    max_length: int | None = setting(None, "tokens in a sample, at most; null: engine.micro_batch.max_tokens")
    too_long: TooLong = setting("error", "what happens to a longer sample")
    batch_size: int = setting(32, "samples a step, all ranks together")
    shuffle: bool = setting(True, "a new order every epoch; false keeps the order of the files")
    seed: int = setting(0, "seed of the order")
    workers: int | None = setting(
        None, "processes that tokenise; 0: none beside the first rank; null: as many as cores, for much data"
    )
    cache_dir: str | None = setting(
        None, "folder that keeps tokenised data; null: ~/.cache/drivetrain (or $XDG_CACHE_HOME/drivetrain)"
    )


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The loop, and what it leaves behind."""

    output_dir: str = setting("runs/sft", "folder of this run: config, metrics, checkpoints, export")
    max_steps: int | None = setting(None, "optimizer steps; null: as many as the epochs make")
    epochs: int = setting(1, "passes over the training data")
    eval_every: int | None = setting(None, "steps between evaluations; null: only at the end")
    save_every: int | None = setting(None, "steps between checkpoints; null: only at the end")
    save_background: bool = setting(
        True, "write checkpoints while training goes on, from a copy in the host's memory; false: training waits"
    )
    checkpoint_dir: str | None = setting(
        None,
        "folder of this run's checkpoints, or a URL (s3://, gs://, anything fsspec opens); null: checkpoints in output_dir",
    )
    keep_last: int | None = setting(2, "checkpoints kept, beside the best; null: all")
    keep_every: int | None = setting(None, "checkpoints of every so many steps are kept beside those; null: none")
    verify_checksums: bool = setting(True, "compare a checkpoint's numbers with their checksums while it is loaded")
    resume: str = setting(
        "auto", "auto: the run's last complete checkpoint, if any; none; or a checkpoint or the folder of a run, also as a URL"
    )
    best_metric: str | None = setting(
        None, "evaluation metric (loss, accuracy) whose best checkpoint is kept and exported; null: the last one is"
    )
    patience: int | None = setting(
        None, "evaluations without a better best_metric after which training stops; null: it goes on"
    )
    generate: int = setting(0, "held-out samples that the model answers at each evaluation, to be read")
    generate_tokens: int = setting(64, "tokens of such an answer, at most")
    log_every: int = setting(1, "steps between lines of progress, where the output is no terminal")
    loggers: tuple[str, ...] = setting(("console", "jsonl", "tensorboard"), "console, jsonl, tensorboard, wandb")
    wandb_project: str = setting("drivetrain", "project of the run in Weights & Biases")
    peak_tflops: float | None = setting(
        None, "what the device can do at most, in 1e12 FLOP/s, for MFU; null: known for common NVIDIA GPUs"
    )
    export_hf: bool = setting(True, "write the trained model in Hugging Face format at the end")
    export_hf_every: int | None = setting(None, "steps between further such exports, to exports/ in output_dir; null: none")
    push_to_hub: str | None = setting(
        None,
        "repository of the Hugging Face Hub (org/name, made private if new) for the final export, or its adapter; null: none",
    )
    timeout_minutes: float = setting(30.0, "after which a rank that waits for the others gives up")


@dataclass(frozen=True, kw_only=True)
class SFTConfig:
    """`python -m drivetrain.trainers.sft`."""

    model: ModelConfig = setting(factory=ModelConfig, help="the model")
    data: DataConfig = setting(factory=DataConfig, help="the data")
    engine: EngineConfig = setting(factory=EngineConfig, help="the engine")
    optim: OptimConfig = setting(factory=OptimConfig, help="the optimizer")
    trainer: TrainerConfig = setting(factory=TrainerConfig, help="the loop")
