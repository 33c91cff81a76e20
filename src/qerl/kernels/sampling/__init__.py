"""From logits to one token a sample: an inverse CDF over integer weights, seeded by counters.

Weights are floor(2^b exp(z - max z)) with b = 62 - ceil(log2 V). Integer sums do not depend on their order, so the
draw is the same however the vocabulary is split over programs (the exponential alone differs between devices, in its
last bits). The uniform is an integer hash of the sample's key and the token's position.

On CUDA a call is three launches, greedy or not, at every batch size, wherever the results go, and allocates two numbers
a chunk: logits are read twice and nothing of the size of the vocabulary is written.
"""

import math

import torch

from qerl.kernels.decode_rows import fields
from qerl.kernels.device import launch_on
from qerl.kernels.sampling import reference

__all__ = ["sample_rows", "sample_rows_into"]


def sample_rows(
    logits: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    temperature: float,
    rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token for each of N samples from softmax(logits / T). Never waits for the device.

    Args:
        logits: float32 [R, V].
        keys: int64 [N, 2], two 32-bit words a sample.
        positions: int64 [N], the absolute position of the token to draw.
        temperature: T > 0, or 0 for the first of the largest logits, whose log-prob is then at temperature 1.
        rows: int64 [N], the row each sample draws from (several may share one, every one below R); None means N = R.

    Returns:
        token ids int64 [N] and log-probs float32 [N]. A row without a distribution (a NaN, +inf, or -inf only) gives
        the log-prob NaN and some token of the vocabulary: the caller sees it when it reads the tokens.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, a temperature that is negative or not finite.
        UnsupportedGPUError: a GPU below sm_80.
    """
    _check(logits, keys, positions, temperature, rows)
    return _sample_op(logits.contiguous(), keys.contiguous(), positions.contiguous(), temperature, rows)


def sample_rows_into(
    logits: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    temperature: float,
    token_ids: torch.Tensor,
    results: torch.Tensor,
) -> None:
    """:func:`sample_rows` of one sample a row, stored where a decode step wants it by the same launches.

    Args:
        logits: float32 [N, V].
        keys: int64 [N, 2], two 32-bit words a sample.
        positions: int64 [N], the absolute position of the token to draw.
        temperature: T > 0, or 0 for the first of the largest logits.
        token_ids: int64 [N] contiguous. **Mutated**: the tokens.
        results: float64 [3, N], rows contiguous and any distance apart. **Mutated**: token ids, log-probs, and the
            log-probs again (nothing is truncated), as ``decode_rows.fields`` orders them; float64 holds them exactly.

    Raises:
        ValueError: shapes, dtypes, strides or devices that do not fit, a temperature that is negative or not finite.
        UnsupportedGPUError: a GPU below sm_80.
    """
    _check(logits, keys, positions, temperature, None)
    wanted = ((token_ids, "token_ids", torch.int64, ()), (results, "results", torch.float64, (fields.NUM_RESULTS,)))
    for tensor, name, dtype, outer in wanted:
        shape = (*outer, logits.shape[0])
        if tensor.dtype != dtype or tuple(tensor.shape) != shape or (shape[-1] > 1 and tensor.stride(-1) != 1):
            raise ValueError(
                f"{name} must be {dtype} {list(shape)} with contiguous rows, got {tensor.dtype} {list(tensor.shape)} "
                f"with strides {tensor.stride()}"
            )
        if tensor.device != logits.device:
            raise ValueError(f"logits are on {logits.device}, {name} on {tensor.device}")
    _sample_into_op(logits.contiguous(), keys.contiguous(), positions.contiguous(), temperature, token_ids, results)


def _check(
    logits: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, temperature: float, rows: torch.Tensor | None
) -> None:
    if logits.ndim != 2 or logits.dtype != torch.float32 or logits.shape[1] == 0:
        raise ValueError(f"logits must be float32 [R, V], got {logits.dtype} {list(logits.shape)}")
    samples = logits.shape[0] if rows is None else rows.shape[0]
    for name, tensor, shape in (("keys", keys, (samples, 2)), ("positions", positions, (samples,))):
        if tensor.dtype != torch.int64 or tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must be int64 {list(shape)}, got {tensor.dtype} {list(tensor.shape)}")
    if rows is not None and (rows.dtype != torch.int64 or rows.ndim != 1):
        raise ValueError(f"rows must be int64 [N], got {rows.dtype} {list(rows.shape)}")
    if not math.isfinite(temperature) or temperature < 0:
        raise ValueError(f"temperature must be 0 (greedy) or a finite positive number, got {temperature}")
    places = {t.device for t in (logits, keys, positions, rows) if t is not None}
    if len(places) > 1:
        raise ValueError(f"logits, keys, positions and rows must be on one device, got {sorted(map(str, places))}")


@torch.library.custom_op("qerl::sample_rows", mutates_args=())
def _sample_op(
    logits: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    temperature: float,
    rows: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if not logits.is_cuda:
        return reference.sample_rows(logits, keys, positions, temperature, rows)
    from qerl.kernels.sampling import launch  # Triton comes only with CUDA builds of torch.

    rows = None if rows is None else rows.contiguous()
    with launch_on(logits.device):
        return launch.sample_rows(logits, keys, positions, temperature, rows, launch.device_chunk_size(logits))


@_sample_op.register_fake
def _(logits, keys, positions, temperature, rows):  # type: ignore[no-untyped-def]
    return torch.empty_like(positions), logits.new_empty(positions.shape)


@torch.library.custom_op("qerl::sample_rows_into", mutates_args=("token_ids", "results"))
def _sample_into_op(
    logits: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    temperature: float,
    token_ids: torch.Tensor,
    results: torch.Tensor,
) -> None:
    if not logits.is_cuda:
        reference.sample_rows_into(logits, keys, positions, temperature, token_ids, results)
        return
    from qerl.kernels.sampling import launch  # Triton comes only with CUDA builds of torch.

    with launch_on(logits.device):
        chunk = launch.device_chunk_size(logits)
        launch.sample_rows_into(logits, keys, positions, temperature, token_ids, results, chunk)


@_sample_into_op.register_fake
def _(logits, keys, positions, temperature, token_ids, results):  # type: ignore[no-untyped-def]
    return None
