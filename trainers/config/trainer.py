"""Settings for the training loop and its outputs."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ...engine.checkpoint.storage import open_store
from ...engine.config import Settings, check_least, setting
from ...engine.errors import CheckpointError, ConfigError


@dataclass(frozen=True, kw_only=True)
class LoopConfig(Settings):
    """The settings that the training loops of all trainers share."""

    section: ClassVar[str] = "trainer"

    output_dir: str = setting("runs/sft", "folder for this run's config, metrics, checkpoints and export", path=True)
    max_steps: int | None = setting(None, "number of optimizer steps; null: determined by trainer.epochs")
    epochs: int = setting(1, "number of passes over the training data")
    eval_every: int | None = setting(None, "steps between evaluations; null: only at the end")
    save_every: int | None = setting(None, "steps between checkpoints; null: only at the end")
    checkpoint_dir: str | None = setting(
        None,
        "folder for this run's checkpoints, or a URL (s3://, gs:// or anything else that fsspec opens); null: checkpoints/ in output_dir",
        path=True,
    )
    keep_last: int | None = setting(2, "number of recent checkpoints to keep, in addition to the best one; null: all")
    keep_every: int | None = setting(
        None, "also keep a checkpoint whenever its step is a multiple of this; null: no extra checkpoints"
    )
    resume: str = setting(
        "auto",
        "auto: from the run's last complete checkpoint, if any; none: start from scratch; or a path or URL of a checkpoint or a run's folder",
        path=True,
    )
    best_metric: str | None = setting(
        None,
        "evaluation metric that selects the checkpoint to keep and export (loss; accuracy in SFT; reward_accuracy or reward_margin in the other trainers; any of trainer.metrics); null: the last checkpoint",
    )
    patience: int | None = setting(
        None, "early stopping: stop after this many evaluations without an improvement of best_metric; null: never"
    )
    stopping_threshold: float | None = setting(
        None, "early stopping: stop as soon as an evaluation's best_metric reaches this value; null: never"
    )
    max_minutes: float | None = setting(
        None, "stop after this many minutes of training in this process, and save and export as at the end; null: no limit"
    )
    eval_completions: int = setting(
        0, "number of held-out samples for which each evaluation generates, logs and scores a completion"
    )
    log_every: int = setting(1, "steps between progress lines when the output is not a terminal")
    loggers: tuple[str, ...] = setting(("console", "jsonl", "tensorboard"), "any of console, jsonl, tensorboard, wandb")
    wandb_project: str = setting("drivetrain", "Weights & Biases project of the run")
    export_hf: bool = setting(True, "write the trained model in Hugging Face format at the end")
    export_hf_every: int | None = setting(None, "steps between additional exports to exports/ in output_dir; null: none")
    push_to_hub: str | None = setting(
        None,
        "Hugging Face Hub repository (org/name, created as private if it is new) for the final export or its adapter; null: none",
    )
    timeout_minutes: float = setting(30.0, "minutes after which a rank stops waiting for the others", least=0.01, most=1e6)

    def _check_values(self) -> None:
        check_least("trainer.epochs", self.epochs, 1)
        for name in ("max_steps", "eval_every", "save_every", "keep_last", "keep_every", "export_hf_every", "patience"):
            check_least(f"trainer.{name}", getattr(self, name), 1)
        check_least("trainer.eval_completions", self.eval_completions, 0)
        check_least("trainer.log_every", self.log_every, 1)
        # `not >`, which is also true for NaN.
        if self.max_minutes is not None and not self.max_minutes > 0:
            raise ConfigError(f"trainer.max_minutes={self.max_minutes}; it must be more than 0")
        if self.stopping_threshold is not None and not math.isfinite(self.stopping_threshold):
            raise ConfigError(f"trainer.stopping_threshold={self.stopping_threshold}; it must be a finite number, or null")
        if not self.timeout_minutes > 0:
            raise ConfigError(f"trainer.timeout_minutes={self.timeout_minutes}; it must be more than 0")

    def check(self) -> None:
        """Check these settings independently of the other sections.

        Raises:
            ConfigError: A setting is invalid; the message names it and its value.
        """
        if self.patience is not None and self.eval_every is None:
            raise ConfigError(
                f"trainer.patience={self.patience} counts evaluations, but the only evaluation is at the end; set trainer.eval_every"
            )
        if self.stopping_threshold is not None and self.eval_every is None:
            raise ConfigError(
                f"trainer.stopping_threshold={self.stopping_threshold} is compared at evaluations, but the only evaluation is at the end; "
                "set trainer.eval_every"
            )
        if self.push_to_hub is not None and not self.export_hf:
            raise ConfigError(f"trainer.push_to_hub={self.push_to_hub} uploads the final export; set trainer.export_hf=true")
        self._check_places()

    def _check_places(self) -> None:
        for name, where in (("trainer.checkpoint_dir", self.checkpoint_dir), ("trainer.resume", self.resume)):
            if where and "://" in where:
                try:
                    # Opened only to find out whether its scheme and packages are available.
                    open_store(where)
                except CheckpointError as e:
                    raise ConfigError(f"{name}: {e}") from e
        if self.resume not in ("auto", "none") and "://" not in self.resume and not Path(self.resume).is_dir():
            raise ConfigError(f"trainer.resume={self.resume} is not a folder; give auto, none or a checkpoint folder")


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(LoopConfig):
    """The training loop and its outputs."""

    save_background: bool = setting(
        True, "write checkpoints in the background while training continues, from a copy in host memory; false: training waits"
    )
    verify_checksums: bool = setting(True, "verify a checkpoint's data against its checksums while loading")
    eval_max_tokens: int = setting(64, "maximum number of tokens in a completion that an evaluation generates")
    metrics: tuple[str, ...] = setting(
        (),
        "metrics of the generated completions: exact_match, contains, or functions module:function with the arguments prompt, completion and expected; higher must be better",
    )
    peak_tflops: float | None = setting(
        None,
        "peak throughput of the device in 1e12 FLOP/s, used to compute MFU; null: looked up for common NVIDIA GPUs",
        least=1e-6,
        most=1e6,
    )

    def _check_values(self) -> None:
        super()._check_values()
        check_least("trainer.eval_max_tokens", self.eval_max_tokens, 1)
        if self.peak_tflops is not None and not self.peak_tflops > 0:
            raise ConfigError(f"trainer.peak_tflops={self.peak_tflops}; it must be more than 0")

    def check(self) -> None:
        """Check these settings independently of the other sections.

        Raises:
            ConfigError: A setting is invalid; the message names it and its value.
        """
        super().check()
        if self.metrics and not self.eval_completions:
            raise ConfigError(
                f"trainer.metrics={list(self.metrics)} scores generated completions, but trainer.eval_completions=0; set it to their number"
            )


@dataclass(frozen=True, kw_only=True)
class RLTrainerConfig(LoopConfig):
    """The reinforcement learning loop and its outputs."""

    max_steps: int | None = setting(
        None, "number of steps, each from prompts to updated weights; null: determined by trainer.epochs"
    )
    best_metric: str | None = setting(
        None,
        "evaluation metric that selects the checkpoint to keep and export: reward, accuracy, or with rl.eval_samples=K also avg@K and pass@K; "
        "null: the last checkpoint",
    )
    eval_completions: int = setting(3, "number of prompts whose completions and rewards each evaluation logs")
    bundle_every: int | None = setting(
        None, "steps between replay bundles, each of which has everything needed to repeat its step; null: none"
    )

    def _check_values(self) -> None:
        super()._check_values()
        check_least("trainer.bundle_every", self.bundle_every, 1)
