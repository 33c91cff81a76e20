"""The kernel of a decode step's inputs in Triton's interpreter (started by test_interpreter.py)."""

import pytest
from decode_rows_cases import SHAPES, check_rows, expected_rows, make_rows

from qerl.kernels.decode_rows import launch


@pytest.mark.parametrize("rows, capacity, width, tables", SHAPES)
def test_fills_what_the_rows_say_and_nothing_else(rows: int, capacity: int, width: int, tables: int) -> None:
    sources, filled = make_rows(rows, capacity, width, tables)
    held = [tensor.clone() for tensor in sources]
    launch.prepare_rows(*sources, *(tensor[:rows] for tensor in filled))
    check_rows(filled, expected_rows(*sources, rows), rows)
    assert all(tensor.equal(before) for tensor, before in zip(sources, held, strict=True))


def test_no_rows_are_no_launch() -> None:
    sources, filled = make_rows(2, 16, 5, 2)
    launch.prepare_rows(*sources, *(tensor[:0] for tensor in filled))
    assert all((tensor == -77).all() for tensor in filled)
