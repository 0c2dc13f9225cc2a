"""Arithmetic that engines share; torch only."""
