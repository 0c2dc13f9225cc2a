"""Checks that any engine, ours or a third party's, runs against itself."""
