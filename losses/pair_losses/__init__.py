"""Losses of pairs of completions: DPO and related methods, all imported by `losses.registry`."""
