"""Rollout: responses sampled from a policy, behind an interface that inference engines implement."""
