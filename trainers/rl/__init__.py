"""Reinforcement learning: rollout, scoring and updates, as phases over the roles of a group."""
