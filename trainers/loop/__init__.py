"""The training loop and what accompanies it: resuming, early stopping, signals, samples and loggers."""
