"""Between the fused qkv matmul and attention, in one launch: norm of the heads, rotary embedding, KV cache write.

Works in place on the matmul's output, so that queries, keys and values stay views of it: decode attention reads the
queries there, attention over a fresh prompt the keys and values too.
"""

import torch

from qerl.kernels.device import launch_on
from qerl.kernels.rotary import reference

__all__ = ["rotary_kv_write"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def rotary_kv_write(
    qkv: torch.Tensor,
    rope: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalize and rotate queries and keys of T tokens, and store keys and values. No gradient.

    The norm (per head, over D) is rounded to the dtype of ``qkv``; the rotation is computed in fp32, every product and
    sum rounded as in torch, and rounded once to that dtype.

    Args:
        qkv: bf16, fp16 or fp32 [T, (Hq + 2 Hkv) D] contiguous, heads of q, then k, then v. **Mutated**: q and k are
            replaced by the normalized and rotated ones.
        rope: fp32 [P, D] contiguous: for every position the cosines of the D / 2 frequencies, then their sines.
        positions: int64 [T], each below P.
        k_cache, v_cache: [blocks, block_size, Hkv, D] contiguous, in the dtype of ``qkv`` or float8_e4m3fn (rounded to
            nearest, saturating at 448). **Mutated** at ``slot_mapping``.
        slot_mapping: int64 [T], block * block_size + offset; tokens with the same slot leave one of their values, those
            with a negative one none.
        q_norm, k_norm: weights [D] contiguous, in the dtype of ``qkv`` or fp32, both or neither.
        eps: of the norms.

    Returns:
        q [T, Hq, D], k and v [T, Hkv, D]: views of ``qkv``.

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit.
        UnsupportedGPUError: a GPU below sm_80.
    """
    check_rows(qkv, rope, k_cache, v_cache)
    _check_places(qkv, positions, slot_mapping)
    check_norms(qkv, rope, q_norm, k_norm)
    _rotary_op(qkv, rope, positions, k_cache, v_cache, slot_mapping, q_norm, k_norm, eps)
    return reference.split_heads(qkv, k_cache.shape[2], k_cache.shape[3])


def check_rows(qkv: torch.Tensor, rope: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    """Refuse rows, angles and caches that :func:`rotary_kv_write` does not take.

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit.
    """
    if qkv.ndim != 2 or k_cache.ndim != 4 or v_cache.shape != k_cache.shape:
        raise ValueError(
            "expected qkv [T, (Hq + 2 Hkv) D] and caches [blocks, block_size, Hkv, D], "
            f"got {list(qkv.shape)}, {list(k_cache.shape)}, {list(v_cache.shape)}"
        )
    kv_heads, head_dim = k_cache.shape[2:]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    if qkv.shape[1] % head_dim or heads < 1 or heads % kv_heads or head_dim % 2:
        raise ValueError(
            f"{qkv.shape[1]} columns of qkv are not Hq + 2 * {kv_heads} heads of {head_dim} (an even number) with Hq a "
            f"multiple of {kv_heads}"
        )
    if qkv.dtype not in _DTYPES or v_cache.dtype != k_cache.dtype:
        raise ValueError(f"qkv must be bf16, fp16 or fp32 and the caches alike, got {qkv.dtype}, {k_cache.dtype}")
    if k_cache.dtype not in (qkv.dtype, torch.float8_e4m3fn):
        raise ValueError(f"the caches must be {qkv.dtype} like qkv or float8_e4m3fn, got {k_cache.dtype}")
    if rope.dtype != torch.float32 or rope.ndim != 2 or rope.shape[1] != head_dim:
        raise ValueError(f"rope must be float32 [P, {head_dim}], got {rope.dtype} {list(rope.shape)}")
    tensors = (qkv, rope, k_cache, v_cache)
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError("qkv, rope and caches must be contiguous")
    if len({tensor.device for tensor in tensors}) > 1:
        raise ValueError(f"tensors on different devices: {', '.join(str(tensor.device) for tensor in tensors)}")


def _check_places(qkv: torch.Tensor, positions: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    for name, index in (("positions", positions), ("slot_mapping", slot_mapping)):
        if index.dtype != torch.int64 or tuple(index.shape) != (qkv.shape[0],) or not index.is_contiguous():
            raise ValueError(
                f"{name} must be int64 [{qkv.shape[0]}] contiguous, got {index.dtype} {list(index.shape)} with strides "
                f"{index.stride()}"
            )
        if index.device != qkv.device:
            raise ValueError(f"qkv is on {qkv.device}, {name} on {index.device}")


def check_norms(
    qkv: torch.Tensor, rope: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None
) -> None:
    """Refuse norms of heads that :func:`rotary_kv_write` does not take.

    Raises:
        ValueError: one norm without the other, shapes, dtypes, devices or strides that do not fit.
    """
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm must be given together")
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is None:
            continue
        if tuple(weight.shape) != (rope.shape[1],) or weight.dtype not in (qkv.dtype, torch.float32):
            raise ValueError(
                f"{name} must be [{rope.shape[1]}] in {qkv.dtype} or float32, got {weight.dtype} {list(weight.shape)}"
            )
        if not weight.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {weight.stride()}")
        if weight.device != qkv.device:
            raise ValueError(f"qkv is on {qkv.device}, {name} on {weight.device}")


@torch.library.custom_op("qerl::rotary_kv_write", mutates_args=("qkv", "k_cache", "v_cache"))
def _rotary_op(
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
    if not qkv.is_cuda:
        reference.rotary_kv_write(qkv, rope, positions, k_cache, v_cache, slot_mapping, q_norm, k_norm, eps)
        return
    from qerl.kernels.rotary import launch  # Triton comes only with CUDA builds of torch.

    with launch_on(qkv.device):
        launch.rotary_kv_write(qkv, rope, positions, k_cache, v_cache, slot_mapping, q_norm, k_norm, eps)


@_rotary_op.register_fake
def _(qkv, rope, positions, k_cache, v_cache, slot_mapping, q_norm, k_norm, eps):  # type: ignore[no-untyped-def]
    return None
