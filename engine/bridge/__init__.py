"""How Hugging Face models map to Megatron-core: sizes, names and slices, as data. One small file per family."""
