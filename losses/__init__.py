"""Losses and advantages: pure functions of token outputs that depend only on torch."""
