"""The names of ratios, aggregations, divergences and criteria, for settings and for the functions that they choose. Imports no torch."""

from typing import Literal

Ratio = Literal["token", "sequence", "sequence-token"]
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
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
