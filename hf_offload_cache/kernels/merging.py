"""Attention over parts of a history, merged by log-sum-exp."""

from __future__ import annotations

import torch

from .on_a_device import with_kernel


@with_kernel()
def merge(
    total: torch.Tensor, log_sum: torch.Tensor, part: torch.Tensor, part_log_sum: torch.Tensor
) -> None:
    """Merge attention over a further part into that over all before it, in place: then it is that of one softmax.

    Args:
        total: (B, H, q, Dv) float32; changed. It and `part` are contiguous in the last dimension.
        log_sum: (B, H, q) float32, the logarithm of each softmax's sum, -inf for a query that sees nothing; changed.
        part: (B, H, q, Dv) of any type, finite.
        part_log_sum: as `log_sum`, of the part.
    """
    share = torch.sigmoid(part_log_sum - log_sum).nan_to_num_(0.0)  # the part's weight; nan: neither sees anything
    total.lerp_(part.float(), share.unsqueeze(-1))
    log_sum.copy_(torch.logaddexp(log_sum, part_log_sum))
