"""The built-in losses of pairs. Their formulas are in `losses.pairs`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...engine.errors import ConfigError
from .base import pair_loss

if TYPE_CHECKING:
    from torch import Tensor

    from ..preference import PairSides, PreferenceLoss

# What changes the margin m, for losses that read nothing else of a pair.
_OF_MARGIN = ("divergence", "length_normalize")


def _check_smoothing(s: PreferenceLoss) -> None:
    # The loss contains log e.
    if not s.label_smoothing:
        raise ConfigError("label_smoothing=0 with loss=exo_pair, which is then infinite; the paper uses 0.001")


def _check_per_token(s: PreferenceLoss) -> None:
    if s.length_normalize is False:
        raise ConfigError("length_normalize=false with loss=orpo, whose odds are defined per token; unset it")


@pair_loss(
    "sigmoid",
    "DPO's: -log s(beta m)",
    paper="Rafailov et al. 2023, arXiv:2305.18290",
    reads=("label_smoothing", *_OF_MARGIN),
)
def _sigmoid(s: PreferenceLoss, x: PairSides) -> Tensor:
    from .. import pairs

    return pairs.sigmoid_loss(x.margin, s.beta, s.label_smoothing)


@pair_loss(
    "ipo", "(m - 1 / (2 beta))^2, per token", paper="Azar et al. 2023, arXiv:2310.12036", reads=_OF_MARGIN, per_token=True
)
def _ipo(s: PreferenceLoss, x: PairSides) -> Tensor:
    from .. import pairs

    return pairs.ipo_loss(x.margin, s.beta)


@pair_loss("hinge", "max(0, 1 - beta m)", paper="Zhao et al. 2023, arXiv:2305.10425", reads=_OF_MARGIN)
def _hinge(s: PreferenceLoss, x: PairSides) -> Tensor:
    from .. import pairs

    return pairs.hinge_loss(x.margin, s.beta)


@pair_loss(
    "exo_pair",
    "the KL divergence from the labels to the policy's preference; `label_smoothing` above 0",
    paper="Ji et al. 2024, arXiv:2402.00856",
    reads=("label_smoothing", *_OF_MARGIN),
    check=_check_smoothing,
)
def _exo_pair(s: PreferenceLoss, x: PairSides) -> Tensor:
    from .. import pairs

    return pairs.exo_loss(x.margin, s.beta, s.label_smoothing)


@pair_loss(
    "robust",
    "(-(1 - e) log s(beta m) + e log s(-beta m)) / (1 - 2 e)",
    paper="Chowdhury et al. 2024, arXiv:2403.00409",
    reads=("label_smoothing", *_OF_MARGIN),
)
def _robust(s: PreferenceLoss, x: PairSides) -> Tensor:
    from .. import pairs

    return pairs.robust_loss(x.margin, s.beta, s.label_smoothing)


@pair_loss("nca_pair", "-log s(beta c) - (log s(-beta c) + log s(-beta r)) / 2", paper="Chen et al. 2024, arXiv:2402.05369")
def _nca_pair(s: PreferenceLoss, x: PairSides) -> Tensor:
    from .. import pairs

    return pairs.nca_loss(x.chosen, x.rejected, s.beta)


@pair_loss("bco_pair", "-log s(beta c) - log s(-beta r)", paper="Jung et al. 2024, arXiv:2404.04656")
def _bco_pair(s: PreferenceLoss, x: PairSides) -> Tensor:
    from .. import pairs

    return pairs.bco_loss(x.chosen, x.rejected, s.beta)


@pair_loss("sppo_hard", "(c - 1 / (2 beta))^2 + (r + 1 / (2 beta))^2", paper="Wu et al. 2024, arXiv:2405.00675")
def _sppo_hard(s: PreferenceLoss, x: PairSides) -> Tensor:
    from .. import pairs

    return pairs.sppo_loss(x.chosen, x.rejected, s.beta)


@pair_loss("apo_zero", "1 - s(beta c) + s(beta r)", paper="D'Oosterlinck et al. 2024, arXiv:2408.06266")
def _apo_zero(s: PreferenceLoss, x: PairSides) -> Tensor:
    from .. import pairs

    return pairs.apo_zero_loss(x.chosen, x.rejected, s.beta)


@pair_loss("apo_down", "s(beta c) + 1 - s(beta m)", paper="D'Oosterlinck et al. 2024, arXiv:2408.06266")
def _apo_down(s: PreferenceLoss, x: PairSides) -> Tensor:
    from .. import pairs

    return pairs.apo_down_loss(x.chosen, x.rejected, s.beta)


@pair_loss(
    "aot",
    "-log s(beta (d - q)), q: the reference's difference of the same rank in the global batch",
    paper="Melnyk et al. 2024, arXiv:2406.05882",
    reads=("label_smoothing",),
    needs_matching=True,
)
def _aot(s: PreferenceLoss, x: PairSides) -> Tensor:
    from .. import pairs

    # By `needs_matching`, `PreferenceLoss` requires the field.
    assert x.matched is not None
    return pairs.aot_loss(x.chosen_policy - x.rejected_policy, x.matched, s.beta, s.label_smoothing)


@pair_loss(
    "discopop",
    "a mix of -log s(beta m) and exp(-beta m)",
    paper="Lu et al. 2024, arXiv:2406.08414",
    reads=("divergence", "tau"),
)
def _discopop(s: PreferenceLoss, x: PairSides) -> Tensor:
    from .. import pairs

    return pairs.discopop_loss(x.margin, s.beta, s.tau)


@pair_loss(
    "simpo",
    "-log s(beta d - gamma), per token",
    paper="Meng et al. 2024, arXiv:2405.14734",
    reads=("gamma", "label_smoothing", "length_normalize"),
    needs_reference=False,
    per_token=True,
)
def _simpo(s: PreferenceLoss, x: PairSides) -> Tensor:
    from .. import pairs

    return pairs.simpo_loss(x.margin, s.beta, s.gamma, s.label_smoothing)


@pair_loss(
    "orpo",
    "likelihood of the chosen side, and beta times the log-odds ratio, per token",
    paper="Hong et al. 2024, arXiv:2403.07691",
    reads=("length_normalize",),
    needs_reference=False,
    per_token=True,
    sft_weight=1.0,
    check=_check_per_token,
)
def _orpo(s: PreferenceLoss, x: PairSides) -> Tensor:
    from .. import pairs

    return pairs.orpo_loss(x.chosen_policy, x.rejected_policy, s.beta)


@pair_loss(
    "cpo",
    "likelihood of the chosen side, and -log s(beta d)",
    paper="Xu et al. 2024, arXiv:2401.08417",
    reads=("label_smoothing", "length_normalize"),
    needs_reference=False,
    sft_weight=1.0,
)
def _cpo(s: PreferenceLoss, x: PairSides) -> Tensor:
    from .. import pairs

    return pairs.cpo_loss(x.margin, s.beta, s.label_smoothing)
