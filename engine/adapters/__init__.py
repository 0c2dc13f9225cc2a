"""Several low-rank adapters (LoRA) on one frozen model, which are created, trained and dropped while the engine runs."""
