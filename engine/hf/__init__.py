"""Hugging Face models as used by every engine: configs, names on disk, weights, costs."""
