"""Environments that a policy acts in, and the processes that run them."""
