"""The seams in a transformers model, attention, the look-ahead, and what of a model matters to a cache."""
