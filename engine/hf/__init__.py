"""Hugging Face models as every engine meets them: configs, names on disk, weights, costs."""
