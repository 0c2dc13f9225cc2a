"""The packed batch: its format, conversions to and from others, and its division into micro-batches."""
