"""What the device can do at best, measured in the same run: bytes read, bytes copied, FLOPs multiplied."""

from dataclasses import dataclass

import torch

from qerl.benchmarking.timing import median_us


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Best rates seen.

    Attributes:
        read_bytes_per_us: read once, nothing written (best of several reductions, and of the copy).
        copy_bytes_per_us: read plus written.
        flops_per_us: of a square matmul in the compute dtype.
        dtype: that compute dtype.
    """

    read_bytes_per_us: float
    copy_bytes_per_us: float
    flops_per_us: float
    dtype: torch.dtype

    def floor_us(self, num_bytes: float, flops: float) -> float:
        """Time below which work of this size cannot be: by its bytes or by its FLOPs, whichever is larger."""
        return max(num_bytes / self.read_bytes_per_us, flops / self.flops_per_us)

    def as_row(self) -> dict[str, object]:
        """For a result file, in TB/s and TFLOP/s."""
        return {
            "read_tb_s": round(self.read_bytes_per_us / 1e6, 4),
            "copy_tb_s": round(self.copy_bytes_per_us / 1e6, 4),
            "tflop_s": round(self.flops_per_us / 1e6, 4),
            "dtype": str(self.dtype).removeprefix("torch."),
        }


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measure all three on ``device``; takes about a second on a GPU and 4.3 GB of its memory."""
    read, copied = _memory_rates(device)
    return Ceilings(read, copied, _matmul_rate(device, dtype), dtype)


def _memory_rates(device: torch.device) -> tuple[float, float]:
    """Bytes a microsecond: read, and read plus written by a copy."""
    count = (1 << 30) if device.type == "cuda" else (1 << 22)
    data = torch.ones(count, dtype=torch.float32, device=device)
    rows, half = data.view(-1, 4096), count // 2
    source, target = data[:half], data[half:]
    reads = [
        median_us(lambda i: data.sum(), 1, device),
        median_us(lambda i: rows.sum(dim=1), 1, device),
        median_us(lambda i: rows.amax(dim=1), 1, device),
        median_us(lambda i: torch.dot(source, target), 1, device),
    ]
    copied = data.nbytes / median_us(lambda i: target.copy_(source), 1, device)
    return max(copied, data.nbytes / min(reads)), copied


def _matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Best FLOPs a microsecond over a few shapes; a warm-up brings the clocks to where they stay."""
    best = 0.0
    for size in (4096, 8192) if device.type == "cuda" else (256,):
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        for _ in range(20):
            a @ b
        best = max(best, 2.0 * size**3 / median_us(lambda i, a=a, b=b: a @ b, 1, device))
    return best
