"""Estimators of advantages: one module for each kind, imported as a whole by `losses.registry`."""
