"""The FSDP engine: FSDP2 and Ulysses for any decoder of transformers."""
