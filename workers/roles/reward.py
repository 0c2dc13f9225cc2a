"""The reward: a model that scores whole answers, or a function of them."""

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
from ..batch_adapters import adapt_batch
from ..dispatch import check_columns, register
from ..losses.sequences import last_tokens
from .base import Worker


class RewardWorker(Worker):
    """A reward model: a value head's number at the last token.

    Args:
        config: of the role; the model has `head=value`.
        ranks: of its engine.
    """

    head: ClassVar[str] = "value"

    def check(self) -> None:
        """As every worker; and the model must come with its head: a new one would score by chance."""
        super().check()
        model = self.config.model
        if model.init == "weights" and "score.weight" not in stored_names(model.path):
            raise ConfigError(
                f"model.path={model.path} has no reward head (score.weight): its scores would be chance; give a model that drivetrain rm "
                "exported, or another sequence classifier of one label"
            )

    @register("dp", returns="rows")
    def compute_rewards(self, data: Any) -> Any:
        """`rewards` `[B]` of the rows."""
        adapter = self._open(data)
        mask = torch.zeros(adapter.batch.num_tokens, dtype=torch.bool, device=adapter.batch.device)
        last = last_tokens(adapter.batch)
        mask[last] = True
        values = self.engine.infer_batch(adapter.batch, OutputRequest(values=True), tokens=mask)["values"]
        return adapter.answer_rows({"rewards": values[last]})


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a reward function looks at.

    Args:
        prompt: token ids.
        response: token ids.
        prompt_text: decoded, where the worker has a tokenizer.
        response_text: decoded, special tokens left out.
        fields: what else the row has, by name: its numbers (`[B]` fields of the batch) and its entries of the columns.
    """

    prompt: list[int]
    response: list[int]
    prompt_text: str = ""
    response_text: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)


RewardFunction = Callable[[Sequence[Answer]], Sequence[float]]


@dataclass(frozen=True, kw_only=True)
class FunctionRewardConfig:
    """A reward that is computed.

    Args:
        function: from answers to their rewards; a group of processes needs one that pickle finds, defined in a module.
        tokenizer: model folder whose tokenizer decodes the answers; None leaves texts out.
        passengers: fields of the caller's batches that ride along; the function sees those of them that are numbers of a row.
    """

    function: RewardFunction
    tokenizer: str | None = None
    passengers: tuple[str, ...] = ()


def _number(reward: Any, row: str) -> float:
    try:
        number = float(reward)
    except (TypeError, ValueError, RuntimeError) as e:
        raise BatchError(f"the reward function returned {reward!r} for {row}; a reward is a number") from e
    if not math.isfinite(number):
        raise BatchError(f"the reward function returned {number} for {row}; a reward is finite")
    return number


class FunctionRewardWorker:
    """A plain Python reward function as a worker.

    Args:
        config: of the role.
        ranks: unused: it has no engine.
    """

    def __init__(self, config: FunctionRewardConfig, ranks: Sequence[int] | None = None) -> None:
        self.config = config
        self._tokenizer: Any = None

    def initialize(self) -> Self:
        """Load the tokenizer."""
        if self.config.tokenizer is not None:
            self._tokenizer = load_tokenizer(ModelConfig(path=self.config.tokenizer))
        return self

    @register("dp", returns="rows", columns="columns")
    def compute_rewards(self, data: Any, *, columns: Mapping[str, Sequence[Any]] | None = None) -> Any:
        """`rewards` `[B]` of the rows.

        Args:
            data: the answers.
            columns: name -> B objects that tensors do not hold: right answers, tests to pass, the kind of a question.

        Raises:
            BatchError: the function returned another number of rewards, or one that is no finite number; or a column has not one
                entry for each row, or the name of a field of the batch.
        """
        adapter = adapt_batch(data, self.config.passengers, every=True)
        batch, columns = adapter.batch, columns or {}
        check_columns(columns, batch.num_sequences)
        if both := sorted(set(columns) & set(batch.sequence_fields)):
            raise BatchError(f"{both[0]!r} is a column and a field of the batch; give one of them another name")
        answers = []
        for row, (begin, end) in enumerate(pairwise(batch.bounds)):
            learned = (batch.labels[begin:end] != IGNORE).nonzero()[:, 0].tolist()
            border = learned[0] + 1 if learned else end - begin
            ids = batch.input_ids[begin:end].tolist()
            fields: dict[str, Any] = {n: float(v[row]) for n, v in batch.sequence_fields.items() if v.dim() == 1}
            fields |= {name: values[row] for name, values in columns.items()}
            answers.append(self._answer(ids[:border], ids[border:], fields))
        # A share may be empty; no function needs to know what nothing is worth.
        found = self.config.function(answers) if answers else []
        if not hasattr(found, "__len__"):
            raise BatchError(f"the reward function returned a {type(found).__name__}; it returns one reward for each answer")
        if len(found) != len(answers):
            raise BatchError(f"the reward function returned {len(found)} rewards for {len(answers)} answers")
        rewards = [_number(reward, batch.name_of(row)) for row, reward in enumerate(found)]
        return adapter.answer_rows({"rewards": torch.tensor(rewards, dtype=torch.float32)})

    def _answer(self, prompt: list[int], response: list[int], fields: Mapping[str, Any]) -> Answer:
        if self._tokenizer is None:
            return Answer(prompt=prompt, response=response, fields=fields)
        return Answer(
            prompt=prompt,
            response=response,
            fields=fields,
            prompt_text=self._tokenizer.decode(prompt),
            response_text=self._tokenizer.decode(response, skip_special_tokens=True),
        )

    def close(self) -> None:
        """Nothing to free."""
