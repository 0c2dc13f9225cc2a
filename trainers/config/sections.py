"""Every setting of a trainer. Imports no torch."""

from dataclasses import dataclass
from typing import Any, Literal

from ...engine.config import EngineConfig, ModelConfig, OptimConfig, ParallelConfig, Place, expand_paths, setting

Format = Literal["auto", "messages", "prompt_completion", "sharegpt", "alpaca", "text", "preference", "unpaired"]
PreferenceLossName = Literal["sigmoid", "ipo", "hinge", "simpo", "orpo", "cpo", "kto"]
ReferenceMode = Literal["auto", "model", "base", "cached"]
TooLong = Literal["error", "skip", "truncate_left", "truncate_right"]
Turns = Literal["auto", "together", "apart"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is learned from."""

    train: tuple[str, ...] = setting(
        (), "jsonl, json or parquet files, folders of them, or Hub names (org/name[/config][:split])", path=True
    )
    weights: tuple[float, ...] | None = setting(
        None, "share of each source of data.train in an epoch, as relative weights; null: as large as the sources are"
    )
    eval: tuple[str, ...] = setting((), "the same, to evaluate on", path=True)
    format: Format = setting(
        "auto",
        "messages: chats; prompt_completion: two texts or chats; sharegpt: conversations of from and value; alpaca: instruction, input, output, as a chat where the model has a template; text: all of it; preference: chosen and rejected; unpaired: prompt, completion, label; auto: by the columns",
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
    batch_size: int = setting(32, "samples a step, all ranks together; a pair is one sample")
    shuffle: bool = setting(True, "a new order every epoch; false keeps the order of the files")
    seed: int = setting(0, "seed of the order")
    workers: int | None = setting(
        None, "processes that tokenise; 0: none beside the first rank; null: as many as cores, for much data"
    )
    cache_dir: str | None = setting(
        None, "folder that keeps tokenised data; null: ~/.cache/drivetrain (or $XDG_CACHE_HOME/drivetrain)", path=True
    )

    def __post_init__(self) -> None:
        expand_paths(self, "data")


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The loop, and what it leaves behind."""

    output_dir: str = setting("runs/sft", "folder of this run: config, metrics, checkpoints, export", path=True)
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
        path=True,
    )
    keep_last: int | None = setting(2, "checkpoints kept, beside the best; null: all")
    keep_every: int | None = setting(None, "checkpoints of every so many steps are kept beside those; null: none")
    verify_checksums: bool = setting(True, "compare a checkpoint's numbers with their checksums while it is loaded")
    resume: str = setting(
        "auto",
        "auto: the run's last complete checkpoint, if any; none; or a checkpoint or the folder of a run, also as a URL",
        path=True,
    )
    best_metric: str | None = setting(
        None,
        "evaluation metric (loss; accuracy of SFT; reward_accuracy, reward_margin of the others) whose best checkpoint is kept and exported; null: the last one is",
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

    def __post_init__(self) -> None:
        expand_paths(self, "trainer")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What every trainer has."""

    model: ModelConfig = setting(factory=ModelConfig, help="the model")
    data: DataConfig = setting(factory=DataConfig, help="the data")
    engine: EngineConfig = setting(factory=EngineConfig, help="the engine")
    optim: OptimConfig = setting(factory=OptimConfig, help="the optimizer")
    trainer: TrainerConfig = setting(factory=TrainerConfig, help="the loop")


@dataclass(frozen=True, kw_only=True)
class SFTConfig(RunConfig):
    """`python -m drivetrain.trainers.sft`."""


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig:
    """The loss over preferences."""

    loss: PreferenceLossName = setting(
        "sigmoid",
        "sigmoid (DPO), ipo, hinge, kto: against a reference; simpo, orpo, cpo: without one; kto: single answers, liked or not",
    )
    beta: float = setting(0.1, "scale of the reward: the larger, the nearer to the reference; tau of ipo, lambda of orpo")
    label_smoothing: float = setting(0.0, "share of labels thought to be the wrong way round; sigmoid, simpo, cpo")
    gamma: float = setting(0.5, "simpo: the margin that the chosen side shall have")
    length_normalize: bool | None = setting(
        None, "divide a side's log-probability by its tokens; null: as the loss is defined (ipo, simpo and orpo do)"
    )
    sft_weight: float | None = setting(
        None,
        "weight of the chosen side's negative log-likelihood (RPO's term); null: as the loss is defined (1 with orpo, cpo)",
    )
    desirable_weight: float = setting(1.0, "kto: weight of good answers")
    undesirable_weight: float = setting(1.0, "kto: weight of bad answers")


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """What the policy is compared with."""

    mode: ReferenceMode = setting(
        "auto",
        "model: a frozen model beside the policy; base: the policy without its adapters; cached: computed once before training, and kept with the data; auto: base under LoRA, else model",
    )
    path: str | None = setting(None, "folder or Hugging Face name of the reference; null: model.path", path=True)
    backend: str | None = setting(None, "its engine, which then has the layout of reference.parallel; null: as the policy's")
    parallel: ParallelConfig = setting(factory=ParallelConfig, help="its layout, where reference.backend is set")
    offload: Place = setting("none", "resting place of its sharded parameters")

    def __post_init__(self) -> None:
        expand_paths(self, "reference")


@dataclass(frozen=True, kw_only=True)
class DPOConfig(RunConfig):
    """`python -m drivetrain.trainers.dpo`."""

    trainer: TrainerConfig = setting(factory=lambda: TrainerConfig(output_dir="runs/dpo"), help="the loop")
    dpo: PreferenceConfig = setting(factory=PreferenceConfig, help="the loss")
    reference: ReferenceConfig = setting(factory=ReferenceConfig, help="the reference")


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """The loss of a reward model."""

    centering: float = setting(0.0, "weight of the term that draws rewards to a mean of 0")


@dataclass(frozen=True, kw_only=True)
class RMConfig(RunConfig):
    """`python -m drivetrain.trainers.rm`."""

    model: ModelConfig = setting(factory=lambda: ModelConfig(head="value"), help="the model")
    trainer: TrainerConfig = setting(factory=lambda: TrainerConfig(output_dir="runs/rm"), help="the loop")
    rm: RewardConfig = setting(factory=RewardConfig, help="the loss")
