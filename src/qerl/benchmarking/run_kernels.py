"""Everything behind ``qerl bench kernels``: what is measured in which order, the table and the file."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch

from qerl.benchmarking.ceilings import Ceilings, measure_ceilings
from qerl.benchmarking.decode_ops import measure_decode_ops
from qerl.benchmarking.geometry import Geometry, check_fits_cpu
from qerl.benchmarking.kernels import (
    ATTENTION_BATCHES,
    ATTENTION_CONTEXT,
    measure_attention,
    measure_dequantize,
    measure_quantizer,
)
from qerl.benchmarking.linears import LinearBench, measure_linears
from qerl.benchmarking.results import Add, Print, ResultFile, Row, device_name, recorder, use_dependent_launch
from qerl.benchmarking.rollout import free_memory
from qerl.nn.loading import resolve_device, resolve_dtype

# Parts of the file that hold linears, without a rest before each turn and with one.
LINEARS, LINEARS_AT_REST = "rows", "rows_rest"


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """What to measure; see the options of ``qerl bench kernels``."""

    geometries: tuple[Geometry, ...]
    format: str
    rows: tuple[int, ...]
    lora_rank: int
    rest_ms: float
    parts: tuple[str, ...]
    quantizer_layers: int
    device: str
    out: Path | None
    append: bool
    dependent_launch: bool
    commit: str | None
    cpu_parameter_limit: int


def run_kernels(plan: KernelPlan, say: Print) -> ResultFile:
    """Measure the parts of ``plan`` one after another; returns the rows.

    Raises:
        CheckFailedError: a wrong result; nothing is measured after it.
        GeometryError: a geometry too large for a CPU.
    """
    device = resolve_device(plan.device)
    if device.type != "cuda":
        for geometry in plan.geometries:
            check_fits_cpu(dataclasses.replace(geometry, layers=1, vocab=0), plan.cpu_parameter_limit // 100)
    torch.manual_seed(0)
    launch = use_dependent_launch(plan.dependent_launch)
    ceilings = measure_ceilings(device, resolve_dtype("auto", device))
    say(f"{device_name(device)}: {ceilings.as_row()}")
    free_memory(device)
    results = ResultFile(plan.out, device, commit=plan.commit, append=plan.append, ceilings=ceilings.as_row(), **launch)
    for geometry in plan.geometries:
        with torch.no_grad():
            _measure(plan, geometry, ceilings, device, recorder(results, say, describe))
        free_memory(device)
    for line in sums([row for row in results.parts.get(_part(plan), []) if "commit" not in row]):
        say(line)
    return results


def _part(plan: KernelPlan) -> str:
    return LINEARS_AT_REST if plan.rest_ms else LINEARS


def _measure(plan: KernelPlan, geometry: Geometry, ceilings: Ceilings, device: torch.device, add: Add) -> None:
    if "linears" in plan.parts:
        bench = LinearBench(plan.format, plan.rows, plan.lora_rank, plan.rest_ms)
        measure_linears(geometry, bench, ceilings, device, lambda row: add(_part(plan), row))
    if "attention" in plan.parts:
        batches = ATTENTION_BATCHES if device.type == "cuda" else (1, 2)
        for kv_dtype in ("auto", "fp8"):
            for row in measure_attention(geometry, ceilings, device, batches, ATTENTION_CONTEXT, kv_dtype):
                add("attention", row)
    if "decode_ops" in plan.parts:
        for batch in ATTENTION_BATCHES if device.type == "cuda" else (1, 2):
            for row in measure_decode_ops(geometry, ceilings, device, batch):
                add("decode_ops", row)
    if "dequantize" in plan.parts:
        for row in measure_dequantize(geometry, plan.format, ceilings, device):
            add("dequantize", row)
    if "quantizer" in plan.parts:
        measure_quantizer(geometry, plan.format, device, plan.quantizer_layers, lambda row: add("quantizer", row))


def describe(part: str, row: Row) -> str:
    """One line of the table."""
    share = f"{100 * row['roofline_share']:5.1f} % of the roofline" if "roofline_share" in row else ""
    if part in (LINEARS, LINEARS_AT_REST):
        extra = f"  dX {row['dx_us']:.1f} us (bf16 {row['dx_bf16_us']:.1f})" if "dx_us" in row else ""
        if "plain_us" in row:
            extra += f"  without LoRA {row['plain_us']:.1f} us"
        if "silu_us" in row:
            extra += f"  with SiLU-mul {row['silu_us']:.1f} us (apart {row['silu_apart_us']:.1f})"
        if "bitsandbytes_nf4_us" in row:
            extra += f"  bitsandbytes {row['bitsandbytes_nf4_us']:.1f} us"
        return (
            f"{row['model']:8} {row['layer']:8} M={row['M']:<5} {row['us']:9.1f} us, {share}, bf16 "
            f"{row['bf16_us']:9.1f} us ({row['bf16_over_ours']:.2f}x)  {row['path']}{extra}"
        )
    if part == "attention":
        kind = "decode attention" + (", FP8 cache," if row["kv_dtype"] == "fp8" else "")
        return f"{row['model']:8} {kind} {row['batch']} x {row['context']}: {row['us']:.1f} us, {share}"
    if part == "decode_ops":
        return f"{row['model']:8} {row['op']}, batch {row['batch']}: {row['us']:.2f} us, {share}"
    if part == "dequantize":
        return f"{row['model']:8} dequantize {row['layer']}: {row['us']:.1f} us, {share}"
    return (
        f"{row['model']:8} quantize {row['format']} {row['method']}: {row['seconds']:.2f} s for {row['layers']} "
        f"layers, {row['seconds_all_layers']:.1f} s at this rate for all"
    )


def sums(rows: list[Row]) -> list[str]:
    """Sum of the four linears of a layer, for each model, format, rank of LoRA and M.

    Of a linear that was measured again, the last time.
    """
    lines = []
    single = [row for row in rows if row["layer"] != "fused"]
    keys = "model", "format", "lora_rank", "M"
    for key in dict.fromkeys(tuple(row[name] for name in keys) for row in single):
        model, _, rank, m = key
        part = {row["layer"]: row for row in single if tuple(row[name] for name in keys) == key}.values()
        us, bf16, floor = (sum(row[key] for row in part) for key in ("us", "bf16_us", "roofline_us"))
        lora = f" rank {rank}" if rank else ""
        plain = f", LoRA adds {100 * (us / sum(r['plain_us'] for r in part) - 1):.1f} %" if rank else ""
        lines.append(
            f"{model:8} sum of {len(part)}{lora} M={m:<5} {us:9.1f} us, {100 * floor / us:5.1f} % of the roofline, "
            f"bf16 {bf16:9.1f} us ({bf16 / us:.2f}x){plain}"
        )
    return lines
