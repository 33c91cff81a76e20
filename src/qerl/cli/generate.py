"""``qerl generate``: completions of prompts from the command line or from standard input."""

import json
import sys
from typing import Annotated

import typer

from qerl.cli.options import Adapter, Device, MaxModelLen, MaxNewTokens, Model, Seed, Temperature, TopP, Weights

Prompts = Annotated[
    list[str] | None, typer.Option("--prompt", "-p", help="A prompt; may be repeated. Without it: stdin.")
]


def generate(
    model: Model,
    prompt: Prompts = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="The prompt as it is, without chat template.")] = False,
    adapter: Adapter = None,
    weights: Weights = "auto",
    n: Annotated[int, typer.Option("--n", min=1, help="Completions per prompt.")] = 1,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    max_new_tokens: MaxNewTokens = 256,
    seed: Seed = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per completion.")] = False,
    device: Device = "auto",
    max_model_len: MaxModelLen = None,
) -> None:
    """Generate completions; the chat template of the model is applied unless --raw is given."""
    if n > 1 and temperature == 0:
        raise ValueError(f"--n {n} at temperature 0 makes {n} equal completions; set --temperature above 0")
    if raw and system is not None:
        raise ValueError("--system needs the chat template; drop it or --raw")
    texts = prompt or [_read_stdin()]

    from qerl.cli.progress import quiet_libraries
    from qerl.evaluation.prompts import PromptRenderer
    from qerl.rollout.build import build_engine
    from qerl.rollout.core import SamplingParams

    quiet_libraries()
    sampling = SamplingParams(n=n, max_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed)
    engine, tokenizer, _ = build_engine(
        model,
        weights=weights,
        adapter=None if adapter is None else str(adapter),
        device=device,
        max_model_len=max_model_len,
    )
    renderer = PromptRenderer(tokenizer)
    before = [] if system is None else [{"role": "system", "content": system}]
    rendered = [
        renderer.render_raw(text) if raw else renderer.render([*before, {"role": "user", "content": text}])
        for text in texts
    ]
    outputs = engine.generate([item.token_ids for item in rendered], sampling)
    for index, (text, samples) in enumerate(zip(texts, outputs, strict=True), start=1):
        for number, sample in enumerate(samples, start=1):
            completion = tokenizer.decode(sample.token_ids, skip_special_tokens=True)
            tokens, reason = len(sample.token_ids), sample.finish_reason
            if as_json:
                row = {"prompt": text, "sample": number - 1, "completion": completion}
                typer.echo(json.dumps(row | {"finish_reason": reason, "tokens": tokens}, ensure_ascii=False))
                continue
            if len(texts) * n > 1:
                typer.echo(f"--- prompt {index}, sample {number} ({tokens} tokens, {reason})")
            typer.echo(completion)


def _read_stdin() -> str:
    if sys.stdin.isatty():
        raise ValueError("no prompt: give --prompt TEXT or pipe the text into standard input")
    text = sys.stdin.read().strip("\n")
    if not text.strip():
        raise ValueError("standard input is empty: give --prompt TEXT or pipe the text in")
    return text
