"""What separates the engine's log-probs from the trainer's: sampled tokens, scored by both and by an fp32 forward.

The engine samples, the trainer's own forward (packed, prompts shared, fp32 residual stream, log-probs in chunks) scores
the same tokens, and so does a copy of the model with dequantized weights in fp32. The two distances from fp32 say which
side is noisy; the importance ratios and their effective sample size say what the difference means to a loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer

from qerl.benchmarking.results import Print, ResultFile, Row, recorder
from qerl.benchmarking.subject import UnsupportedBenchError
from qerl.evaluation.prompts import PromptRenderer
from qerl.nn.fp32_copy import fp32_copy
from qerl.nn.head import install_scoring_head
from qerl.nn.loading import load_model, resolve_device
from qerl.nn.quant_head import QuantHead
from qerl.nn.random_weights import add_random_adapter
from qerl.rollout.build import load_adapter, make_engine
from qerl.rollout.core import CompletionOutput, SamplingParams
from qerl.rollout.engine import RolloutEngine
from qerl.trainer.parity import effective_sample_size, rescore

# Rows that the trainer scores at once, as a micro-batch.
SCORED_ROWS = 16
_DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}

Sampled = list[tuple[list[int], CompletionOutput]]
Chat = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class ParityPlan:
    """What to compare; see the options of ``qerl bench parity``.

    Attributes:
        chats: messages of each prompt; they are asked in turn until ``tokens`` tokens are drawn.
        adapter: folder; None: random factors of ``lora_rank`` (0: no adapter) and ``adapter_scale``.
        batch: sequences at once.
    """

    model: Path
    chats: Sequence[Chat]
    adapter: Path | None
    lora_rank: int
    adapter_scale: float
    tokens: int
    new: int
    batch: int
    temperature: float
    weights: str
    head: str
    kv_dtype: str
    dtype: str
    device: str
    seed: int
    name: str | None
    out: Path | None
    append: bool
    commit: str | None


def default_chats() -> list[Chat]:
    """Short sums, for want of prompts of one's own."""
    return [[{"role": "user", "content": f"What is {a} + {b}? Explain."}] for a in range(3, 11) for b in range(12, 20)]


def run_parity(plan: ParityPlan, say: Print) -> Row:
    """Sample, score, compare; writes the row to the part ``parity`` of ``plan.out`` and returns it.

    Raises:
        UnsupportedBenchError: greedy sampling, from which nothing is drawn.
        UnsupportedArchitectureError: the engine does not run this model.
        ValueError: prompts that are too long for the model, or an unknown option.
    """
    if plan.temperature == 0:
        raise UnsupportedBenchError("--temperature 0 draws nothing: log-probs are compared on sampled tokens")
    results = ResultFile(plan.out, resolve_device(plan.device), commit=plan.commit, append=plan.append)
    tokenizer = AutoTokenizer.from_pretrained(plan.model)
    model = load_model(plan.model, weights=plan.weights, head=plan.head, dtype=plan.dtype, device=plan.device)
    labels = {
        "model": plan.name or plan.model.resolve().name,
        "weights": model.qerl_weights,
        "head_dtype": _head_name(model),
        "dtype": _DTYPE_NAMES[model.dtype],
        "kv_dtype": plan.kv_dtype,
        "adapter": _adapter_name(plan),
        "temperature": plan.temperature,
    }
    if plan.adapter is not None:
        model = load_adapter(model, plan.adapter)
    elif plan.lora_rank:
        model = add_random_adapter(model, plan.lora_rank, plan.seed, plan.adapter_scale)
    prompts = [PromptRenderer(tokenizer).render(chat).token_ids for chat in plan.chats]
    engine = make_engine(
        model,
        tokenizer,
        max_model_len=max(map(len, prompts)) + plan.new,
        backend="engine",
        max_num_seqs=plan.batch,
        kv_dtype=plan.kv_dtype,
    )
    drawn = draw_tokens(engine, prompts, plan)
    engine.reset()
    row = labels | {"max_new": plan.new} | compare(model, drawn, plan.temperature)
    recorder(results, say, lambda _, row: describe(row))("parity", row)
    return row


def draw_tokens(engine: RolloutEngine, prompts: list[list[int]], plan: ParityPlan) -> Sampled:
    """Whole completions of ``prompts`` in turn, until at least ``plan.tokens`` tokens are drawn."""
    sampling = SamplingParams(max_tokens=plan.new, temperature=plan.temperature, seed=plan.seed)
    drawn: Sampled = []
    while sum(len(output.token_ids) for _, output in drawn) < plan.tokens:
        ids = range(len(drawn), len(drawn) + plan.batch)
        asked = [prompts[index % len(prompts)] for index in ids]
        outputs = engine.generate(asked, sampling, prompt_ids=ids)
        drawn += [(prompt, output) for prompt, (output,) in zip(asked, outputs, strict=True)]
    return drawn


def compare(model: nn.Module, drawn: Sampled, temperature: float) -> Row:
    """Differences of log-probs between engine, trainer and the fp32 forward over all tokens of ``drawn``.

    A scoring head is installed on ``model`` (mutated).
    """
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    install_scoring_head(causal, temperature)
    trainer, engine = _score(model, drawn)
    exact, _ = _score(fp32_copy(model), drawn)
    ratios = (trainer - engine).exp()
    return {
        "tokens": engine.numel(),
        "samples": len(drawn),
        "engine_trainer": _distance(engine, trainer),
        "engine_fp32": _distance(engine, exact),
        "trainer_fp32": _distance(trainer, exact),
        "ratio": {
            "mean": _short(ratios.mean()),
            "min": _short(ratios.min()),
            "p99": _short(ratios.quantile(0.99)),
            "max": _short(ratios.max()),
        },
        "ess": round(effective_sample_size(ratios), 8),
        "mean_logprob": _short(engine.mean()),
    }


def describe(row: Row) -> str:
    """The lines of the table."""
    lines = [
        f"{row['model']} {row['weights']}, {row['dtype']} arithmetic, adapter {row['adapter']}: "
        f"{row['tokens']:,} tokens of {row['samples']} samples at T = {row['temperature']}"
    ]
    for key, what in (
        ("engine_trainer", "engine and trainer"),
        ("engine_fp32", "engine and fp32 forward"),
        ("trainer_fp32", "trainer and fp32 forward"),
    ):
        part = row[key]
        lines.append(f"  {what:25} mean {part['mean']:.3g}, p99 {part['p99']:.3g}, max {part['max']:.3g}")
    ratio = row["ratio"]
    lines.append(
        f"  importance ratio          mean {ratio['mean']:.4f}, min {ratio['min']:.4f}, p99 {ratio['p99']:.4f}, "
        f"max {ratio['max']:.4f}; effective sample size {row['ess']:.5f}"
    )
    return "\n".join(lines)


def _score(model: nn.Module, drawn: Sampled) -> tuple[torch.Tensor, torch.Tensor]:
    """(trainer's, engine's) log-probs of all tokens, in micro-batches."""
    parts = [rescore(model, drawn[start : start + SCORED_ROWS], 0) for start in range(0, len(drawn), SCORED_ROWS)]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def _distance(first: torch.Tensor, second: torch.Tensor) -> dict[str, float]:
    """Mean, 99th percentile and largest of |first - second|, and the signed mean."""
    signed = first.double() - second.double()
    size = signed.abs()
    return {
        "mean": _short(size.mean()),
        "p99": _short(size.quantile(0.99)),
        "max": _short(size.max()),
        "signed_mean": _short(signed.mean()),
    }


def _short(value: Any) -> float:
    return float(f"{float(value):.5g}")


def _head_name(model: nn.Module) -> str:
    head = model.get_output_embeddings()
    return head.group.format if isinstance(head, QuantHead) else _DTYPE_NAMES[model.dtype]


def _adapter_name(plan: ParityPlan) -> str:
    if plan.adapter is not None:
        return "/".join(plan.adapter.resolve().parts[-2:])  # most adapters are called "adapter"
    return f"random, rank {plan.lora_rank}, scale {plan.adapter_scale}" if plan.lora_rank else "none"
