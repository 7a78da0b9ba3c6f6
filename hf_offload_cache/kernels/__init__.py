"""Kernels for a device, each next to its twin in plain torch with the same signature."""
