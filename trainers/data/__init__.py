"""The data pipeline, from files to global batches."""
