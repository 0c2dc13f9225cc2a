"""The location of a run's samples, and their transfer between workers."""
