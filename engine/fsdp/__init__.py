"""FSDP2 and Ulysses over any decoder of transformers."""
