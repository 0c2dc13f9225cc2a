"""The checkpoint format: safetensors files, folders with a manifest, and engine state as tensor slices."""
