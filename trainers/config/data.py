"""Settings of the data. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...engine.config import check_least, expand_paths, setting
from ...engine.errors import ConfigError

Format = Literal["auto", "messages", "prompt_completion", "sharegpt", "alpaca", "text", "preference", "unpaired"]
TooLong = Literal["error", "skip", "truncate_left", "truncate_right"]
Turns = Literal["auto", "single", "per_turn"]

RESERVED_VARIABLES = (
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "chat_template",
    "tokenizer_kwargs",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "return_assistant_tokens_mask",
    "conversation",
)
"""Names that a chat template's variables cannot have: arguments of transformers' `apply_chat_template`, which the trainer sets."""


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
        "a chat's answers: single, all in one sample; per_turn, a sample for each answer with what came before it; auto: per_turn where the chat template needs it",
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

    def check(self) -> None:
        """Check these settings by themselves.

        Raises:
            ConfigError: Names the setting and its value.
        """
        check_least("data.batch_size", self.batch_size, 1)
        check_least("data.max_length", self.max_length, 1)
        check_least("data.workers", self.workers, 0)
        check_least("data.seed", self.seed, 0)
        if not self.train:
            raise ConfigError("data.train is not set; give files, folders or Hub names, as in data.train=[train.jsonl]")
        if self.weights is not None:
            self._check_weights(self.weights)
        if taken := sorted({*self.chat_template_kwargs} & {*RESERVED_VARIABLES}):
            raise ConfigError(f"data.chat_template_kwargs has {', '.join(taken)}, which the trainer sets itself; leave it out")

    def _check_weights(self, weights: Sequence[float]) -> None:
        if len(weights) != len(self.train):
            raise ConfigError(
                f"data.weights has {len(weights)} numbers, data.train {len(self.train)} sources; give one for each"
            )
        if not all(0 < w < float("inf") for w in weights):
            raise ConfigError(
                f"data.weights={list(weights)}; a weight is more than 0: leave a source out of data.train instead"
            )
