"""Rewards of completions: functions that run in processes that can be killed. No module here imports torch."""
