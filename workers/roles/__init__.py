"""The roles that models have in workers (actor, critic, reference, reward, generator, embedder), and the batches their methods take."""
