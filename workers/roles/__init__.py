"""The worker roles of reinforcement learning: actor, critic, reference and reward."""
