"""The names of losses, estimators and criteria, for settings and for the functions that they choose. Does not import torch."""

from typing import Literal

Ratio = Literal["token", "sequence", "sequence-token"]
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
Objective = Literal["clipped", "cispo", "gpg", "sapo", "dppo_tv", "dppo_kl", "gmpo", "clip_cov", "kl_cov"]
KLEstimator = Literal["k1", "k2", "k3", "k3+", "abs"]
Divergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]
PairLoss = Literal[
    "sigmoid",
    "ipo",
    "hinge",
    "exo_pair",
    "robust",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "aot",
    "discopop",
    "simpo",
    "orpo",
    "cpo",
]
SMOOTHED: frozenset[str] = frozenset({"sigmoid", "cpo", "simpo", "exo_pair", "robust", "aot"})
"""Losses that assume a fraction of flipped labels."""
BY_DIVERGENCE: frozenset[str] = frozenset({"sigmoid", "ipo", "hinge", "exo_pair", "robust", "discopop"})
"""Losses of the difference between the two sides' distances to the reference, which another divergence may measure."""
Level = Literal["token", "sequence"]
Correction = Literal["truncate", "mask"]
Rejection = Literal[
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
]
"""What of the difference is bounded: the estimates of single tokens, or their sum, mean or largest one in a response."""
Estimator = Literal[
    "gae",
    "grpo",
    "pass_at_k",
    "rloo",
    "opo",
    "gpg",
    "optimal_token_baseline",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
]
WITHOUT_GROUPS: frozenset[str] = frozenset({"gae", "reinforce_plus_plus", "remax"})
"""Estimators that do not compare the responses to one prompt."""
