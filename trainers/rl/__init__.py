"""Reinforcement learning: rollout, scores and updates, as phases over the roles of a group."""
