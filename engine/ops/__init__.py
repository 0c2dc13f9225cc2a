"""Numerical operations that the engines share; they depend only on torch."""
