"""Inputs and poisoned outputs that the tests of ``prepare_rows`` share."""

import torch

from qerl.kernels.decode_rows import fields

# (rows, capacity, columns of the block tables, block tables)
SHAPES = [(1, 16, 1, 1), (3, 16, 65, 2), (16, 16, 1024, 5), (17, 32, 2500, 20), (2, 2, 0, 1)]


def make_rows(
    rows: int, capacity: int, width: int, tables: int, device: str = "cpu"
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """(inputs, sampled, table) and what is to be filled, for two rows more than ``rows``: garbage everywhere.

    Sources are mixed, several rows share a block table (drafts do), and columns that are not fed hold indices out of
    bounds.
    """
    generator = torch.Generator().manual_seed(rows + width)

    def random(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    inputs = random(1 << 50, 1 << 60, fields.NUM_FIELDS, capacity)
    inputs[fields.SOURCE, :rows] = random(-1, rows, rows)
    inputs[fields.SOURCE, 0] = -1
    inputs[fields.SOURCE, rows - 1] = rows - 1 if rows > 1 else -1
    inputs[fields.TOKEN, :rows] = random(0, 1 << 40, rows)
    inputs[fields.POSITION, :rows] = random(0, 1 << 20, rows)
    inputs[fields.KEY_LOW : fields.KEY_HIGH + 1, :rows] = random(0, 1 << 32, 2, rows)
    inputs[fields.TABLE_ROW, :rows] = random(0, tables, rows)
    sources = inputs, random(0, 1 << 40, capacity), random(0, 1 << 30, tables, width).int()
    long, short = torch.int64, torch.int32
    shapes = (((), long), ((), short), ((width,), short), ((2,), long), ((), long))
    filled = [torch.full((rows + 2, *shape), -77, dtype=dtype, device=device) for shape, dtype in shapes]
    return tuple(tensor.to(device) for tensor in sources), tuple(filled)


def expected_rows(inputs: torch.Tensor, sampled: torch.Tensor, table: torch.Tensor, rows: int) -> list[torch.Tensor]:
    """token_ids, context_lens, block_table, keys and draw_positions, one row at a time in Python."""
    columns = inputs.cpu().T.tolist()[:rows]
    before, tables = sampled.tolist(), table.cpu()
    fed = [c[fields.TOKEN] if c[fields.SOURCE] < 0 else before[c[fields.SOURCE]] for c in columns]
    ends = [c[fields.POSITION] + 1 for c in columns]
    return [
        torch.tensor(fed),
        torch.tensor(ends, dtype=torch.int32),
        torch.stack([tables[c[fields.TABLE_ROW]] for c in columns]),
        torch.tensor([[c[fields.KEY_LOW], c[fields.KEY_HIGH]] for c in columns]),
        torch.tensor(ends),
    ]


def check_rows(filled: tuple[torch.Tensor, ...], expected: list[torch.Tensor], rows: int) -> None:
    """``filled`` holds ``expected`` in its first rows, and what it held in the others."""
    for found, wanted in zip(filled, expected, strict=True):
        assert found.dtype == wanted.dtype and torch.equal(found[:rows].cpu(), wanted)
        assert (found[rows:] == -77).all()
