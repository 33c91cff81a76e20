"""The layout in which Hopper's kernels read NVFP4 weights: 16 channels x 64 columns in 576 contiguous bytes.

The tensor core wants, in the registers of lane ``4 g + t``, the weights of channels g and g + 8 and columns 2t, 2t + 1,
2t + 8, 2t + 9 of every 16 columns (``mma.m16n8k16``). So a *window* stores, for each lane, the 32 codes it needs for 64
columns as 16 bytes (one conflict-free 16-byte read), followed by the 64 block scales::

    word  [lane 32][j 4]   uint32   eight codes for columns 16 j .. 16 j + 15
    scale [g 8][half 2]    uint32   channel g + 8 half: the scales s0..s3 of its four blocks as
                                    s0 << 4 | s2 << 20 | rotate_right(s1 << 4 | s3 << 20, 8)

A word is the image of its eight codes under an invertible matrix over GF(2), chosen so that shifts, XORs and one
mask turn it into four bf16 pairs in nine instructions (``cuda/tiles.cuh``). A scale is stored with five exponent bits
(E4M3's subnormals normalized), so that a mask makes bf16 pairs of scales. Both steps are undone exactly by
:func:`from_tiles`; only the codes of a block with scale zero, whose value is zero whatever they are, come back as
zeros. The bytes are as many as in the row-major layout.
"""

from collections.abc import Sequence
from functools import cache

import torch

TILE_ROWS = 16
WINDOW_COLUMNS = 64
WINDOW_BYTES = 576
# Members of a fused group that a kernel can tell apart (MAX_SEGMENTS in cuda/tiles.cuh).
MAX_SEGMENTS = 4
_CODE_BYTES = 512

# A decoded pair of bf16 holds sign at bit 15 and the three code bits at 8..6 of each half.
_MASK = 0x81C081C0
# The XOR of shifted copies of the word that makes each register before the mask: (left shift, whether it rotates).
_SHIFTS = (((0, False),), ((3, False),), ((1, False), (6, False)), ((2, False), (29, True)))
# Channels converted at once, so that temporaries stay small beside the weight.
_CHUNK_ROWS = 2048


class TileLayoutError(ValueError):
    """A weight that the tile layout cannot hold."""


def fits_tiles(rows: int, columns: int) -> bool:
    """Whether a weight ``[rows, columns]`` divides into windows."""
    return rows % TILE_ROWS == 0 and columns % WINDOW_COLUMNS == 0


def group_fits_tiles(segments: Sequence[int], columns: int) -> bool:
    """Whether the kernels take a fused group of such members in tiles."""
    return len(segments) <= MAX_SEGMENTS and all(fits_tiles(rows, columns) for rows in segments)


def _decoded(word):  # type: ignore[no-untyped-def]
    """The four registers the kernels make of a word (an int, or an int64 tensor of uint32 values)."""
    registers = []
    for terms in _SHIFTS:
        value = word ^ word
        for bits, rotates in terms:
            value ^= (word << bits | (word >> (32 - bits) if rotates else 0)) & 0xFFFFFFFF
        registers.append(value & _MASK)
    return registers


@cache
def _word_tables() -> tuple[tuple[int, ...], ...]:
    """``table[2 register + half][code]``: what a code contributes to its word (the sum over GF(2) is XOR)."""
    positions = [(i, bit) for i in range(4) for bit in range(32) if _MASK >> bit & 1]
    # Rows of the decoding matrix: which word bits make up each decoded bit, augmented by the identity.
    columns = [_decoded(1 << bit) for bit in range(32)]
    rows = []
    for index, (register, bit) in enumerate(positions):
        row = sum((columns[word_bit][register] >> bit & 1) << word_bit for word_bit in range(32))
        rows.append(row | 1 << (32 + index))
    for pivot in range(32):
        found = next(r for r in range(pivot, 32) if rows[r] >> pivot & 1)
        rows[pivot], rows[found] = rows[found], rows[pivot]
        for other in range(32):
            if other != pivot and rows[other] >> pivot & 1:
                rows[other] ^= rows[pivot]
    image = {
        position: sum((rows[word_bit] >> (32 + index) & 1) << word_bit for word_bit in range(32))
        for index, position in enumerate(positions)
    }
    table = []
    for place in range(8):
        register, half = divmod(place, 2)
        bits = [image[register, 16 * half + bit] for bit in (6, 7, 8, 15)]
        table.append(tuple(_xor(bits[b] for b in range(4) if code >> b & 1) for code in range(16)))
    return tuple(table)


def _xor(values) -> int:  # type: ignore[no-untyped-def]
    total = 0
    for value in values:
        total ^= value
    return total


@cache
def _scale_bytes() -> tuple[int, ...]:
    """E4M3 byte -> stored byte; -1 for NaN and negative scales, 0 for zero."""
    stored = [0] * 256
    for byte in range(1, 127):
        exponent, mantissa = byte >> 3, byte & 7
        if exponent:
            stored[byte] = (exponent + 13) << 3 | mantissa
        else:
            shift = 3 - (mantissa.bit_length() - 1)
            stored[byte] = (14 - shift) << 3 | (mantissa << shift & 7)
    stored[127:] = [-1] * 129
    stored[128] = 0
    return tuple(stored)


def to_tiles(codes: torch.Tensor, block_scale: torch.Tensor) -> torch.Tensor:
    """Row-major NVFP4 -> tiles, on the device of `codes`.

    Args:
        codes: uint8 ``[N, K/2]``, low nibble = even column. N a multiple of 16, K of 64.
        block_scale: float8_e4m3fn ``[N, K/16]``.

    Returns:
        uint8 ``[N/16, K/64, 576]``.

    Raises:
        TileLayoutError: a shape that does not divide, or a scale that is NaN or negative.
    """
    n, k = codes.shape[0], 2 * codes.shape[1]
    if not fits_tiles(n, k):
        raise TileLayoutError(
            f"tiles need rows in multiples of {TILE_ROWS} and columns of {WINDOW_COLUMNS}: got {n} x {k}"
        )
    lookup = torch.tensor(_scale_bytes(), dtype=torch.int16, device=codes.device)
    out = torch.empty(n // TILE_ROWS, k // WINDOW_COLUMNS, WINDOW_BYTES, dtype=torch.uint8, device=codes.device)
    tables = torch.tensor(_word_tables(), dtype=torch.int64, device=codes.device)
    for start in range(0, n, _CHUNK_ROWS):
        rows = slice(start, min(n, start + _CHUNK_ROWS))
        stored = lookup[block_scale[rows].view(torch.uint8).long()]
        if bool((stored < 0).any()):
            raise TileLayoutError("a block scale is NaN or negative: the checkpoint is damaged or not NVFP4")
        tiles = slice(start // TILE_ROWS, rows.stop // TILE_ROWS)
        _fill_tiles(out[tiles], codes[rows], stored, tables)
    return out


def _fill_tiles(out: torch.Tensor, codes: torch.Tensor, stored: torch.Tensor, tables: torch.Tensor) -> None:
    """Write the windows of a run of tiles into `out` (mutated)."""
    tiles, windows = out.shape[:2]
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).view(codes.shape[0], -1, 16)
    nibbles = nibbles.masked_fill((stored == 0)[..., None], 0)
    # [tile, half, g, window, j, upper eight columns, t, odd column] -> lanes (g, t), words j, places (upper, half, odd)
    places = nibbles.view(tiles, 2, 8, windows, 4, 2, 4, 2).permute(0, 3, 2, 6, 4, 5, 1, 7)
    places = places.reshape(tiles, windows, 8, 4, 4, 8)
    word = torch.zeros(places.shape[:-1], dtype=torch.int64, device=out.device)
    for place in range(8):
        word ^= tables[place][places[..., place].long()]
    out[..., :_CODE_BYTES] = _bytes_of(word).view(tiles, windows, _CODE_BYTES)
    s0, s1, s2, s3 = stored.long().view(tiles, 2, 8, windows, 4).permute(0, 3, 2, 1, 4).unbind(-1)
    scales = s0 << 4 | s2 << 20 | s1 >> 4 | (s1 & 15) << 28 | s3 << 12
    out[..., _CODE_BYTES:] = _bytes_of(scales).reshape(tiles, windows, WINDOW_BYTES - _CODE_BYTES)


def _bytes_of(words: torch.Tensor) -> torch.Tensor:
    """uint32 values (as int64) -> their four bytes, lowest first, in a new last dimension."""
    shifts = torch.arange(0, 32, 8, device=words.device)
    return (words[..., None] >> shifts & 255).to(torch.uint8)


def _words_of(data: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`_bytes_of`; the last dimension of `data` is a multiple of four."""
    shifts = torch.arange(0, 32, 8, device=data.device)
    return (data.unflatten(-1, (-1, 4)).long() << shifts).sum(-1)


def from_tiles(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse of :func:`to_tiles`: (codes uint8 ``[N, K/2]``, block_scale float8_e4m3fn ``[N, K/16]``)."""
    n, k = tiles.shape[0] * TILE_ROWS, tiles.shape[1] * WINDOW_COLUMNS
    codes = torch.empty(n, k // 2, dtype=torch.uint8, device=tiles.device)
    scales = torch.empty(n, k // 16, dtype=torch.uint8, device=tiles.device)
    inverse = [0] * 256
    for byte, stored in enumerate(_scale_bytes()[:127]):
        inverse[stored] = byte
    inverse[0] = 0
    lookup = torch.tensor(inverse, dtype=torch.uint8, device=tiles.device)
    step = _CHUNK_ROWS // TILE_ROWS
    for start in range(0, tiles.shape[0], step):
        chunk = tiles[start : start + step]
        rows = slice(start * TILE_ROWS, (start + chunk.shape[0]) * TILE_ROWS)
        codes[rows] = _codes_of(chunk)
        word = _words_of(chunk[..., _CODE_BYTES:]).view(*chunk.shape[:2], 8, 2)
        parts = (word >> 4 & 255, (word << 4 | word >> 28) & 255, word >> 20 & 255, word >> 12 & 255)
        stored = torch.stack(parts, dim=-1).permute(0, 3, 2, 1, 4)
        scales[rows] = lookup[stored.reshape(-1, k // 16)]
    return codes, scales.view(torch.float8_e4m3fn)


def _codes_of(chunk: torch.Tensor) -> torch.Tensor:
    """Row-major codes uint8 ``[rows, K/2]`` of a run of tiles."""
    tiles, windows = chunk.shape[:2]
    word = _words_of(chunk[..., :_CODE_BYTES]).view(tiles, windows, 8, 4, 4)
    places = [register >> half * 16 & 0xFFFF for register in _decoded(word) for half in range(2)]
    value = torch.stack(places, dim=-1)
    code = (value >> 6 & 7) | (value >> 15 & 1) << 3
    # [tile, window, g, t, j, upper, half, odd] -> [tile, half, g, window, j, upper, t, odd]
    code = code.view(tiles, windows, 8, 4, 4, 2, 2, 2).permute(0, 6, 2, 1, 4, 5, 3, 7).to(torch.uint8)
    pairs = code.reshape(tiles * TILE_ROWS, -1, 2)
    return pairs[..., 0] | pairs[..., 1] << 4
