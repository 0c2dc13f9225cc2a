"""Losses that are plain sums over tokens, of which their caller owns all weights: nothing is averaged, masked or clipped unasked.

They are the losses of Tinker's training protocol (Thinking Machines 2026, "Losses" in its documentation). With p the log-probability of a
token's label, q its log-probability when it was sampled (`old_log_probs`), A its advantage, w its weight and r = exp(p - q):

| loss | sum of |
|---|---|
| cross_entropy | -w p |
| importance_sampling | -r A |
| ppo | -min(r A, clip(r, low, high) A); low and high are bounds of the ratio itself |
| cispo | -sg(clip(r, low, high)) p A |
| dro | -(p A - beta / 2 (p - q)^2) |
| gspo | -min(s A, clip(s, low, high) A), s = exp(mean of (sg(p) - q) over the document's tokens of `sequence_ratio_mask` + p - sg(p)) |

A token may have several targets (the field `targets`), each with weights or advantages of its own: the sum is then over these too.

Axes: T tokens, K targets of each.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from ..engine.errors import BatchError, ConfigError
from ..engine.loss import TARGETS, LossSums, OutputRequest, TokenOutputs, loss_mask
from ..engine.packing.batch import PackedBatch

_RATIO_FIELDS = ("old_log_probs", "advantages")


@dataclass(frozen=True, kw_only=True)
class _Formula:
    """A loss of each token.

    Args:
        compute: A function of log-probabilities `[T]`, fields of the batch, the batch and the settings.
        fields: The token fields that it reads.
        settings: Its settings, with their defaults.
        linear: Whether it is linear in the log-probabilities.
        several: Whether tokens may have several targets.
    """

    compute: Callable[[Tensor, Mapping[str, Tensor], PackedBatch, Mapping[str, float]], Tensor]
    fields: tuple[str, ...]
    settings: Mapping[str, float] = field(default_factory=dict)
    linear: bool = False
    several: bool = True


def _cross_entropy(p: Tensor, fields: Mapping[str, Tensor], batch: PackedBatch, settings: Mapping[str, float]) -> Tensor:
    return -p * fields["loss_weights"]


def _importance_sampling(p: Tensor, fields: Mapping[str, Tensor], batch: PackedBatch, settings: Mapping[str, float]) -> Tensor:
    advantages = fields["advantages"]
    # A ratio that overflows, times an advantage of zero, would be a NaN, in the backward pass too.
    counts = advantages != 0
    return -torch.where(counts, p - fields["old_log_probs"], 0.0).exp() * advantages


def _clipped(log_ratio: Tensor, advantages: Tensor, settings: Mapping[str, float]) -> Tensor:
    low, high = settings["clip_low_threshold"], settings["clip_high_threshold"]
    with torch.no_grad():
        ratio = log_ratio.exp()
        bounded = ratio.clamp(low, high) * advantages
        # Where the bound is what counts there is no gradient; of a ratio that overflows, zero times infinity would be a NaN.
        free = (ratio * advantages <= bounded) & (advantages != 0)
    return -torch.where(free, torch.where(free, log_ratio, 0.0).exp() * advantages, bounded)


def _ppo(p: Tensor, fields: Mapping[str, Tensor], batch: PackedBatch, settings: Mapping[str, float]) -> Tensor:
    return _clipped(p - fields["old_log_probs"], fields["advantages"], settings)


def _cispo(p: Tensor, fields: Mapping[str, Tensor], batch: PackedBatch, settings: Mapping[str, float]) -> Tensor:
    ratio = (p.detach() - fields["old_log_probs"]).exp()
    weight = ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])
    return -weight * p * fields["advantages"]


def _dro(p: Tensor, fields: Mapping[str, Tensor], batch: PackedBatch, settings: Mapping[str, float]) -> Tensor:
    return -(p * fields["advantages"] - settings["beta"] / 2 * (p - fields["old_log_probs"]).square())


def _gspo(p: Tensor, fields: Mapping[str, Tensor], batch: PackedBatch, settings: Mapping[str, float]) -> Tensor:
    mask = fields["sequence_ratio_mask"]
    difference = (p.detach() - fields["old_log_probs"]) * mask
    means = torch.cat(
        [
            (difference[start:end].sum() / mask[start:end].sum().clamp_min(1)).expand(end - start)
            for start, end in pairwise(batch.bounds)
        ]
    )
    # The value is that of the document's ratio, and the gradient that of the token's own log-probability.
    return _clipped(means + p - p.detach(), fields["advantages"], settings)


_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}

FORMULAS: Mapping[str, _Formula] = {
    "cross_entropy": _Formula(compute=_cross_entropy, fields=("loss_weights",), linear=True),
    "importance_sampling": _Formula(compute=_importance_sampling, fields=_RATIO_FIELDS),
    "ppo": _Formula(compute=_ppo, fields=_RATIO_FIELDS, settings=_CLIP),
    "cispo": _Formula(compute=_cispo, fields=_RATIO_FIELDS, settings={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "dro": _Formula(compute=_dro, fields=_RATIO_FIELDS, settings={"beta": 0.05}),
    # The ratio of a document is that of its tokens, of which each is one.
    "gspo": _Formula(compute=_gspo, fields=(*_RATIO_FIELDS, "sequence_ratio_mask"), settings=_CLIP, several=False),
}
"""The losses by their names."""


@dataclass(frozen=True)
class TokenSumLoss:
    """A sum over tokens; see the module.

    Args:
        name: The name of the loss.
        settings: Its settings; those that are not given have their defaults.

    Raises:
        ConfigError: There is no such loss or setting, or a setting is out of range.
    """

    name: str
    settings: Mapping[str, float] = field(default_factory=dict)
    request: ClassVar[OutputRequest] = OutputRequest(log_probs=True)
    sequence_fields: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        if self.name not in FORMULAS:
            raise ConfigError(f"there is no loss {self.name!r}; there are {', '.join(FORMULAS)}")
        defaults = FORMULAS[self.name].settings
        for name, value in self.settings.items():
            if name not in defaults:
                raise ConfigError(f"loss {self.name} has no setting {name!r}; it has {', '.join(defaults) or 'none'}")
            if not math.isfinite(value) or value < 0:
                raise ConfigError(f"{name}={value} of the loss {self.name}; it must be finite, and at least 0")
        settings = {**defaults, **self.settings}
        if "clip_low_threshold" in settings and settings["clip_low_threshold"] > settings["clip_high_threshold"]:
            raise ConfigError(
                f"clip_low_threshold={settings['clip_low_threshold']} of the loss {self.name} is above clip_high_threshold="
                f"{settings['clip_high_threshold']}; both are bounds of the ratio itself, such as 0.8 and 1.2"
            )
        # The dataclass is frozen; the settings are stored with their defaults filled in.
        object.__setattr__(self, "settings", settings)

    @property
    def linear(self) -> bool:
        """Whether the loss is linear in the log-probabilities."""
        return FORMULAS[self.name].linear

    @property
    def token_fields(self) -> frozenset[str]:
        """The fields that it reads."""
        return frozenset(FORMULAS[self.name].fields)

    def tokens(self, batch: PackedBatch) -> Tensor:
        """Return the mask of the tokens with a label."""
        return loss_mask(batch)

    def weights(self, batch: PackedBatch) -> Mapping[str, float]:
        """Return 1: the sum is not divided."""
        return {"loss": 1.0}

    def __call__(self, outputs: TokenOutputs, batch: PackedBatch) -> LossSums:
        """Return the sum over the tokens with a label.

        Raises:
            BatchError: The batch lacks a field that the loss reads, has another one, or one of another shape.
        """
        assert outputs.log_probs is not None
        formula = FORMULAS[self.name]
        for name in formula.fields:
            if name not in batch.token_fields:
                raise BatchError(
                    f"loss {self.name} reads {', '.join(formula.fields)}; the batch has {', '.join(batch.token_fields) or 'none'}"
                )
        # A field that is not read is most often a mistake about what the loss does, so it is refused.
        if unread := set(batch.token_fields) - {*formula.fields, TARGETS} - batch.extra_fields:
            raise BatchError(
                f"loss {self.name} reads {', '.join(formula.fields)}, but not {', '.join(sorted(unread))}; remove it"
            )
        dtype, shape = outputs.log_probs.dtype, outputs.log_probs.shape
        if len(shape) > 1 and not formula.several:
            raise BatchError(f"loss {self.name} takes one target of each token; the batch has {shape[1]}")
        if wrong := [name for name in formula.fields if batch.token_fields[name].shape != shape]:
            raise BatchError(
                f"{wrong[0]} is {list(batch.token_fields[wrong[0]].shape)}; it must have a number for each target, {list(shape)}"
            )
        # `[T, 1]`, for all targets of a token.
        mask = outputs.mask if len(shape) == 1 else outputs.mask[:, None]
        # Other positions may hold anything; even multiplied by zero, a NaN would corrupt the loss.
        fields = {name: torch.where(mask, batch.token_fields[name].to(dtype), 0.0) for name in formula.fields}
        values = formula.compute(outputs.log_probs, fields, batch, self.settings)
        return LossSums(terms={"loss": torch.where(mask, values, 0.0).sum()})
