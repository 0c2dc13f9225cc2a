"""Losses of pairs of answers: DPO and related methods, which are imported as a whole by `losses.registry`."""
