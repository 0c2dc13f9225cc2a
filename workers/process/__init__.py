"""The worker process: one rank, which holds models and answers requests."""
