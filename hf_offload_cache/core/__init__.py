"""What all methods are made of: the cache, its layers, and what decides in a step."""
