"""Settings of the training loop and of what it leaves behind. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path

from ...engine.checkpoint.storage import open_store
from ...engine.config import check_least, expand_paths, setting
from ...engine.errors import CheckpointError, ConfigError


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

    def check(self) -> None:
        """Check these settings by themselves.

        Raises:
            ConfigError: Names the setting and its value.
        """
        check_least("trainer.epochs", self.epochs, 1)
        for name in ("max_steps", "eval_every", "save_every", "keep_last", "keep_every", "export_hf_every", "patience"):
            check_least(f"trainer.{name}", getattr(self, name), 1)
        check_least("trainer.generate", self.generate, 0)
        check_least("trainer.generate_tokens", self.generate_tokens, 1)
        check_least("trainer.log_every", self.log_every, 1)
        if not self.timeout_minutes > 0:
            raise ConfigError(f"trainer.timeout_minutes={self.timeout_minutes}; it must be more than 0")
        if self.peak_tflops is not None and not self.peak_tflops > 0:
            raise ConfigError(f"trainer.peak_tflops={self.peak_tflops}; it must be more than 0")
        if self.patience is not None and self.eval_every is None:
            raise ConfigError(
                f"trainer.patience={self.patience} counts evaluations, and there is one at the end only; set trainer.eval_every"
            )
        if self.push_to_hub is not None and not self.export_hf:
            raise ConfigError(f"trainer.push_to_hub={self.push_to_hub} uploads the final export; set trainer.export_hf=true")
        self._check_places()

    def _check_places(self) -> None:
        for name, where in (("trainer.checkpoint_dir", self.checkpoint_dir), ("trainer.resume", self.resume)):
            if where and "://" in where:
                try:
                    open_store(where)
                except CheckpointError as e:
                    raise ConfigError(f"{name}: {e}") from e
        if self.resume not in ("auto", "none") and "://" not in self.resume and not Path(self.resume).is_dir():
            raise ConfigError(f"trainer.resume={self.resume} is not a folder; give auto, none or a checkpoint folder")
