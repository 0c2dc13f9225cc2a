"""Generation over several devices: a leader that drives the ranks of a model step by step."""
