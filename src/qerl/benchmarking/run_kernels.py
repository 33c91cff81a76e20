"""Everything behind ``qerl bench kernels``: what is measured in which order, the table and the file."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from qerl.benchmarking.ceilings import Ceilings, measure_ceilings
from qerl.benchmarking.geometry import Geometry, check_fits_cpu
from qerl.benchmarking.kernels import (
    ATTENTION_BATCHES,
    ATTENTION_CONTEXT,
    measure_attention,
    measure_dequantize,
    measure_quantizer,
)
from qerl.benchmarking.linears import LinearBench, measure_linears
from qerl.benchmarking.results import Row, device_name, result_file, write_results
from qerl.nn.loading import resolve_device, resolve_dtype

Print = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """What to measure; see the options of ``qerl bench kernels``."""

    geometries: tuple[Geometry, ...]
    format: str
    rows: tuple[int, ...]
    lora_rank: int
    parts: tuple[str, ...]
    quantizer_layers: int
    device: str
    out: Path | None
    commit: str | None
    cpu_parameter_limit: int


class _Report:
    """Prints rows as they come and keeps the file up to date, so that a run that is killed leaves what it has."""

    def __init__(self, plan: KernelPlan, device: torch.device, ceilings: Ceilings, say: Print) -> None:
        self.plan, self.device, self.ceilings, self.say = plan, device, ceilings, say
        self.rows: dict[str, list[Row]] = {}

    def add(self, part: str, row: Row) -> None:
        self.rows.setdefault(part, []).append(row)
        self.say(describe(part, row))
        if self.plan.out is not None:
            extra = {part: rows for part, rows in self.rows.items() if part != "linears"}
            linears = self.rows.get("linears", [])
            ceilings = self.ceilings.as_row()
            write_results(
                self.plan.out, result_file(linears, self.device, self.plan.commit, ceilings=ceilings, **extra)
            )


def run_kernels(plan: KernelPlan, say: Print) -> dict[str, list[Row]]:
    """Measure the parts of ``plan`` one after another; returns the rows by part.

    Raises:
        CheckFailedError: a wrong result; nothing is measured after it.
        GeometryError: a geometry too large for a CPU.
    """
    device = resolve_device(plan.device)
    if device.type != "cuda":
        for geometry in plan.geometries:
            check_fits_cpu(dataclasses.replace(geometry, layers=1, vocab=0), plan.cpu_parameter_limit // 100)
    torch.manual_seed(0)
    ceilings = measure_ceilings(device, resolve_dtype("auto", device))
    say(f"{device_name(device)}: {ceilings.as_row()}")
    report = _Report(plan, device, ceilings, say)
    for geometry in plan.geometries:
        with torch.no_grad():
            _measure(plan, geometry, ceilings, device, report)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    for line in sums(report.rows.get("linears", [])):
        say(line)
    return report.rows


def _measure(plan: KernelPlan, geometry: Geometry, ceilings: Ceilings, device: torch.device, report: _Report) -> None:
    if "linears" in plan.parts:
        bench = LinearBench(plan.format, plan.rows, plan.lora_rank)
        measure_linears(geometry, bench, ceilings, device, lambda row: report.add("linears", row))
    if "attention" in plan.parts:
        batches = ATTENTION_BATCHES if device.type == "cuda" else (1, 2)
        for row in measure_attention(geometry, ceilings, device, batches, ATTENTION_CONTEXT):
            report.add("attention", row)
    if "dequantize" in plan.parts:
        for row in measure_dequantize(geometry, plan.format, ceilings, device):
            report.add("dequantize", row)
    if "quantizer" in plan.parts:
        measure_quantizer(
            geometry, plan.format, device, plan.quantizer_layers, lambda row: report.add("quantizer", row)
        )


def describe(part: str, row: Row) -> str:
    """One line of the table."""
    share = f"{100 * row['roofline_share']:5.1f} % of the roofline" if "roofline_share" in row else ""
    if part == "linears":
        extra = f"  dX {row['dx_us']:.1f} us (bf16 {row['dx_bf16_us']:.1f})" if "dx_us" in row else ""
        if "bitsandbytes_nf4_us" in row:
            extra += f"  bitsandbytes {row['bitsandbytes_nf4_us']:.1f} us"
        return (
            f"{row['model']:8} {row['layer']:8} M={row['M']:<5} {row['us']:9.1f} us, {share}, bf16 "
            f"{row['bf16_us']:9.1f} us ({row['bf16_over_ours']:.2f}x)  {row['path']}{extra}"
        )
    if part == "attention":
        return f"{row['model']:8} decode attention {row['batch']} x {row['context']}: {row['us']:.1f} us, {share}"
    if part == "dequantize":
        return f"{row['model']:8} dequantize {row['layer']}: {row['us']:.1f} us, {share}"
    return (
        f"{row['model']:8} quantize {row['format']} {row['method']}: {row['seconds']:.2f} s for {row['layers']} "
        f"layers, {row['seconds_all_layers']:.1f} s at this rate for all"
    )


def sums(rows: list[Row]) -> list[str]:
    """Sum of the four linears of a layer, for each model and M."""
    lines = []
    single = [row for row in rows if row["layer"] != "fused"]
    for model, m in dict.fromkeys((row["model"], row["M"]) for row in single):
        part = [row for row in single if (row["model"], row["M"]) == (model, m)]
        us, bf16, floor = (sum(row[key] for row in part) for key in ("us", "bf16_us", "roofline_us"))
        lines.append(
            f"{model:8} sum of {len(part)} M={m:<5} {us:9.1f} us, {100 * floor / us:5.1f} % of the roofline, bf16 "
            f"{bf16:9.1f} us ({bf16 / us:.2f}x)"
        )
    return lines
