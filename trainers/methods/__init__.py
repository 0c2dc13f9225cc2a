"""What is trained: supervised fine-tuning, preferences, reward models."""
