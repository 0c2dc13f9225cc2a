"""Packed batches: the format, conversions from and to other formats, and the partition into micro-batches."""
