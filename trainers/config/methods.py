"""Settings of the losses and of the reference model. Imports no torch."""

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
"""Settings that not every loss has, with the losses that have them."""


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig:
    """The loss over preferences."""

    loss: PreferenceLossName = setting(
        "sigmoid",
        "sigmoid (DPO), ipo, hinge, kto: against a reference; simpo, orpo, cpo: without one; kto: single answers, liked or not",
    )
    beta: float = setting(0.1, "scale of the reward: the larger, the nearer to the reference; tau of ipo, lambda of orpo")
    label_smoothing: float = setting(0.0, "share of labels thought to be the wrong way round; sigmoid, simpo, cpo")
    gamma: float = setting(0.5, "simpo: the margin that the chosen side shall have")
    length_normalize: bool | None = setting(
        None, "divide a side's log-probability by its tokens; null: as the loss is defined (ipo, simpo and orpo do)"
    )
    sft_weight: float | None = setting(
        None,
        "weight of the chosen side's negative log-likelihood (RPO's term); null: as the loss is defined (1 with orpo, cpo)",
    )
    desirable_weight: float = setting(1.0, "kto: weight of good answers")
    undesirable_weight: float = setting(1.0, "kto: weight of bad answers")

    def check(self) -> None:
        """Check these settings by themselves.

        Raises:
            ConfigError: A setting is set that the loss does not have.
        """
        defaults = PreferenceConfig()
        for name, losses in ONLY.items():
            value = getattr(self, name)
            if self.loss not in losses and value != getattr(defaults, name):
                raise ConfigError(
                    f"dpo.{name}={value} with dpo.loss={self.loss}, which has none; it is for {', '.join(losses)}"
                )


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """What the policy is compared with."""

    mode: ReferenceMode = setting(
        "auto",
        "model: a frozen model beside the policy; base: the policy without its adapters; cached: computed once before training, and kept with the data; auto: base under LoRA, else model",
    )
    path: str | None = setting(None, "folder or Hugging Face name of the reference; null: model.path", path=True)
    backend: str | None = setting(None, "its engine, which then has the layout of reference.parallel; null: as the policy's")
    parallel: ParallelConfig = setting(factory=ParallelConfig, help="its layout, where reference.backend is set")
    offload: OffloadTarget = setting("none", "resting place of its sharded parameters")

    def __post_init__(self) -> None:
        expand_paths(self, "reference")

    def check(self) -> None:
        """Check these settings by themselves.

        Raises:
            ConfigError: A layout is given without its backend.
        """
        if self.backend is None and self.parallel != ParallelConfig():
            raise ConfigError(
                "reference.parallel is set, reference.backend is not: without it the reference has the policy's layout; set both, or neither"
            )


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """The loss of a reward model."""

    centering: float = setting(0.0, "weight of the term that draws rewards to a mean of 0")
