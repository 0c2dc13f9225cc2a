"""The reward role: a model or a function that scores finished completions."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, Self

import torch

from ...engine.config import ModelConfig
from ...engine.errors import BatchError, ConfigError
from ...engine.hf.tokenizer import load_tokenizer
from ...engine.hf.weights import stored_names
from ...engine.loss import OutputRequest
from ...engine.packing.batch import IGNORE
from ...losses.sequences import last_tokens
from .base import Worker
from .batch_adapters import adapt_batch
from .dispatch import check_columns, register


class RewardWorker(Worker):
    """A reward model, whose score is the value head's output at the last token.

    Args:
        config: The configuration of the role; the model has `head=value`.
        ranks: The global ranks that run its engine; None uses all ranks.
    """

    head: ClassVar[str] = "value"

    def check(self) -> None:
        """Check the settings, as in any worker, and that the model has a reward head: a new head would give random scores."""
        super().check()
        model = self.config.model
        if model.init == "weights" and "score.weight" not in stored_names(model.path):
            raise ConfigError(
                f"model.path={model.path} has no reward head (score.weight), so its scores would be random; use a model "
                "exported by drivetrain rm, or another sequence classifier with one label"
            )

    @register("dp", returns="rows")
    def compute_rewards(self, data: Any) -> Any:
        """Compute the `rewards` `[B]` of the rows, in the caller's format."""
        adapter = self._open(data)
        mask = torch.zeros(adapter.batch.num_tokens, dtype=torch.bool, device=adapter.batch.device)
        last = last_tokens(adapter.batch)
        mask[last] = True
        values = self.engine.infer_batch(adapter.batch, OutputRequest(values=True), tokens=mask)["values"]
        return adapter.answer_rows({"rewards": values[last]})


@dataclass(frozen=True, kw_only=True)
class FunctionRewardSample:
    """A prompt and its completion, as passed to a reward function.

    Args:
        prompt: The token ids of the prompt.
        response: The token ids of the completion.
        prompt_text: The decoded prompt; empty if the worker has no tokenizer.
        response_text: The decoded completion without special tokens; empty if the worker has no tokenizer.
        fields: The other data of the row by name: its numbers (`[B]` fields of the batch) and its entries in the columns.
    """

    prompt: list[int]
    response: list[int]
    prompt_text: str = ""
    response_text: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)


RewardFunction = Callable[[Sequence[FunctionRewardSample]], Sequence[float]]


@dataclass(frozen=True, kw_only=True)
class FunctionRewardConfig:
    """The configuration of a reward computed by a function.

    Args:
        function: The function that maps a list of samples to their rewards. In a group of processes, each process imports it by
            name, so define it at the top level of a module.
        tokenizer: The model folder whose tokenizer decodes the samples; None leaves the texts empty.
        extra_fields: The names of fields in the caller's batches that are carried along. The function receives those that hold one
            number per row.
    """

    function: RewardFunction
    tokenizer: str | None = None
    extra_fields: tuple[str, ...] = ()


def _number(reward: Any, row: str) -> float:
    try:
        number = float(reward)
    except (TypeError, ValueError, RuntimeError) as e:
        raise BatchError(f"the reward function returned {reward!r} for {row}; a reward must be a number") from e
    if not math.isfinite(number):
        raise BatchError(f"the reward function returned {number} for {row}; a reward must be finite")
    return number


class FunctionRewardWorker:
    """A worker that computes rewards with a Python function.

    Args:
        config: The configuration of the role.
        ranks: Unused, because the worker has no engine.
    """

    def __init__(self, config: FunctionRewardConfig, ranks: Sequence[int] | None = None) -> None:
        self.config = config
        self._tokenizer: Any = None

    def initialize(self) -> Self:
        """Load the tokenizer, if one is configured."""
        if self.config.tokenizer is not None:
            self._tokenizer = load_tokenizer(ModelConfig(path=self.config.tokenizer))
        return self

    @register("dp", returns="rows", columns="columns")
    def compute_rewards(self, data: Any, *, columns: Mapping[str, Sequence[Any]] | None = None) -> Any:
        """Compute the `rewards` `[B]` of the rows, in the caller's format.

        Args:
            data: The batch of completions, in a format of `workers.roles.batch_adapters`.
            columns: Data that tensors cannot hold, such as solutions, unit tests or question types, as a mapping from names to B
                objects.

        Raises:
            BatchError: The function returned the wrong number of rewards, or one that is not a finite number; or a column does
                not have one entry per row, or has the name of a field of the batch.
        """
        adapter = adapt_batch(data, self.config.extra_fields, every=True)
        batch, columns = adapter.batch, columns or {}
        check_columns(columns, batch.num_sequences)
        if clashing := sorted(set(columns) & set(batch.sequence_fields)):
            raise BatchError(f"{clashing[0]!r} is both a column and a field of the batch; rename one of them")
        answers = []
        for row, (begin, end) in enumerate(pairwise(batch.bounds)):
            supervised = (batch.labels[begin:end] != IGNORE).nonzero()[:, 0].tolist()
            # The first label is at the last token of the prompt, which predicts the first one of the completion.
            response_start = supervised[0] + 1 if supervised else end - begin
            ids = batch.input_ids[begin:end].tolist()
            fields: dict[str, Any] = {n: float(v[row]) for n, v in batch.sequence_fields.items() if v.dim() == 1}
            fields |= {name: values[row] for name, values in columns.items()}
            answers.append(self._answer(ids[:response_start], ids[response_start:], fields))
        # A shard may be empty; reward functions need not handle an empty list.
        returned = self.config.function(answers) if answers else []
        if not hasattr(returned, "__len__"):
            raise BatchError(
                f"the reward function returned a {type(returned).__name__}; it must return one reward per completion"
            )
        if len(returned) != len(answers):
            raise BatchError(f"the reward function returned {len(returned)} rewards for {len(answers)} completions")
        rewards = [_number(reward, batch.name_of(row)) for row, reward in enumerate(returned)]
        return adapter.answer_rows({"rewards": torch.tensor(rewards, dtype=torch.float32)})

    def _answer(self, prompt: list[int], response: list[int], fields: Mapping[str, Any]) -> FunctionRewardSample:
        if self._tokenizer is None:
            return FunctionRewardSample(prompt=prompt, response=response, fields=fields)
        return FunctionRewardSample(
            prompt=prompt,
            response=response,
            fields=fields,
            prompt_text=self._tokenizer.decode(prompt),
            response_text=self._tokenizer.decode(response, skip_special_tokens=True),
        )

    def close(self) -> None:
        """Do nothing; there are no resources to free."""
