"""Checks whether a chat template supports training on multi-turn conversations."""
