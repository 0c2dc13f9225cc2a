"""The training loop, with resuming, early stopping, signals, sample answers and loggers."""
