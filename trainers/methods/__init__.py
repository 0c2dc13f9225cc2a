"""The training methods: supervised fine-tuning, preference learning, reward models."""
