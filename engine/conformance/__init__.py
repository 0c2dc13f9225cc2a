"""Conformance checks for engines, built-in or third-party."""
