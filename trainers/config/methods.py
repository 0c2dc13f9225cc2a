"""Settings for the losses and the reference model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from ...engine.config import OffloadTarget, ParallelConfig, Settings, setting
from ...engine.errors import ConfigError
from ...losses.names import Divergence
from ...losses.pair_losses.base import PAIR_LOSSES, PairLossSpec, readers_of

if TYPE_CHECKING:
    PreferenceLossName: TypeAlias = str
else:
    PreferenceLossName = Literal[(*PAIR_LOSSES.all(), "kto")]
ReferenceMode = Literal["auto", "model", "base", "cached"]

ONLY = {
    **{name: readers_of(name) for name in ("gamma", "tau", "label_smoothing", "divergence", "length_normalize")},
    "alpha": readers_of("divergence"),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
}
"""Settings that apply only to some losses, mapped to those losses."""


def _named(condition: Callable[[PairLossSpec], bool]) -> str:
    return ", ".join(name for name, spec in PAIR_LOSSES.all().items() if condition(spec))


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig(Settings):
    """The preference loss."""

    section: ClassVar[str] = "dpo"

    loss: PreferenceLossName = setting(
        "sigmoid",
        f"loss of a pair, relative to a reference; {_named(lambda spec: not spec.needs_reference)}: without a reference; kto: relative to a reference, on single completions labeled good or bad",
    )
    loss_weights: dict[str, float] = setting(
        factory=dict,
        help="weights of several losses whose weighted sum replaces dpo.loss, as in dpo.loss_weights={sigmoid: 0.8, sft: 0.2}; sft: the chosen side's negative log-likelihood",
    )
    beta: float = setting(
        0.1,
        "scale of the reward; larger values keep the policy closer to the reference; tau in ipo, lambda in orpo",
        least=1e-6,
        most=1e3,
    )
    label_smoothing: float = setting(0.0, f"assumed fraction of flipped labels; for {', '.join(ONLY['label_smoothing'])}")
    gamma: float = setting(
        0.5, f"{', '.join(ONLY['gamma'])}: target margin between the chosen and the rejected side", most=1e3
    )
    tau: float = setting(0.05, f"{', '.join(ONLY['tau'])}: width of the transition between its two parts")
    divergence: Divergence = setting(
        "reverse_kl", f"how the distance to the reference is measured; for {', '.join(ONLY['divergence'])}"
    )
    alpha: float = setting(0.5, "parameter of dpo.divergence=alpha_divergence; 1 equals reverse_kl")
    length_normalize: bool | None = setting(
        None,
        f"divide each side's log-probability by its number of tokens; null: as the loss is defined ({_named(lambda spec: spec.per_token)} divide)",
    )
    sft_weight: float | None = setting(
        None,
        f"weight of the chosen side's negative log-likelihood (RPO's term); null: as the loss is defined (above 0 for {_named(lambda spec: spec.sft_weight > 0)})",
        most=1e6,
    )
    desirable_weight: float = setting(1.0, "kto: weight of completions labeled good", most=1e6)
    undesirable_weight: float = setting(1.0, "kto: weight of completions labeled bad", most=1e6)

    def check(self) -> None:
        """Check these settings independently of the other sections.

        Raises:
            ConfigError: A setting does not apply to the loss.
        """
        defaults = PreferenceConfig()
        if self.loss_weights and self.loss != defaults.loss:
            raise ConfigError(
                f"dpo.loss={self.loss} with dpo.loss_weights={self.loss_weights}, which replaces it; give one of them"
            )
        if "kto" in self.loss_weights:
            raise ConfigError(
                "dpo.loss_weights.kto: kto trains on single completions and cannot be added to losses of pairs; remove it"
            )
        losses = self.loss_weights or {self.loss: 1.0}
        for name, of_losses in ONLY.items():
            value = getattr(self, name)
            # A value that equals the default cannot be distinguished from one that is not set.
            if not set(of_losses) & losses.keys() and value != getattr(defaults, name):
                raise ConfigError(
                    f"dpo.{name}={value} does not apply to dpo.loss={'+'.join(losses)}; it is only for {', '.join(sorted(of_losses))}"
                )
        if self.loss == "kto" and self.sft_weight is not None:
            raise ConfigError(f"dpo.sft_weight={self.sft_weight} does not apply to dpo.loss=kto; it is for losses of pairs")
        if self.alpha != defaults.alpha and self.divergence != "alpha_divergence":
            raise ConfigError(
                f"dpo.alpha={self.alpha} is not used with dpo.divergence={self.divergence}; set that to alpha_divergence, or remove "
                "dpo.alpha"
            )


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig(Settings):
    """The reference model of the policy."""

    section: ClassVar[str] = "reference"

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
class RewardConfig(Settings):
    """The loss of the reward model."""

    section: ClassVar[str] = "rm"

    centering: float = setting(0.0, "weight of the term that pulls the rewards toward a mean of 0", most=1e6)
