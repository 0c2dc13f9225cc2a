"""Published algorithms of RL: each consists of settings of one loss and one estimator of advantages.

Algorithms that are named after an objective or an estimator are registered next to it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .registry import LossRegistry


@dataclass(frozen=True, kw_only=True)
class AlgorithmSpec:
    """A registered algorithm.

    Args:
        loss: The settings of `losses.policy.PolicyLoss` that differ from its defaults; None for a loss that compares pairs of completions.
        advantage: The settings of `AdvantageConfig` that differ from its defaults; None for a loss that compares pairs of completions.
        dynamic_sampling: Whether groups of equal rewards are replaced.
        summary: The description of its loss, for the docs; if empty, the summary of the objective.
        paper: Author, year and arXiv number.
    """

    loss: Mapping[str, Any] | None
    advantage: Mapping[str, Any] | None
    dynamic_sampling: bool = False
    summary: str = ""
    paper: str


ALGORITHMS: LossRegistry[AlgorithmSpec] = LossRegistry("algorithm")
"""The algorithms, with the settings of their papers or, if these do not specify them, of common implementations."""


def algorithm(name: str, **spec: Any) -> None:
    """Register an algorithm.

    Args:
        name: The name, the value of `rl.algorithm`.
        spec: The fields of `AlgorithmSpec`.
    """
    ALGORITHMS.add(name, AlgorithmSpec(**spec))


_GROUPED = {"estimator": "grpo"}

algorithm(
    "ppo",
    summary="clipped at 0.2, dual clip 3, mean over tokens",
    paper="Schulman et al. 2017, arXiv:1707.06347",
    # The dual clip is as in verl.
    loss={},
    advantage={"estimator": "gae", "kl_coef": 0.05},
)
algorithm(
    "grpo",
    summary="clipped at 0.2, mean over completions of the mean over tokens, KL (k3) 0.04",
    # Equation 3 and section 4.2.
    paper="Shao et al. 2024, arXiv:2402.03300",
    loss={"aggregation": "seq-mean-token-mean", "dual_clip": None, "kl_coef": 0.04},
    advantage=_GROUPED,
)
algorithm(
    "dr_grpo",
    summary="clipped at 0.2, sum over tokens divided by `rollout.max_tokens`, no KL",
    paper="Liu et al. 2025, arXiv:2503.20783",
    # The run fills in the constant that sums are divided by.
    loss={"aggregation": "seq-mean-token-sum-norm", "length_norm": 1, "dual_clip": None},
    advantage={"estimator": "grpo", "scale": False},
)
algorithm(
    "dapo",
    summary="clipped at 0.2 below and 0.28 above, dual clip 3, mean over tokens; `overlong` is a reward",
    # Dynamic sampling is section 3.2.
    paper="Yu et al. 2025, arXiv:2503.14476",
    loss={"clip_high": 0.28},
    advantage=_GROUPED,
    dynamic_sampling=True,
)
algorithm(
    "gspo",
    summary="the ratio of an entire completion, clipped at 3e-4 and 4e-4",
    # Equation 5 and section 5.1.
    paper="Zheng et al. 2025, arXiv:2507.18071",
    loss={
        "ratio": "sequence",
        "aggregation": "seq-mean-token-mean",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "dual_clip": None,
    },
    advantage=_GROUPED,
)
algorithm(
    "online_dpo",
    summary="a preference loss (`dpo.*`) on the best and the worst completion of a group",
    paper="Guo et al. 2024, arXiv:2402.04792",
    loss=None,
    advantage=None,
)
