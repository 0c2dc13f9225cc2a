"""The roles of models in workers: actor, critic, reference, reward, generator and embedder, and how their methods take batches."""
