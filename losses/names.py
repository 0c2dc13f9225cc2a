"""The names of ratios, aggregations, divergences and criteria, for settings and for the functions that implement them."""

from typing import Literal

Ratio = Literal["token", "sequence", "sequence-token"]
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KLEstimator = Literal["k1", "k2", "k3", "k3+", "abs"]
Divergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]
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
    "token_binary_kl",
]
"""The criteria: the estimates of single tokens, or their sum, mean or maximum in a completion; or the divergences of a token against all
others."""
