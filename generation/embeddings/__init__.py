"""Embeddings of texts, by the models and folders that sentence-transformers uses."""
