"""Other engines on the same work, where they are installed: transformers' ``generate`` and vLLM.

Both are timed as ours is: the time of N tokens minus the time of one, over N - 1 steps.
"""

import importlib.util
import json
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qerl.benchmarking.geometry import read_config
from qerl.benchmarking.results import Row
from qerl.benchmarking.rollout import peak_bytes, random_prompts, reset_peak
from qerl.benchmarking.subject import UnsupportedBenchError
from qerl.benchmarking.timing import synchronize
from qerl.nn.loading import resolve_dtype

if TYPE_CHECKING:
    from qerl.benchmarking.run_rollout import RolloutPlan

PEERS = ("transformers", "vllm")
Generate = Callable[[list[list[int]], int], int]


def require_peer(peer: str, device: torch.device) -> None:
    """Refuse a peer that is unknown, not installed or not for this device, before anything is measured.

    Raises:
        UnsupportedBenchError: naming it.
    """
    if peer not in PEERS:
        raise UnsupportedBenchError(f"--peer {peer!r} is unknown; use {' or '.join(PEERS)}")
    if importlib.util.find_spec(peer) is None:
        raise UnsupportedBenchError(f"--peer {peer} needs the package {peer}, which is not installed here")
    if peer == "vllm" and device.type != "cuda":
        raise UnsupportedBenchError("--peer vllm is measured on a GPU only")


def measure_peer(peer: str, plan: "RolloutPlan", device: torch.device, on_row: Callable[[Row], None]) -> None:
    """16-bit weights without LoRA on the peer, one row for each batch size of ``plan``.

    Raises:
        ValueError: a peer returned another number of tokens.
    """
    config = read_config(plan.source / "config.json" if plan.source.is_dir() else plan.source)
    labels = {
        "engine": f"{peer} {version(peer)}",
        "model": plan.name or plan.source.stem,
        "weights": "bf16",
        "lora_rank": 0,
        "kv_dtype": "auto",
        "head_dtype": "auto",
    }
    torch.manual_seed(plan.seed)  # what transformers draws from
    with tempfile.TemporaryDirectory() as folder:
        generate = _transformers(plan, config, device) if peer == "transformers" else _vllm(plan, config, Path(folder))
        for batch in plan.batches:
            reset_peak(device)
            row = labels | _timed_row(generate, plan, config["vocab_size"], batch, device)
            # vLLM's memory is another process's, and reserved whole.
            on_row(row | {"peak_gb": None if peer == "vllm" else round(peak_bytes(device) / 1e9, 3)})


def _timed_row(generate: Generate, plan: "RolloutPlan", vocab: int, batch: int, device: torch.device) -> Row:
    prompts = random_prompts(batch, plan.prompt, vocab, seed=batch)
    seconds = {}
    for new in (1, 1, plan.new):
        synchronize(device)
        started = time.perf_counter()
        drawn = generate(prompts, new)
        synchronize(device)
        # The first call of a batch size warms up; the second one of 1 token replaces its time.
        seconds[new] = time.perf_counter() - started
        if drawn != batch * new:
            raise ValueError(f"the peer returned {drawn} tokens for {batch} x {new}")
    step_s = (seconds[plan.new] - seconds[1]) / (plan.new - 1)
    return {
        "batch": batch,
        "prompt": plan.prompt,
        "new": plan.new,
        "tokens_per_s": round(batch / step_s, 1),
        "ms_per_step": round(1e3 * step_s, 4),
        "roofline_share": None,
        "prefill_s": round(seconds[1], 4),
        "end_to_end_tokens_per_s": round(batch * plan.new / seconds[plan.new], 1),
    }


def _transformers(plan: "RolloutPlan", config: dict, device: torch.device) -> Generate:
    dtype = resolve_dtype("auto", device)
    if plan.source.is_dir():
        model = AutoModelForCausalLM.from_pretrained(plan.source, dtype=dtype).to(device)
    else:
        values = {key: value for key, value in config.items() if key != "model_type"}
        with device:
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **values), dtype=dtype)
    model.eval()

    def generate(prompts: list[list[int]], new: int) -> int:
        ids = torch.tensor(prompts, device=device)
        with torch.no_grad():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=True,
                temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0,
            )  # fmt: skip
        return out[:, ids.shape[1] :].numel()

    return generate


def _vllm(plan: "RolloutPlan", config: dict, folder: Path) -> Generate:
    from vllm import LLM, SamplingParams

    path = plan.source
    if not path.is_dir():
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        path = folder
    engine = LLM(
        model=str(path), load_format="auto" if plan.source.is_dir() else "dummy", skip_tokenizer_init=True,
        dtype="bfloat16", max_model_len=plan.prompt + plan.new, max_num_seqs=max(plan.batches),
        enable_prefix_caching=False, seed=plan.seed,
    )  # fmt: skip

    def generate(prompts: list[list[int]], new: int) -> int:
        sampling = SamplingParams(max_tokens=new, temperature=1.0, ignore_eos=True, detokenize=False)
        outputs = engine.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return generate
