"""Inputs of a decode step: misuse and the op on the CPU, the kernel on a GPU."""

import pytest
import torch
from decode_rows_cases import SHAPES, check_rows, expected_rows, make_rows

from qerl.kernels.decode_rows import prepare_rows


@pytest.mark.parametrize("rows, capacity, width, tables", SHAPES)
def test_reference_row_by_row(rows: int, capacity: int, width: int, tables: int) -> None:
    sources, filled = make_rows(rows, capacity, width, tables)
    prepare_rows(*sources, *(tensor[:rows] for tensor in filled))
    check_rows(filled, expected_rows(*sources, rows), rows)


def test_misuse_is_named() -> None:
    (inputs, sampled, table), filled = make_rows(3, 16, 5, 2)
    fed, context_lens, block_table, keys, positions = (tensor[:3] for tensor in filled)
    with pytest.raises(ValueError, match=r"expected inputs \[F, C\]"):
        prepare_rows(inputs, sampled, table[0], fed, context_lens, block_table, keys, positions)
    with pytest.raises(ValueError, match=r"3 rows need inputs of at least 7 x 3, got \[6, 16\]"):
        prepare_rows(inputs[:6], sampled, table, fed, context_lens, block_table, keys, positions)
    with pytest.raises(ValueError, match=r"at least 7 x 3, got \[9, 2\]"):
        prepare_rows(inputs[:, :2].contiguous(), sampled, table, fed, context_lens, block_table, keys, positions)
    with pytest.raises(ValueError, match=r"inputs must be torch.int64 \[9, 8\] contiguous"):
        prepare_rows(inputs[:, :8], sampled, table, fed, context_lens, block_table, keys, positions)
    with pytest.raises(ValueError, match=r"context_lens must be torch.int32 \[3\]"):
        prepare_rows(inputs, sampled, table, fed, context_lens.long(), block_table, keys, positions)
    with pytest.raises(ValueError, match=r"block_table must be torch.int32 \[3, 5\]"):
        prepare_rows(inputs, sampled, table, fed, context_lens, block_table[:, :4], keys, positions)
    with pytest.raises(ValueError, match=r"keys must be torch.int64 \[3, 2\]"):
        prepare_rows(inputs, sampled, table, fed, context_lens, block_table, keys[:2], positions)
    with pytest.raises(ValueError, match="inputs are on cpu, sampled on meta"):
        prepare_rows(inputs, sampled.to("meta"), table, fed, context_lens, block_table, keys, positions)


def test_op_is_well_formed() -> None:
    sources, filled = make_rows(3, 16, 5, 2)
    arguments = (*sources, *(tensor[:3] for tensor in filled))
    torch.library.opcheck(torch.ops.qerl.prepare_rows, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.gpu
@pytest.mark.parametrize("rows, capacity, width, tables", [*SHAPES, (512, 512, 2560, 300)])
def test_gpu_fills_what_the_rows_say_and_nothing_else(rows: int, capacity: int, width: int, tables: int) -> None:
    sources, filled = make_rows(rows, capacity, width, tables, "cuda")
    prepare_rows(*sources, *(tensor[:rows] for tensor in filled))
    check_rows(filled, expected_rows(*sources, rows), rows)


@pytest.mark.gpu
def test_gpu_graph_reads_what_its_sources_hold_now() -> None:
    sources, filled = make_rows(5, 16, 130, 3, "cuda")
    outputs = [tensor[:5] for tensor in filled]
    prepare_rows(*sources, *outputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepare_rows(*sources, *outputs)
    others, _ = make_rows(8, 16, 130, 3, "cuda")
    for tensor, other in zip(sources, others, strict=True):
        tensor.copy_(other)
    graph.replay()
    check_rows(filled, expected_rows(*others, 5), 5)
