"""Estimators of advantages: one module for each kind, all imported by `losses.registry`."""
