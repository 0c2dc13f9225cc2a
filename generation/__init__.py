"""Generation: completions sampled from a model, behind an interface that inference engines implement."""
