"""The mapping of Hugging Face models to Megatron-core: sizes, names and slices, as data. One small file per family."""
