"""`without_autocast`: off for a device and for the processor beside it, and on again afterwards."""

from __future__ import annotations

import pytest
import torch

from hf_offload_cache.history import autocast_dtype, without_autocast

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_what_is_chosen_is_computed_without(kind: str) -> None:
    numbers = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        with without_autocast(torch.device(kind)):
            assert autocast_dtype(CPU) is None and (numbers @ numbers).dtype == torch.float32
        assert autocast_dtype(CPU) == torch.bfloat16 and (numbers @ numbers).dtype == torch.bfloat16
    with without_autocast(torch.device(kind)):
        assert autocast_dtype(CPU) is None and (numbers @ numbers).dtype == torch.float32


def test_that_of_the_device_is_off_too() -> None:
    cuda = torch.device("cuda")
    torch.set_autocast_enabled("cuda", True)  # `torch.autocast` itself warns, and does nothing, where there is none
    try:
        assert autocast_dtype(cuda) is not None
        with without_autocast(cuda):
            assert autocast_dtype(cuda) is None
        assert autocast_dtype(cuda) is not None
    finally:
        torch.set_autocast_enabled("cuda", False)
