"""Many documents at once: workers of an engine of others, Ray Data, that share contexts."""
