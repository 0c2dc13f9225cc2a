"""Objectives of policy-gradient methods: one module for each paper, all imported by `losses.registry`."""
