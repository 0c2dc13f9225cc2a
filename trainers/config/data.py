"""Settings for the training and evaluation data."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ...engine.config import MOST_SEED, Settings, check_least, setting
from ...engine.errors import ConfigError

DataFormat = Literal["auto", "messages", "prompt_completion", "sharegpt", "alpaca", "text", "preference", "unpaired"]
TooLong = Literal["error", "skip", "truncate_left", "truncate_right", "split"]
Turns = Literal["auto", "single", "per_turn"]

MEDIA_COLUMNS = {"images": "image", "image": "image", "videos": "video", "video": "video", "audios": "audio", "audio": "audio"}
"""Media columns, mapped to their kinds. The items of a column are matched to its placeholders in order."""
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
"""Names that template variables cannot have: arguments of transformers' `apply_chat_template` that the trainer sets."""


@dataclass(frozen=True, kw_only=True)
class SourcesConfig(Settings):
    """The sources of the data, and the order in which they are used."""

    section: ClassVar[str] = "data"

    train: tuple[str, ...] = setting(
        (),
        "jsonl, json, parquet, csv, tsv or txt files, also with .gz or .zst, folders of such files, patterns (data/*.jsonl), or Hub names (org/name[/config][:split])",
        path=True,
    )
    weights: tuple[float, ...] | None = setting(
        None, "relative weight of each source of data.train in an epoch; null: proportional to the sources' sizes"
    )
    eval: tuple[str, ...] = setting((), "sources to evaluate on, given as in data.train", path=True)
    columns: dict[str, str] = setting(
        factory=dict,
        help="columns with other names in the data, as {expected name: name in the data}: data.columns={prompt: question}",
    )
    txt: Literal["line", "file"] = setting("line", "what one text in a txt file is: each line, or the entire file")
    chat_template_kwargs: dict[str, Any] = setting(
        factory=dict, help="variables for the chat template, for example {enable_thinking: false}"
    )
    too_long: TooLong = setting(
        "error", "what to do with a sample that is too long; split: cut it into several samples, for plain text"
    )
    media_dir: str | None = setting(
        None,
        "folder that relative paths of images, videos and audio start from; null: the folder of the row's file",
        path=True,
    )
    allow_url: bool = setting(False, "fetch images, videos and audio that are given as http or https URLs")
    max_pixels: int | None = setting(
        None, "maximum number of pixels of an image or a video frame; null: the limit of the model's processor"
    )
    max_frames: int = setting(64, "maximum number of frames of a video")
    fps: float = setting(2.0, "frames per second to sample from a video, evenly spaced, up to data.max_frames")
    max_seconds: float | None = setting(None, "maximum length of audio in seconds; null: the limit of the model's encoder")
    too_large: Literal["resize", "error", "skip"] = setting(
        "resize",
        "what to do with media that exceed these limits; resize: reduce pixels and frames per second, keep the first seconds of audio; skip: leave the row out",
    )
    cache_dir: str | None = setting(
        None,
        "folder for cached tokenized data and processed media; null: ~/.cache/drivetrain (or $XDG_CACHE_HOME/drivetrain)",
        path=True,
    )
    shuffle: bool = setting(True, "reshuffle the samples every epoch; false: keep the order of the files")
    seed: int = setting(0, "seed for shuffling", most=MOST_SEED)

    def _check_values(self) -> None:
        check_least("data.seed", self.seed, 0)
        check_least("data.max_pixels", self.max_pixels, 1)
        check_least("data.max_frames", self.max_frames, 1)
        for name in ("fps", "max_seconds"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"data.{name}={value}; it must be a number above 0")

    def check(self) -> None:
        """Check these settings independently of the other sections.

        Raises:
            ConfigError: A setting is invalid; the message names it and its value.
        """
        if not self.train:
            raise ConfigError("data.train is not set; give files, folders or Hub names, for example data.train=[train.jsonl]")
        if self.weights is not None:
            self._check_weights(self.weights)
        if taken := sorted({*self.chat_template_kwargs} & {*RESERVED_VARIABLES}):
            raise ConfigError(f"data.chat_template_kwargs has {', '.join(taken)}, which the trainer sets itself; remove it")

    def doubled_columns(self) -> list[str]:
        """Return names that `data.columns` maps to the same column of the data; empty if there are none."""
        for theirs in self.columns.values():
            if len(names := [ours for ours, column in self.columns.items() if column == theirs]) > 1:
                return names
        return []

    def _check_weights(self, weights: Sequence[float]) -> None:
        if len(weights) != len(self.train):
            raise ConfigError(
                f"data.weights has {len(weights)} numbers, data.train has {len(self.train)} sources; give one weight per "
                "source"
            )
        # NaN fails both comparisons.
        if not all(0 < w < float("inf") for w in weights):
            raise ConfigError(
                f"data.weights={list(weights)}; weights must be more than 0: to leave a source out, remove it from data.train"
            )


@dataclass(frozen=True, kw_only=True)
class DataConfig(SourcesConfig):
    """The training and evaluation data."""

    format: DataFormat = setting(
        "auto",
        "messages: chats; prompt_completion: two texts or chats; sharegpt: conversations with from and value; alpaca: instruction, input and output, as a chat if the model has a chat template; text: plain text, all of it supervised; preference: chosen and rejected; unpaired: prompt, completion and label; auto: detected from the columns",
    )
    turns: Turns = setting(
        "auto",
        "how a chat's assistant turns become samples; single: all in one sample; per_turn: one sample per assistant turn, with the messages before it; auto: per_turn if the chat template requires it",
    )
    train_on: Literal["completions", "last_completion", "all"] = setting(
        "completions",
        "tokens that the loss is computed on; completions: those of completions or assistant turns; last_completion: only the last assistant turn of a chat; all: those of the prompts too",
    )
    max_length: int | None = setting(None, "maximum number of tokens in a sample; null: engine.micro_batch.max_tokens")
    streaming: bool = setting(
        False,
        "read and tokenize data.train during training, and store nothing; needs trainer.max_steps, and shuffles within data.stream_rows",
    )
    stream_rows: int = setting(4096, "with data.streaming: number of rows that are read, tokenized and shuffled together")
    batch_size: int = setting(32, "samples per step across all ranks; a pair is one sample")
    workers: int | None = setting(
        None, "processes that tokenize; 0: the first rank itself; null: one per CPU core for large data", most=1024
    )

    def _check_values(self) -> None:
        super()._check_values()
        check_least("data.batch_size", self.batch_size, 1)
        check_least("data.max_length", self.max_length, 1)
        check_least("data.workers", self.workers, 0)
        check_least("data.stream_rows", self.stream_rows, 1)

    def check(self) -> None:
        """Check these settings independently of the other sections.

        Raises:
            ConfigError: A setting is invalid; the message names it and its value.
        """
        super().check()
        if doubled := self.doubled_columns():
            raise ConfigError(
                f"data.columns={self.columns}: {' and '.join(doubled)} would be one column, {self.columns[doubled[0]]!r}; give each its own"
            )
        if self.streaming and self.weights is not None:
            raise ConfigError(
                "data.weights with data.streaming=true, which reads the sources one after another; mix the rows beforehand, or unset one of them"
            )
        if self.train_on == "last_completion" and self.turns == "per_turn":
            raise ConfigError(
                "data.train_on=last_completion with data.turns=per_turn, which makes one sample of every assistant turn; unset one of them"
            )


@dataclass(frozen=True, kw_only=True)
class PromptsConfig(SourcesConfig):
    """The prompts to train and evaluate on. A row has a `prompt`, a text or a chat; its other columns go to the rewards."""

    max_length: int | None = setting(
        None, "maximum number of tokens in a prompt; null: engine.micro_batch.max_tokens minus rollout.max_tokens"
    )
    batch_size: int = setting(32, "prompts per step, each with rl.group_size completions")

    def _check_values(self) -> None:
        super()._check_values()
        check_least("data.batch_size", self.batch_size, 1)
        check_least("data.max_length", self.max_length, 1)

    def check(self) -> None:
        """Check these settings independently of the other sections.

        Raises:
            ConfigError: A setting is invalid; the message names it and its value.
        """
        super().check()
        if self.too_long == "split":
            raise ConfigError("data.too_long=split: a prompt cannot be split; use skip, truncate_left or truncate_right")
