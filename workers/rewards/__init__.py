"""Rewards of answers: functions, each run where it can be killed."""
