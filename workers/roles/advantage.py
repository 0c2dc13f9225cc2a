"""The advantage role: advantages and returns from the rewards, values and log-probabilities of a batch, where these are."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ...engine.errors import BatchError, ConfigError
from ...engine.loss import loss_mask
from ...engine.packing.batch import PackedBatch
from ...engine.parallel.collectives import collective_errors
from ...engine.parallel.process_groups import EngineGroups
from ..advantages import broadcast_to_tokens, discounted_returns, gae, grpo, remax, rloo, token_rewards, whiten
from ..batch_adapters import adapt_batch
from ..dispatch import register
from ..losses.fields import sequence_field, token_field
from ..losses.policy import KLEstimator, kl_estimate

Estimator = Literal["gae", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax"]


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """How advantages are computed.

    Args:
        estimator: The function of `workers.advantages`: `gae` needs the field `values`; `grpo`, `rloo` and
            `reinforce_plus_plus_baseline` compare the responses of a group, so they need `group_ids`; `remax` needs the sequence
            field `baselines`, the rewards of greedy responses.
        kl_coef: The weight of a KL penalty in the rewards of tokens, for `gae`, `reinforce_plus_plus` and `remax`; it needs
            `old_log_probs` and `reference_log_probs`.
        kl: The estimator of the KL divergence, as in `losses.policy.kl_estimate`.
        gamma: The discount per token.
        lam: lambda of GAE.
        scale: Whether GRPO divides by the group's standard deviation.
        whiten: Whether advantages of `gae` and of both forms of `reinforce_plus_plus` get mean 0 and variance 1 over the tokens of
            the global batch.
    """

    estimator: Estimator = "gae"
    kl_coef: float = 0.0
    kl: KLEstimator = "k1"
    gamma: float = 1.0
    lam: float = 0.95
    scale: bool = True
    whiten: bool = True

    def __post_init__(self) -> None:
        if self.estimator not in _ESTIMATORS:
            raise ConfigError(f"estimator={self.estimator!r}; it must be one of {', '.join(_ESTIMATORS)}")
        for name in ("gamma", "lam"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)}; it must be between 0 and 1")


class AdvantageWorker:
    """A worker that computes advantages on its share of a batch, and adds up what concerns the global batch over all ranks.

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
        """Create the process group over which sums are taken."""
        if dist.is_initialized():
            self._groups = EngineGroups(None)
            self._group = self._groups.get(range(dist.get_world_size()) if self._ranks is None else self._ranks, "gloo")
        return self

    @register("dp")
    def compute_advantages(self, data: Any) -> dict[str, Tensor]:
        """Compute the `advantages` of response tokens, and with `gae`, `reinforce_plus_plus` and `remax` their `returns`.

        Collective over the ranks of the role.

        Args:
            data: This rank's data-parallel shard, with `rewards` and what the estimator needs.

        Raises:
            BatchError: A field is missing, or a value that is used is not finite.
        """
        # An error on one rank is raised on all of them: the others would wait for it in the sums.
        with collective_errors(self._group) if self._group is not None else nullcontext():
            adapter = adapt_batch(data, every=True)
            responses = Responses(adapter.batch)
            advantages, returns = _ESTIMATORS[self.config.estimator](self.config, responses)
            if not bool(torch.isfinite(advantages).all()):
                raise BatchError("the advantages are not finite; the rewards or values are too large")
        if self.config.whiten and self.config.estimator in _WHITENED:
            advantages = whiten(advantages, responses.mask, reduce=self._sum)
        fields = {"advantages": responses.packed(advantages)}
        if returns is not None:
            fields["returns"] = responses.packed(returns)
        answer: dict[str, Tensor] = adapter.answer(fields)
        return answer

    def _sum(self, values: Tensor) -> Tensor:
        """Add up a tensor over all ranks."""
        if self._group is not None:
            dist.all_reduce(values, group=self._group)
        return values

    def close(self) -> None:
        """Release the process group."""
        if self._groups is not None:
            self._groups.close()


class Responses:
    """The responses of a packed batch as rows of a padded tensor.

    Axes: B responses, R tokens of the longest response, T tokens.

    Args:
        batch: The batch, in which the labels mark the responses.
    """

    def __init__(self, batch: PackedBatch) -> None:
        self.batch = batch
        supervised = loss_mask(batch)
        lengths = torch.tensor(batch.lengths, dtype=torch.long)
        rows = torch.repeat_interleave(torch.arange(batch.num_sequences), lengths)
        self._at = supervised.nonzero()[:, 0]
        self._row = rows[self._at]
        counts = torch.bincount(self._row, minlength=batch.num_sequences)
        first = counts.cumsum(0) - counts
        self._column = torch.arange(len(self._at)) - first[self._row]
        self.mask = torch.zeros(batch.num_sequences, int(counts.max()) if len(counts) else 0, dtype=torch.bool)
        self.mask[self._row, self._column] = True

    def padded(self, name: str) -> Tensor:
        """Return a token field as `[B, R]`."""
        values = token_field(self.batch, name)
        padded = values.new_zeros(self.mask.shape)
        padded[self._row, self._column] = values[self._at]
        return padded

    def rewards(self) -> Tensor:
        """Return the rewards `[B]`."""
        return sequence_field(self.batch, "rewards", "computing advantages")

    def groups(self) -> Tensor:
        """Return the group of each response `[B]`.

        Raises:
            BatchError: The batch has no groups.
        """
        if self.batch.group_ids is None:
            raise BatchError("advantages within groups need group_ids; give them to the reference, with with_groups(...)")
        return self.batch.group_ids

    def packed(self, values: Tensor) -> Tensor:
        """Return values `[B, R]` as `[T]`, each at the position that predicts its token; 0 elsewhere."""
        packed = values.new_zeros(self.batch.num_tokens)
        packed[self._at] = values[self._row, self._column]
        return packed


Result = tuple[Tensor, Tensor | None]


def _token_rewards(config: AdvantageConfig, responses: Responses) -> Tensor:
    kl = None
    if config.kl_coef:
        kl = kl_estimate(responses.padded("old_log_probs"), responses.padded("reference_log_probs"), config.kl)
    return token_rewards(responses.rewards(), responses.mask, kl, config.kl_coef)


def _gae(config: AdvantageConfig, responses: Responses) -> Result:
    rewards = _token_rewards(config, responses)
    return gae(rewards, responses.padded("values"), responses.mask, config.gamma, config.lam)


def _grpo(config: AdvantageConfig, responses: Responses) -> Result:
    scores = grpo(responses.rewards(), responses.groups(), scale=config.scale)
    return broadcast_to_tokens(scores, responses.mask), None


def _rloo(config: AdvantageConfig, responses: Responses) -> Result:
    return broadcast_to_tokens(rloo(responses.rewards(), responses.groups()), responses.mask), None


def _reinforce_plus_plus(config: AdvantageConfig, responses: Responses) -> Result:
    returns = discounted_returns(_token_rewards(config, responses), responses.mask, config.gamma)
    return returns, returns


def _reinforce_plus_plus_baseline(config: AdvantageConfig, responses: Responses) -> Result:
    scores = grpo(responses.rewards(), responses.groups(), scale=False)
    return broadcast_to_tokens(scores, responses.mask), None


def _remax(config: AdvantageConfig, responses: Responses) -> Result:
    baselines = sequence_field(responses.batch, "baselines", "the estimator remax")
    return remax(_token_rewards(config, responses), baselines, responses.mask, config.gamma)


_WHITENED = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
_ESTIMATORS: Mapping[str, Callable[[AdvantageConfig, Responses], Result]] = {
    "gae": _gae,
    "grpo": _grpo,
    "rloo": _rloo,
    "reinforce_plus_plus": _reinforce_plus_plus,
    "reinforce_plus_plus_baseline": _reinforce_plus_plus_baseline,
    "remax": _remax,
}
