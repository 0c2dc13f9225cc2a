"""Rewards of completions: functions, each run where it can be killed. No module imports torch."""
