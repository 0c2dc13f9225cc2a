"""Groups of worker processes: in this process or under torchrun, on this machine, and on Ray."""
