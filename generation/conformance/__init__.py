"""Conformance checks for generators, built-in or third-party."""
