"""Launches of the sampling kernels. Tensors are contiguous and checked by the caller."""

import torch

from qerl.kernels.device import dependent_launch, multiprocessor_count
from qerl.kernels.sampling import triton as kernels
from qerl.kernels.sampling.reference import weight_bits

# Tokens a program covers: few rows need many programs, many rows fewer and longer ones.
SMALL_CHUNK = 1024
LARGE_CHUNK = 4096
_PROGRAMS_PER_SM = 4


def chunk_size(rows: int, vocab_size: int, multiprocessors: int) -> int:
    """Tokens of a chunk; the draw is the same for every size."""
    enough = rows * -(-vocab_size // LARGE_CHUNK) >= _PROGRAMS_PER_SM * multiprocessors
    return LARGE_CHUNK if enough else SMALL_CHUNK


def device_chunk_size(logits: torch.Tensor) -> int:
    """:func:`chunk_size` for the GPU that holds ``logits``."""
    return chunk_size(logits.shape[0], logits.shape[1], multiprocessor_count(logits.device.index))


def sample_rows(
    logits: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    temperature: float,
    rows: torch.Tensor | None,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes as the public function; ``chunk`` a power of two. Three launches."""
    token_ids = torch.empty_like(positions)
    logprobs = torch.empty(positions.shape, dtype=torch.float32, device=logits.device)
    _launch(logits, keys, positions, temperature, rows, chunk, token_ids, logprobs, None)
    return token_ids, logprobs


def sample_rows_into(
    logits: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    temperature: float,
    token_ids: torch.Tensor,
    results: torch.Tensor,
    chunk: int,
) -> None:
    """Shapes and mutations as the public function; ``chunk`` a power of two. Three launches."""
    _launch(logits, keys, positions, temperature, None, chunk, token_ids, None, results)


def _launch(
    logits: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    temperature: float,
    rows: torch.Tensor | None,
    chunk: int,
    token_ids: torch.Tensor,
    logprobs: torch.Tensor | None,
    results: torch.Tensor | None,
) -> None:
    """Into ``token_ids``, and into ``logprobs`` or ``results``."""
    num_rows, vocab_size = logits.shape
    samples = positions.shape[0]
    if samples == 0:
        return
    chunks = -(-vocab_size // chunk)
    padded = 1 << (chunks - 1).bit_length()
    chunk_max = torch.empty(num_rows, chunks, dtype=torch.float32, device=logits.device)
    chunk_sum = torch.empty(num_rows, chunks, dtype=torch.int64, device=logits.device)
    greedy = temperature == 0
    scale = 2.0 ** weight_bits(vocab_size)
    temperature = 1.0 if greedy else temperature
    pdl = dependent_launch(logits.device)
    warps = 8 if chunk >= LARGE_CHUNK else 4
    grid = (num_rows, chunks)
    kernels.chunk_max_kernel[grid](
        logits, chunk_max, vocab_size, chunks, CHUNK=chunk, PDL=pdl, num_warps=warps, launch_pdl=pdl
    )
    kernels.chunk_sum_kernel[grid](
        logits, chunk_max, chunk_sum, vocab_size, chunks, temperature, scale,
        CHUNK=chunk, CHUNKS_PADDED=padded, PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    kernels.pick_kernel[(samples,)](
        logits, keys, positions, rows, chunk_max, chunk_sum, token_ids, logprobs, results,
        vocab_size, chunks, temperature, scale, 1.0 / scale, 0 if results is None else results.stride(0),
        GREEDY=greedy, HAS_ROWS=rows is not None, HAS_RESULTS=results is not None, CHUNK=chunk, CHUNKS_PADDED=padded,
        PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
