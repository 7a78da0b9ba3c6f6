"""How far two ways of computing the same attention may be apart."""

from __future__ import annotations

FLOAT32 = 2e-6
"""Largest difference in units of the largest value: sums of up to 60 products of float32, merged up to 8 times."""

BFLOAT16 = 4 * 2**-8
"""bf16 keeps 8 bits: weights, a block's output and the result are each rounded, by up to 2**-8 of the largest value
together with the weights' own sum; four such roundings are allowed for."""
