"""The advantage role: computes advantages and returns from a batch's rewards, values and log-probabilities, on the ranks that hold them."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ...engine.errors import BatchError
from ...engine.loss import loss_mask
from ...engine.packing.batch import PackedBatch
from ...engine.parallel.collectives import collective_errors
from ...engine.parallel.process_groups import EngineGroups
from ...losses.advantages import broadcast_to_tokens, token_rewards
from ...losses.covariance import covariances, random_keys, select_between, select_largest
from ...losses.estimators.base import ESTIMATORS, Estimator
from ...losses.estimators.of_tokens import GAEEstimator
from ...losses.fields import sequence_field, token_field
from ...losses.importance import accepted_tokens, importance_weights
from ...losses.names import Correction, KLEstimator, Level, Rejection
from ...losses.policy import kl_estimate, response_tokens
from ...losses.registry import LossRegistry, RegistryConfig, check_not_negative
from .batch_adapters import adapt_batch
from .dispatch import register
from .responses import PaddedCompletions


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig(RegistryConfig):
    """The configuration of advantage computation.

    Args:
        estimator: The estimator, with its settings: one of `losses.estimators`, or an instance of your own subclass of `Estimator`.
            `AdvantageConfig.from_settings(estimator="grpo", scale=False)` takes both at once. Estimators that compare the completions of a
            group need `group_ids`; each documents which fields it needs in addition to the rewards.
        kl_coef: The weight of a KL penalty in the rewards, per token or per completion depending on the estimator. It needs
            `old_log_probs` and `reference_log_probs`.
        kl: The estimator of the KL divergence, as in `losses.policy.kl_estimate`.

    Raises:
        ConfigError: A setting is out of range.
    """

    estimator: Estimator = GAEEstimator()
    kl_coef: float = 0.0
    kl: KLEstimator = "k1"
    part: ClassVar[str] = "estimator"
    registry: ClassVar[LossRegistry[Any]] = ESTIMATORS

    def __post_init__(self) -> None:
        self._check_part(Estimator)
        check_not_negative(self, "kl_coef")


class AdvantageWorker:
    """A worker that computes advantages on its share of a batch, and reduces global quantities over all ranks.

    Args:
        config: The configuration of the role.
        ranks: The global ranks of the role; None uses all ranks.
    """

    def __init__(self, config: AdvantageConfig, ranks: Sequence[int] | None = None) -> None:
        self.config = config
        self._ranks = ranks
        self._groups: EngineGroups | None = None
        self._group: ProcessGroup | None = None

    def initialize(self) -> Self:
        """Create the process group for the reductions."""
        if dist.is_initialized():
            self._groups = EngineGroups(None)
            self._group = self._groups.get(range(dist.get_world_size()) if self._ranks is None else self._ranks, "gloo")
        return self

    @register("dp")
    def compute_advantages(self, data: Any, *, kl_coef: float | None = None) -> dict[str, Tensor]:
        """Compute the `advantages` of completion tokens; with per-token rewards (`kl_coef`) also their `returns`.

        A sequence field `episode` marks the documents that belong to one episode. Estimators with one advantage per completion then
        compare the last document of each episode and assign its advantage to all of them; other estimators treat each document
        separately.

        Collective over the ranks of the role.

        Args:
            data: This rank's data-parallel shard, with `rewards` and the other fields that the estimator needs.
            kl_coef: The weight of the KL penalty; None uses the configured one.

        Raises:
            BatchError: A field is missing, or a value in use is not finite.
        """
        config = self.config if kl_coef is None else replace(self.config, kl_coef=kl_coef)
        with self._errors():
            adapter = adapt_batch(data, every=True)
            responses = compared = PenalizedCompletions(adapter.batch, config)
            advantages, returns = config.estimator.estimate(responses)
            places: list[int] | None = None
            # `[B]`, one advantage per completion; other estimators return `[B, R]`.
            if advantages.dim() == 1:
                last, of_documents = episodes_of(adapter.batch)
                if len(last) < len(of_documents):
                    # An episode with several documents is represented by one of them.
                    compared, places = PenalizedCompletions(adapter.batch.select(last), config), of_documents
                    advantages = config.estimator.estimate(compared)[0]
                advantages = broadcast_to_tokens(advantages, compared.mask)
            if not bool(torch.isfinite(advantages).all()):
                raise BatchError("the advantages are not finite; the rewards or values are too large")
        # Reductions over ranks come last: a rank that raises before them would leave the others waiting.
        advantages = config.estimator.finish(advantages, compared, self._sum)
        if places is not None:
            # All tokens of a document have the same advantage.
            of_episodes = advantages[:, 0] if advantages.shape[1] else advantages.sum(1)
            advantages = broadcast_to_tokens(of_episodes[torch.tensor(places)], responses.mask)
        fields = {"advantages": responses.packed(advantages)}
        if returns is not None:
            fields["returns"] = responses.packed(returns)
        answer: dict[str, Tensor] = adapter.answer(fields)
        return answer

    @register("dp")
    def compute_importance_weights(
        self, data: Any, *, correction: Correction = "truncate", level: Level = "token", low: float = 0.5, high: float = 2.0
    ) -> dict[str, Tensor]:
        """Compute the `importance_weights` of completion tokens; see `losses.importance.importance_weights`.

        Args:
            data: This rank's data-parallel shard, with `old_log_probs` and `rollout_log_probs`.
            correction: `truncate` or `mask`.
            level: `token` or `sequence`.
            low: The lower bound.
            high: The upper bound.
        """
        with self._errors():
            adapter = adapt_batch(data, every=True)
            batch = adapter.batch
            mask = loss_mask(batch)
            old, rollout = (token_field(batch, name, mask) for name in ("old_log_probs", "rollout_log_probs"))
            weights = importance_weights(old, rollout, mask, batch, correction=correction, level=level, low=low, high=high)
        answer: dict[str, Tensor] = adapter.answer({"importance_weights": weights})
        return answer

    @register("dp")
    def reject(self, data: Any, limits: Mapping[Rejection, float | tuple[float, float]]) -> dict[str, Tensor]:
        """Compute a `response_mask` that excludes tokens whose probabilities differ too much between generator and trainer.

        Args:
            data: This rank's data-parallel shard, with `old_log_probs` and `rollout_log_probs`. If it has a `response_mask`, tokens are
                only removed from it.
            limits: Criterion -> its limit; see `losses.importance.accepted_tokens`.
        """
        with self._errors():
            adapter = adapt_batch(data, every=True)
            batch = adapter.batch
            mask = response_tokens(batch)
            old, rollout = (token_field(batch, name, mask) for name in ("old_log_probs", "rollout_log_probs"))
            accepted = accepted_tokens(old, rollout, mask, batch, limits)
        answer: dict[str, Tensor] = adapter.answer({"response_mask": accepted.float()})
        return answer

    @register("dp")
    def select_by_covariance(
        self, data: Any, *, fraction: float, bounds: tuple[float, float] | None = None, seed: int = 0
    ) -> dict[str, Tensor]:
        """Compute `high_covariance`, which is 1 at the tokens that the objectives `clip_cov` and `kl_cov` treat differently.

        The tokens are selected across all ranks: collective over the ranks of the role.

        Args:
            data: This rank's data-parallel shard, with `old_log_probs` and `advantages`.
            fraction: The fraction of tokens to select.
            bounds: Select tokens at random between these covariances (`clip_cov`); None selects the largest ones (`kl_cov`).
            seed: The seed of the random choice.
        """
        with self._errors():
            adapter = adapt_batch(data, every=True)
            batch = adapter.batch
            mask = response_tokens(batch)
            old, advantages = (token_field(batch, name, mask) for name in ("old_log_probs", "advantages"))
        values = covariances(old, advantages, mask, reduce=self._sum)
        if bounds is None:
            selected = select_largest(values, mask, fraction, reduce=self._sum, gather=self._gather)
        else:
            keys = random_keys(batch, seed)
            selected = select_between(values, mask, bounds, fraction, keys, reduce=self._sum, gather=self._gather)
        answer: dict[str, Tensor] = adapter.answer({"high_covariance": selected.float()})
        return answer

    @register("dp", returns="numbers")
    def summarize(self, data: Any) -> dict[str, float]:
        """Compute metrics of a batch over the completion tokens of all ranks. Collective over the ranks of the role.

        Args:
            data: This rank's data-parallel shard.

        Returns:
            Depending on the fields of the batch: the mean `entropy`. From `old_log_probs` and `rollout_log_probs`: the mean absolute
            difference `log_prob_gap`, and the largest one, `log_prob_gap_max`. From `old_log_probs` and `reference_log_probs`: the
            estimates `kl` (k1) and `kl_k3` per token, and `kl_per_response`. From `importance_weights`: their mean, and the fraction of
            tokens whose weight is 0, `importance_masked`. From a `response_mask`: the fraction of tokens that it keeps, `accepted`.

        Raises:
            BatchError: A value is not finite.
        """
        with self._errors():
            batch = adapt_batch(data, every=True).batch
            mask = loss_mask(batch)
            summary = {
                # float64, because sums over all tokens of a batch lose digits in float32.
                name: token_field(batch, name, mask).double()[mask]
                for name in ("entropy", "old_log_probs", "rollout_log_probs", "reference_log_probs", "importance_weights")
                if name in batch.token_fields
            }
        tokens = mask.sum().double()
        sums: dict[str, Tensor] = {}
        # 0 on a rank without tokens, which takes part in the maximum too.
        largest = tokens.new_zeros(())
        if "entropy" in summary:
            sums["entropy"] = summary["entropy"].sum()
        if "old_log_probs" in summary and "rollout_log_probs" in summary:
            gap = (summary["old_log_probs"] - summary["rollout_log_probs"]).abs()
            sums["log_prob_gap"] = gap.sum()
            largest = gap.max() if len(gap) else largest
        if "old_log_probs" in summary and "reference_log_probs" in summary:
            old, reference = summary["old_log_probs"], summary["reference_log_probs"]
            sums["kl"] = kl_estimate(old, reference, "k1").sum()
            sums["kl_k3"] = kl_estimate(old, reference, "k3").sum()
        if "importance_weights" in summary:
            sums["importance_weight"] = summary["importance_weights"].sum()
            sums["importance_masked"] = (summary["importance_weights"] == 0).sum().double()
        if "response_mask" in batch.token_fields:
            sums["accepted"] = response_tokens(batch).sum().double()
        rows = tokens.new_tensor(float(batch.num_sequences))
        # One reduction for all sums. The ranks have the same fields, so the order of the sums is the same everywhere.
        total = self._sum(torch.stack([tokens, rows, *sums.values()]))
        numbers = {name: float(value / total[0].clamp(min=1)) for name, value in zip(sums, total[2:], strict=True)}
        if "log_prob_gap" in sums:
            if self._group is not None:
                dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
            numbers["log_prob_gap_max"] = float(largest)
        if "kl" in sums:
            numbers["kl_per_response"] = numbers["kl"] * float(total[0] / total[1].clamp(min=1))
        return numbers

    def _errors(self) -> AbstractContextManager[None]:
        # An error on one rank is raised on all ranks; otherwise the others would wait for it in the reductions.
        return collective_errors(self._group) if self._group is not None else nullcontext()

    def _sum(self, values: Tensor) -> Tensor:
        """Add up a tensor over all ranks."""
        if self._group is not None:
            dist.all_reduce(values, group=self._group)
        return values

    def _gather(self, values: Tensor) -> Tensor:
        """Return the tensors of all ranks, concatenated."""
        if self._group is None:
            return values
        # The tensors have equal lengths on all ranks; see `losses.covariance.Gather`.
        parts = [torch.empty_like(values) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(parts, values, group=self._group)
        return torch.cat(parts)

    def close(self) -> None:
        """Release the process group."""
        if self._groups is not None:
            self._groups.close()


def episodes_of(batch: PackedBatch) -> tuple[list[int], list[int]]:
    """Return the last document of each episode, and for each document the index of its episode in that list.

    Without an `episode` field every document is its own episode.
    """
    numbers = batch.sequence_fields.get("episode")
    if numbers is None:
        return list(range(batch.num_sequences)), list(range(batch.num_sequences))
    last = {int(number): row for row, number in enumerate(numbers.tolist())}
    order = {number: i for i, number in enumerate(last)}
    return list(last.values()), [order[int(number)] for number in numbers.tolist()]


class PenalizedCompletions(PaddedCompletions):
    """The completions of a packed batch, with rewards minus the KL penalty, as estimators read them.

    Args:
        batch: The batch, in which the labels mark the completions.
        config: The penalty.
    """

    def __init__(self, batch: PackedBatch, config: AdvantageConfig) -> None:
        super().__init__(batch)
        self._config = config

    def rewards(self) -> Tensor:
        """Return the rewards `[B]`, minus the KL penalty summed over all tokens."""
        return self.token_rewards().sum(1) if self._config.kl_coef else super().rewards()

    def token_rewards(self) -> Tensor:
        """Return the rewards `[B, R]`, minus the KL penalty of each token.

        A reward is placed at the last token of its turn, if turns have rewards, otherwise of its completion.
        """
        config, kl = self._config, None
        if config.kl_coef:
            kl = kl_estimate(self.padded("old_log_probs"), self.padded("reference_log_probs"), config.kl)
        rewards, of_turns = super().rewards(), self.turn_rewards()
        if of_turns is None:
            return token_rewards(rewards, self.mask, kl, config.kl_coef)
        return of_turns + token_rewards(torch.zeros_like(rewards), self.mask, kl, config.kl_coef)

    def sequence(self, name: str) -> Tensor:
        """Return a sequence field `[B]`."""
        return sequence_field(self.batch, name, f"the estimator {self._config.estimator.name}")

    def has(self, name: str) -> bool:
        """Return whether the batch has a token field."""
        return name in self.batch.token_fields
