"""Decode attention on the output of the fused qkv matmul: head norm, rotary embedding and KV write included.

One launch on a Hopper GPU; elsewhere ``kernels.rotary`` and decode attention, one after the other.
"""

import torch

from qerl.kernels.device import launch_on
from qerl.kernels.paged_attention import check_inputs, hopper, paged_attention_decode
from qerl.kernels.rotary import check_norms, check_rows, rotary_kv_write

__all__ = ["newest_places", "rotary_decode", "serves_rotary_decode"]

_MIN_BLOCK = 16


def rotary_decode(
    qkv: torch.Tensor,
    rope: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Attention of the newest tokens of S *different* sequences over their contexts, which they join.

    Row s is the token at position ``context_lens[s] - 1``. Its queries and keys are normalized and rotated, its keys
    and values stored in block ``block_table[s, position // block_size]`` at ``position % block_size``; then
    :func:`~qerl.kernels.paged_attention.paged_attention_decode`. Roundings are those of
    :func:`~qerl.kernels.rotary.rotary_kv_write`; in one launch, a norm sums its squares in another order.

    In one launch a row does not see what another row stores, so no row's place may lie in the context of another row
    (as it does for drafts, several rows of one sequence). Rows with the *same* place (padding in a null block) each see
    their own token, and leave a mixture of them.

    Args:
        qkv: bf16, fp16 or fp32 [S, (Hq + 2 Hkv) D] contiguous, heads of q, then k, then v. **Mutated** where there are
            two launches: the queries and keys that are left behind are normalized and rotated, or not.
        rope: fp32 [P, D] contiguous, P above every position: the cosines of the D / 2 frequencies, then their sines.
        k_cache, v_cache: [blocks, block_size, Hkv, D] contiguous, in the dtype of ``qkv`` or float8_e4m3fn (rounded to
            nearest, saturating at 448). **Mutated** at the newest tokens' places.
        block_table: int32 [S, max_blocks]; entries past the context may hold anything.
        context_lens: int32 [S] contiguous, the newest token included; 0: a row that stores nothing and gives zeros.
        scale: factor of the scores.
        q_norm, k_norm: weights [D] contiguous, in the dtype of ``qkv`` or fp32, both or neither.
        eps: of the norms.

    Returns:
        [S, Hq, D] in the dtype of ``qkv``.

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit.
        UnsupportedGPUError: a GPU below sm_80.
    """
    check_rows(qkv, rope, k_cache, v_cache)
    check_norms(qkv, rope, q_norm, k_norm)
    check_inputs(_queries(qkv, k_cache), k_cache, v_cache, block_table, context_lens)
    return _rotary_decode_op(qkv, rope, k_cache, v_cache, block_table, context_lens, scale, q_norm, k_norm, eps)


def serves_rotary_decode(
    qkv: torch.Tensor,
    rope: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
) -> bool:
    """Whether :func:`rotary_decode` is one launch for such tensors; else two, whose places cost a few more."""
    block_size = k_cache.shape[1]
    norms = [norm for norm in (q_norm, k_norm) if norm is not None]
    return (
        qkv.is_cuda
        and block_size >= _MIN_BLOCK
        and block_size & (block_size - 1) == 0
        and rope.data_ptr() % 8 == 0
        and all(norm.data_ptr() % 8 == 0 and norm.dtype == norms[0].dtype for norm in norms)
        and hopper.serves(_queries(qkv, k_cache), k_cache, v_cache, rotary=True)
    )


def newest_places(
    block_table: torch.Tensor, context_lens: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and slots of the newest tokens, int64 [S] each, as ``kernels.rotary`` takes them.

    Where a context is empty: position 0, slot -1.
    """
    positions = (context_lens.long() - 1).clamp_min(0)
    blocks = block_table.gather(1, (positions // block_size)[:, None])[:, 0].long()
    return positions, torch.where(context_lens > 0, blocks * block_size + positions % block_size, -1)


def _queries(qkv: torch.Tensor, k_cache: torch.Tensor) -> torch.Tensor:
    """The queries [S, Hq, D] in ``qkv``."""
    kv_heads, head_dim = k_cache.shape[2:]
    return qkv.view(qkv.shape[0], qkv.shape[1] // head_dim, head_dim)[:, : -2 * kv_heads]


@torch.library.custom_op("qerl::rotary_decode", mutates_args=("qkv", "k_cache", "v_cache"))
def _rotary_decode_op(
    qkv: torch.Tensor,
    rope: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    cache = (k_cache, v_cache, block_table, context_lens)
    if qkv.shape[0] and serves_rotary_decode(qkv, rope, k_cache, v_cache, q_norm, k_norm):
        with launch_on(qkv.device):
            return hopper.decode(
                _queries(qkv, k_cache), *cache, scale, rotate=hopper.rotation(rope, q_norm, k_norm, eps)
            )
    positions, slots = newest_places(block_table, context_lens, k_cache.shape[1])
    q, _, _ = rotary_kv_write(qkv, rope, positions, k_cache, v_cache, slots, q_norm, k_norm, eps)
    return paged_attention_decode(q, *cache, scale)


@_rotary_decode_op.register_fake
def _(qkv, rope, k_cache, v_cache, block_table, context_lens, scale, q_norm, k_norm, eps):  # type: ignore[no-untyped-def]
    return qkv.new_empty(_queries(qkv, k_cache).shape)
