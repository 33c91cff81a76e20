"""Everything behind ``qerl bench rollout``: models in turn, the table and the file."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from qerl.benchmarking.ceilings import Ceilings, measure_ceilings
from qerl.benchmarking.first_token import CompileCaches, measure_first_token
from qerl.benchmarking.geometry import check_fits_cpu, geometry_of_values, read_config
from qerl.benchmarking.lengths import lognormal_lengths
from qerl.benchmarking.peers import measure_peer, require_peer
from qerl.benchmarking.results import Add, Print, ResultFile, Row, device_name, recorder, use_dependent_launch
from qerl.benchmarking.rollout import free_memory, measure_fixed, measure_long_tailed, measure_prefill, random_prompts
from qerl.benchmarking.speculative import SpeculativePlan, check_plan, measure_speculative, prompt_ids
from qerl.benchmarking.subject import UnsupportedBenchError, build_subject, engine_kv_dtype, model_head
from qerl.formats.checkpoint import CheckpointReader
from qerl.nn.loading import WEIGHT_FORMATS, resolve_device, resolve_dtype, resolve_weights


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """What to measure; see the options of ``qerl bench rollout``.

    Attributes:
        source: model folder, or a config.json (then weights are random).
        lognormal: (mean, longest, samples) of long-tailed lengths; None: fixed ones.
        prefill: (sequences, tokens) to time prefill with.
        speculative: measure drafts on prompts of its own, instead of fixed or long-tailed lengths.
    """

    source: Path
    name: str | None
    weights: list[str]
    ranks: list[int]
    batches: list[int]
    prompt: int
    new: int
    lognormal: tuple[float, int, int] | None
    prefill: tuple[int, int] | None
    kv_dtype: str
    head_dtype: str
    peer: str | None
    device: str
    seed: int
    out: Path | None
    append: bool
    dependent_launch: bool
    commit: str | None
    cpu_parameter_limit: int
    speculative: SpeculativePlan | None = None


def run_rollout(plan: RolloutPlan, say: Print) -> ResultFile:
    """Measure every combination of weights and LoRA rank of ``plan``; returns the rows.

    Raises:
        UnsupportedBenchError: something that the engine or a peer does not do.
        CheckFailedError: a wrong result; nothing is measured after it.
        GeometryError: a geometry too large for a CPU.
    """
    device = resolve_device(plan.device)
    kv_dtype, head = engine_kv_dtype(plan.kv_dtype, plan.device), model_head(plan.head_dtype, plan.device)
    _check(plan, device)
    config_path = plan.source / "config.json" if plan.source.is_dir() else plan.source
    geometry = geometry_of_values(read_config(config_path), plan.name or config_path.stem)
    if device.type != "cuda":
        check_fits_cpu(geometry, plan.cpu_parameter_limit)
    caches = CompileCaches(device)
    launch = use_dependent_launch(plan.dependent_launch)
    ceilings = measure_ceilings(device, resolve_dtype("auto", device))
    say(f"{device_name(device)}: {ceilings.as_row()}")
    free_memory(device)
    results = ResultFile(plan.out, device, commit=plan.commit, append=plan.append, ceilings=ceilings.as_row(), **launch)
    add = recorder(results, say, describe)
    for weights in plan.weights:
        for rank in plan.ranks:
            _measure(plan, weights, head, rank, kv_dtype, ceilings, caches, add)
            free_memory(device)
    if plan.peer is not None:
        measure_peer(plan.peer, plan, device, lambda row: add("rows", row))
    return results


def _check(plan: RolloutPlan, device: torch.device) -> None:
    """What can be known to fail before the ceilings are measured and a model is loaded."""
    folder = plan.source.is_dir()
    for weights in plan.weights:
        if folder:
            resolve_weights(weights, CheckpointReader(plan.source))
        elif weights == "auto":
            raise UnsupportedBenchError("--weights auto needs a model folder; with --config-json name the format")
        elif weights not in WEIGHT_FORMATS:
            raise UnsupportedBenchError(f"--weights {weights!r} is unknown; choose from {', '.join(WEIGHT_FORMATS)}")
    if plan.peer is not None:
        require_peer(plan.peer, device)
        if plan.lognormal is not None or plan.speculative is not None:
            raise UnsupportedBenchError(f"--peer {plan.peer} is measured at fixed lengths, on random prompts only")
    if plan.speculative is None:
        return
    if not folder:
        raise UnsupportedBenchError("--speculative-tokens needs a model folder: random weights write nothing to guess")
    if plan.lognormal is not None:
        raise UnsupportedBenchError("--lengths lognormal has no drafts: they are measured until the model's EOS")
    check_plan(plan.speculative, plan.batches)


def _measure(
    plan: RolloutPlan,
    weights: str,
    head: str,
    rank: int,
    kv_dtype: str,
    ceilings: Ceilings,
    caches: CompileCaches,
    add: Add,
) -> None:
    started = time.perf_counter()
    subject = build_subject(
        plan.source,
        weights=weights,
        lora_rank=rank,
        head=head,
        kv_dtype=kv_dtype,
        device=plan.device,
        seed=plan.seed,
        name=plan.name,
    )
    build_s = time.perf_counter() - started
    if plan.speculative is None:
        (prompt,) = random_prompts(1, plan.prompt, subject.geometry.vocab, seed=plan.seed)
    else:  # --prompt says nothing of these, and may be more than the model takes
        prompt = prompt_ids(plan.source, plan.speculative)[0]
    first_token = measure_first_token(subject, caches, prompt)
    resident = subject.step_bytes(0, 0)
    add(
        "models",
        {
            "model": subject.name,
            "weights": subject.weights,
            "head_dtype": subject.head_name,
            "lora_rank": rank,
            "read_a_step_gb": round(resident / 1e9, 3),
            "build_s": round(build_s, 2),
            **first_token,
        },
    )
    if plan.speculative is not None:
        for row in measure_speculative(subject, plan.source, plan.speculative, plan.batches, plan.new):
            add("speculative", row)
    elif plan.lognormal is None:
        measure_fixed(subject, ceilings, plan.batches, plan.prompt, plan.new, lambda row: add("rows", row))
    else:
        mean, longest, samples = plan.lognormal
        lengths = lognormal_lengths(samples, mean, longest, plan.seed)
        for slots in plan.batches:
            add("long_tailed", measure_long_tailed(subject, slots, plan.prompt, lengths))
    if plan.prefill is not None:
        add("prefill", measure_prefill(subject, ceilings, *plan.prefill))


def describe(part: str, row: Row) -> str:
    """One line of the table."""
    if part == "models":
        return (
            f"{row['model']} {row['weights']}, head {row['head_dtype']}, LoRA rank {row['lora_rank']}: "
            f"{row['read_a_step_gb']} GB without KV a step, built in {row['build_s']} s, "
            f"first token after {row['first_token_s']:.2f} s (compile caches: {row['compile_caches']})"
        )
    formats = f"KV {row['kv_dtype']} head {row['head_dtype']}"
    label = f"{row['engine']:12} {row['model']} {row['weights']:5} r{row['lora_rank']:<3} {formats}"
    if part == "prefill":
        return (
            f"{label} prefill {row['sequences']} x {row['prompt']}: {row['seconds']:.3f} s, "
            f"{row['prompt_tokens_per_s']:,.0f} tokens/s, {100 * row['roofline_share']:.1f} % of the FLOP ceiling"
        )
    if part == "speculative":
        found = "nothing drafted" if row["acceptance"] is None else f"{100 * row['acceptance']:.1f} % accepted"
        return (
            f"{label} T={row['temperature']:g} batch {row['batch']} epoch {row['epoch']}, "
            f"{row['speculative_tokens']} drafts: {found}, {row['decode_steps']} steps (without drafts "
            f"{row['plain_decode_steps']}), {row['tokens_per_s']:,.1f} tokens/s ({row['over_plain']:.2f}x), "
            f"{row['equal_samples']} of {row['samples']} samples equal"
        )
    if part == "long_tailed":
        return (
            f"{label} {row['samples']} samples, mean {row['mean_new']}, over {row['slots']} places: "
            f"{row['tokens_per_s']:,.1f} tokens/s, static batches {row['static_tokens_per_s']:,.1f} "
            f"({row['continuous_over_static']:.2f}x)"
        )
    share = f", {100 * row['roofline_share']:.1f} % of the roofline" if row.get("roofline_share") else ""
    peak = "" if row["peak_gb"] is None else f", peak {row['peak_gb']:.1f} GB"
    return (
        f"{label} batch {row['batch']:<4} {row['prompt']} + {row['new']}: {row['tokens_per_s']:10,.1f} tokens/s, "
        f"{row['ms_per_step']:.3f} ms a step{share}, prefill {row['prefill_s']:.3f} s{peak}"
    )
