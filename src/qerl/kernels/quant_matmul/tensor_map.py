"""Descriptors of matrices for tensor copies (TMA)."""

import ctypes
from functools import lru_cache

from qerl.kernels.quant_matmul.tiles import WINDOW_BYTES


class TensorMapError(ValueError):
    """A shape, stride or address that the copy engine does not take."""


def bf16_map(address: int, rows: int, columns: int, box_rows: int) -> ctypes.Array:
    """Of a bf16 matrix [rows, columns] for copies of [box_rows, 64] with the 128-byte swizzle."""
    return _encode("BFLOAT16", address, (columns, rows), (2 * columns,), (64, box_rows), "128B")


def bf16_windows_map(address: int, rows: int, columns: int, box_rows: int, box_windows: int) -> ctypes.Array:
    """As `bf16_map`, seen as [windows of 64 columns, rows, 64] for copies of [box_windows, box_rows, 64]."""
    sizes, box = (64, rows, columns // 64), (64, box_rows, box_windows)
    return _encode("BFLOAT16", address, sizes, (2 * columns, 2 * 64), box, "128B")


def tiles_map(address: int, windows: int, tiles: int, box_windows: int, box_tiles: int) -> ctypes.Array:
    """Of weights in tiles of 16 channels (``tiles.py``), [tiles, windows, bytes], for copies of [box_tiles,
    box_windows, bytes]."""
    strides, box = (WINDOW_BYTES, windows * WINDOW_BYTES), (WINDOW_BYTES // 8, box_windows, box_tiles)
    return _encode("INT64", address, (WINDOW_BYTES // 8, windows, tiles), strides, box, "NONE")


def byte_map(
    address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], swizzle: str
) -> ctypes.Array:
    """Of bytes ``sizes``, innermost dimension first, the others ``strides`` apart, for copies of ``box``.

    Args:
        swizzle: ``"NONE"``, or the bytes of a row of the box: ``"32B"``, ``"64B"``, ``"128B"``.

    Raises:
        TensorMapError: the driver refuses it.
    """
    return _encode("UINT8", address, sizes, strides, box, swizzle)


@lru_cache(maxsize=8192)
def _encode(
    element: str,
    address: int,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: str,
) -> ctypes.Array:
    """Innermost dimension first, strides in bytes; what lies past the end reads as zeros."""
    from cuda.bindings import driver

    status, encoded = driver.cuTensorMapEncodeTiled(
        getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{element}"),
        len(sizes),
        address,
        [driver.cuuint64_t(size) for size in sizes],
        [driver.cuuint64_t(stride) for stride in strides],
        [driver.cuuint32_t(size) for size in box],
        [driver.cuuint32_t(1)] * len(sizes),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}"),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status.value != 0:
        raise TensorMapError(f"no tensor map for {element} {list(sizes)} at {address:#x}: {status!r}")
    words = [int(word) for word in encoded.opaque]
    return (ctypes.c_uint64 * 16)(*words)
