"""Groups of worker processes: local under torchrun, and on Ray."""
