"""The checkpoint format: files of tensors, folders with a manifest, an engine state as boxes."""
