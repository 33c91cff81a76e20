"""Row matrices as the kernels read them."""

import torch

_ALIGNMENT = 16


def aligned_rows(tensor: torch.Tensor) -> torch.Tensor:
    """``[..., W]`` as ``[M, W]``, contiguous and 16-byte aligned; a view where possible.

    Alignment decides how Triton spreads a row over threads and with it the order of a sum: without this, the
    same row at another address could give other bits.
    """
    rows = tensor.reshape(-1, tensor.shape[-1]).contiguous()
    return rows if rows.storage_offset() * rows.element_size() % _ALIGNMENT == 0 else rows.clone()
