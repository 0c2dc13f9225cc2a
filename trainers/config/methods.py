"""Settings for the losses and the reference model. This module does not import torch."""

from dataclasses import dataclass
from typing import Literal

from ...engine.config import OffloadTarget, ParallelConfig, expand_paths, setting
from ...engine.errors import ConfigError

PreferenceLossName = Literal["sigmoid", "ipo", "hinge", "simpo", "orpo", "cpo", "kto"]
ReferenceMode = Literal["auto", "model", "base", "cached"]

ONLY = {
    "gamma": ("simpo",),
    "label_smoothing": ("sigmoid", "simpo", "cpo"),
    "length_normalize": ("sigmoid", "ipo", "hinge", "simpo", "orpo", "cpo"),
    "sft_weight": ("sigmoid", "ipo", "hinge", "simpo", "orpo", "cpo"),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
}
"""Settings that apply only to some losses, mapped to those losses."""


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig:
    """The preference loss."""

    loss: PreferenceLossName = setting(
        "sigmoid",
        "sigmoid (DPO), ipo, hinge, kto: relative to a reference; simpo, orpo, cpo: without a reference; kto: single answers labeled good or bad",
    )
    beta: float = setting(
        0.1, "scale of the reward; larger values keep the policy closer to the reference; tau in ipo, lambda in orpo"
    )
    label_smoothing: float = setting(0.0, "assumed fraction of flipped labels; for sigmoid, simpo, cpo")
    gamma: float = setting(0.5, "simpo: target margin between the chosen and the rejected side")
    length_normalize: bool | None = setting(
        None,
        "divide each side's log-probability by its number of tokens; null: as the loss is defined (ipo, simpo and orpo divide)",
    )
    sft_weight: float | None = setting(
        None,
        "weight of the chosen side's negative log-likelihood (RPO's term); null: as the loss is defined (1 for orpo and cpo)",
    )
    desirable_weight: float = setting(1.0, "kto: weight of answers labeled good")
    undesirable_weight: float = setting(1.0, "kto: weight of answers labeled bad")

    def check(self) -> None:
        """Check these settings independently of the other sections.

        Raises:
            ConfigError: A setting does not apply to the loss.
        """
        defaults = PreferenceConfig()
        for name, losses in ONLY.items():
            value = getattr(self, name)
            if self.loss not in losses and value != getattr(defaults, name):
                raise ConfigError(
                    f"dpo.{name}={value} does not apply to dpo.loss={self.loss}; it is only for {', '.join(losses)}"
                )


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """The reference that the policy is compared with."""

    mode: ReferenceMode = setting(
        "auto",
        "model: a frozen model next to the policy; base: the policy without its adapters; cached: log-probabilities computed once before training and kept in data.cache_dir; auto: base with LoRA, otherwise model",
    )
    path: str | None = setting(None, "folder or Hugging Face name of the reference; null: model.path", path=True)
    backend: str | None = setting(
        None, "the reference's engine, which then uses the layout of reference.parallel; null: the policy's engine and layout"
    )
    parallel: ParallelConfig = setting(
        factory=ParallelConfig, help="the reference's parallel layout if reference.backend is set"
    )
    offload: OffloadTarget = setting("none", "where the reference's sharded parameters are offloaded between uses")

    def __post_init__(self) -> None:
        expand_paths(self, "reference")

    def check(self) -> None:
        """Check these settings independently of the other sections.

        Raises:
            ConfigError: A layout is given without a backend.
        """
        if self.backend is None and self.parallel != ParallelConfig():
            raise ConfigError(
                "reference.parallel is set but reference.backend is not; without a backend the reference uses the policy's layout: set both, or neither"
            )


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """The loss of the reward model."""

    centering: float = setting(0.0, "weight of the term that pulls the rewards toward a mean of 0")
