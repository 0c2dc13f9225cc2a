"""Hugging Face models as Megatron-core holds them: sizes, names and slices, as data. One small file per family."""
