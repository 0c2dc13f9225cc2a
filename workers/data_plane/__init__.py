"""Where the samples of a run are, and how they move between workers."""
