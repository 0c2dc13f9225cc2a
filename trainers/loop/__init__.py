"""The training loop, with resuming, early stopping, signals, sample completions and loggers."""
