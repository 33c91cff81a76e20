"""Launch of the rotary kernel. Tensors are checked by the caller."""

import torch

from qerl.kernels.device import dependent_launch
from qerl.kernels.rotary import triton as kernels

_NUM_WARPS = 2


def rotary_kv_write(
    qkv: torch.Tensor,
    rope: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> None:
    """Shapes and mutations as the public function."""
    tokens = qkv.shape[0]
    if tokens == 0:
        return
    kv_heads, head_dim = k_cache.shape[2:]
    group = qkv.shape[1] // head_dim // kv_heads - 2
    fp8 = k_cache.dtype == torch.float8_e4m3fn
    if fp8:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    pdl = dependent_launch(qkv.device)
    kernels.rotary_kv_write_kernel[(tokens, kv_heads)](
        qkv, rope, positions, k_cache, v_cache, slot_mapping, q_norm, k_norm, eps,
        KV_HEADS=kv_heads, GROUP=group, GROUP_PADDED=1 << (group - 1).bit_length(),
        HALF=head_dim // 2, HALF_PADDED=1 << (head_dim // 2 - 1).bit_length(),
        HAS_NORM=q_norm is not None, FP8=fp8, PDL=pdl,
        num_warps=_NUM_WARPS, enable_fp_fusion=False, launch_pdl=pdl,
    )  # fmt: skip
