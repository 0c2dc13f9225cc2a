"""Several low-rank adapters (LoRA) on one frozen model, created, trained and dropped while it runs."""
