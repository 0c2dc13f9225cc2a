"""Generation in steps over a model whose layers are split over the ranks of a group."""
