"""Losses: pure functions of token outputs that depend only on torch."""
