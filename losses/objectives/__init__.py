"""Objectives of policy-gradient methods: one module for each paper, imported as a whole by `losses.registry`."""
