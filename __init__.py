"""Drivetrain: one training program for large language models, on any engine."""

__version__ = "0.1.0"
