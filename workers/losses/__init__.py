"""Losses: pure functions over token outputs; torch only."""
