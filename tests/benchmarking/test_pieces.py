"""Lengths, geometry, ceilings, timing: what the measurements are made of."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from qerl.benchmarking import timing
from qerl.benchmarking.ceilings import Ceilings
from qerl.benchmarking.decode_ops import measure_decode_ops
from qerl.benchmarking.geometry import KNOWN, GeometryError, check_fits_cpu, geometry_of_values, read_config
from qerl.benchmarking.kernels import measure_attention, measure_quantizer
from qerl.benchmarking.lengths import lognormal_lengths
from qerl.benchmarking.linears import check_group, dequantized
from qerl.benchmarking.results import OtherMachineError, ResultFile
from qerl.benchmarking.run_kernels import sums
from qerl.benchmarking.timing import (
    CheckFailedError,
    Timed,
    median_us,
    medians_us,
    repeats_in_graph,
    replays_ahead,
    rms_ratio,
    rotation,
)
from qerl.nn.random_weights import random_group

CPU = torch.device("cpu")
CEILINGS = Ceilings(100.0, 80.0, 1000.0, torch.float32)


def test_lognormal_lengths_have_the_asked_mean_and_a_long_tail() -> None:
    lengths = lognormal_lengths(128, 600, 4096, seed=3)
    assert len(lengths) == 128 and min(lengths) >= 1 and max(lengths) <= 4096
    assert sum(lengths) / 128 == pytest.approx(600, abs=1)
    # Of a log-normal with sigma 1 the median is exp(-1/2) = 0.61 of the mean.
    assert sorted(lengths)[64] < 480 and max(lengths) > 2000
    assert lengths == lognormal_lengths(128, 600, 4096, seed=3)
    with pytest.raises(ValueError, match="5000"):
        lognormal_lengths(4, 5000, 4096)


def test_the_known_geometries_are_those_of_the_configs(shared_dir: Path) -> None:
    for name in ("7B", "32B"):
        path = shared_dir / "model_configs" / f"Qwen2.5-{name}-Instruct.json"
        assert geometry_of_values(read_config(path), name) == KNOWN[name]


def test_weights_of_a_32b() -> None:
    sizes = dataclasses.replace(KNOWN["32B"], vocab=0)
    assert sizes.parameters == pytest.approx(31.2e9, rel=1e-3)  # README
    assert KNOWN["32B"].kv_token_bytes(2) == 2 * 64 * 8 * 128 * 2
    with pytest.raises(GeometryError, match="--device cuda"):
        check_fits_cpu(KNOWN["32B"], 10**9)


def test_bad_configs_are_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(GeometryError, match="no JSON"):
        read_config(path)
    path.write_text(json.dumps({"hidden_size": 3}))
    with pytest.raises(GeometryError, match="model_type"):
        read_config(path)
    with pytest.raises(GeometryError, match="num_attention_heads"):
        geometry_of_values({"model_type": "llama"}, "x")


def test_the_floor_is_the_larger_of_bytes_and_flops() -> None:
    assert CEILINGS.floor_us(1000, 5000) == 10.0
    assert CEILINGS.floor_us(100, 5000) == 5.0


def test_rotation_walks_past_the_cache_on_a_gpu_only() -> None:
    assert rotation(7e6, torch.device("cuda")) * 7e6 >= 260e6
    assert rotation(1.0, torch.device("cuda"), most=5) == 5
    assert rotation(1e9, torch.device("cuda")) == 1
    assert rotation(1e6, CPU) == 1


def test_the_median_is_of_one_call() -> None:
    calls = []
    us = median_us(calls.append, 4, CPU)
    assert calls[0] == 0 and calls[1:] == [0, 1, 2, 3] * 5
    assert us >= 0


@pytest.mark.parametrize("format", ["nvfp4", "nf4", "bf16"])
def test_a_right_product_passes_its_check(format: str) -> None:
    group = random_group(format, (32, 16), 64, torch.float32, CPU)
    check_group("x", group, torch.float32, (8,))
    x = torch.randn(3, 64)
    assert rms_ratio(group.matmul(x), x.double() @ dequantized(group).double().t()) < 1e-6


def test_a_wrong_product_is_not_timed() -> None:
    group = random_group("nvfp4", (32, 16), 64, torch.float32, CPU)
    right = group.matmul
    group.matmul = lambda x: 1.001 * right(x)
    with pytest.raises(CheckFailedError, match=r"M=1: error 0\.001000"):
        check_group("x", group, torch.float32, (8,))


def test_rows_of_the_other_kernels() -> None:
    tiny = dataclasses.replace(KNOWN["7B"], layers=3, hidden=64, intermediate=128, heads=4, kv_heads=2, head_dim=16)
    (row,) = measure_attention(tiny, CEILINGS, CPU, (2,), 40, "auto")
    # K and V of 2 x 40 tokens, 2 heads of 16 in fp32, over 100 bytes a microsecond.
    assert row["roofline_us"] == pytest.approx(2 * 2 * 40 * 2 * 16 * 4 / 100, abs=0.01)
    (small,) = measure_attention(tiny, CEILINGS, CPU, (2,), 40, "fp8")
    assert small["roofline_us"] == pytest.approx(row["roofline_us"] / 4, abs=0.01)
    ops = measure_decode_ops(dataclasses.replace(tiny, vocab=300), CEILINGS, CPU, 2, rank=4)
    assert row["rotary_us"] > 0 and small["rotary_us"] > 0
    assert len(ops) == 4 + 2 * 4 + 2 and len({row["op"] for row in ops}) == len(ops)
    rows = []
    measure_quantizer(tiny, "nvfp4", CPU, 1, rows.append)
    assert [row["method"] for row in rows] == ["rtn", "mse"]
    assert all(row["seconds_all_layers"] == pytest.approx(3 * row["seconds"], rel=0.3) for row in rows)


def test_the_file_says_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "r.json"
    results = ResultFile(path, CPU, commit="abc", extra=2)
    results.add("rows", {"model": "7B", "M": 1, "us": 3.0})
    results.add("attention", {"model": "7B", "batch": 1})
    written = json.loads(path.read_text())
    assert written == json.loads(json.dumps(results.as_json()))
    assert written.keys() == {"gpu", "versions", "commit", "date", "rows", "extra", "attention"}
    assert written["commit"] == "abc" and "torch" in written["versions"]


def test_rows_of_the_same_work_are_replaced_and_others_kept(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    first = ResultFile(path, CPU, commit="abc")
    first.add("rows", {"model": "7B", "M": 1, "us": 3.0})
    first.add("rows", {"model": "7B", "M": 2, "us": 4.0})
    second = ResultFile(path, CPU, commit="def", append=True)
    second.add("rows", {"model": "7B", "M": 2, "us": 5.0})
    assert json.loads(path.read_text())["rows"] == [
        {"commit": "abc", "model": "7B", "M": 1, "us": 3.0},
        {"model": "7B", "M": 2, "us": 5.0},
    ]
    ResultFile(path, CPU, commit="def").add("rows", {"model": "7B", "M": 3, "us": 1.0})
    assert len(json.loads(path.read_text())["rows"]) == 1
    path.write_text(json.dumps({"gpu": "another", "rows": []}))
    with pytest.raises(OtherMachineError, match="another"):
        ResultFile(path, CPU, append=True)


def test_a_measured_replay_finds_the_device_busy() -> None:
    """Short ones stand behind 200 us of others; to long ones the 10 to 25 us of a launch are nothing."""
    assert [replays_ahead(us) for us in (3.0, 60.0, 150.0, 200.0, 4000.0, 6000.0)] == [67, 4, 2, 1, 1, 0]


def test_works_rest_before_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []
    monkeypatch.setattr(timing.time, "sleep", rests.append)
    assert len(medians_us([Timed(lambda i: None, 1)] * 2, CPU, rest_s=0.25)) == 2
    assert rests == [0.25] * 10


def test_a_measured_graph_is_long_against_the_gap_between_two() -> None:
    assert [repeats_in_graph(us) for us in (0.0, 3.0, 60.0, 999.0, 1000.0, 6000.0)] == [1000, 334, 17, 2, 1, 1]


def test_sums_keep_ranks_apart_and_the_last_of_a_linear() -> None:
    def row(layer: str, rank: int, us: float) -> dict[str, object]:
        return {
            "model": "7B",
            "format": "nvfp4",
            "layer": layer,
            "M": 8,
            "lora_rank": rank,
            "us": us,
            "bf16_us": 2 * us,
            "roofline_us": 1.0,
        }

    rows = [row("o", 0, 9.0), row("o", 0, 5.0), row("qkv", 0, 3.0), row("o", 32, 7.0) | {"plain_us": 5.6}]
    rows.append(row("fused", 0, 99.0))
    plain, lora, other = sums([*rows, row("o", 0, 4.0) | {"format": "nf4"}])
    assert "sum of 2 M=8" in plain and " 8.0 us" in plain and "16.0 us (2.00x)" in plain
    assert "sum of 1 rank 32 M=8" in lora and " 7.0 us" in lora and lora.endswith("LoRA adds 25.0 %")
    assert "LoRA" not in plain
    assert "sum of 1 M=8" in other and " 4.0 us" in other
