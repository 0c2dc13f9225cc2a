"""Embeddings of texts, with models and folders in the format of sentence-transformers."""
