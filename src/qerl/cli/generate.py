"""``qerl generate``: completions of prompts from the command line, from a file or from standard input."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from qerl.cli.options import (
    Adapter,
    Device,
    Head,
    MaxModelLen,
    MaxNewTokens,
    Model,
    Seed,
    SpeculativeMaxBatch,
    SpeculativeTokens,
    Temperature,
    TopP,
    Weights,
)

if TYPE_CHECKING:
    from qerl.cli.prompts import Prompt
    from qerl.evaluation.prompts import RenderedPrompt
    from qerl.rollout.core import CompletionOutput

# Prompts handed to the engine at once: results of a long file are on disk before the last prompt is done.
# They do not depend on the batches: the number of a prompt keys its random stream.
_BATCH = 512

Prompts = Annotated[
    list[str] | None,
    typer.Option("--prompt", "-p", help="A prompt; may be repeated. Without any: stdin is one prompt."),
]
PromptsFile = Annotated[
    str | None,
    typer.Option(
        "--prompts",
        help='FILE, or - for stdin: one prompt a line, or JSONL with {"prompt": ...} or {"messages": [...]}.',
    ),
]
Out = Annotated[Path | None, typer.Option(help="Write JSONL, one row a completion, instead of printing.")]


def generate(
    model: Model,
    prompt: Prompts = None,
    prompts: PromptsFile = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="The prompt as it is, without chat template.")] = False,
    adapter: Adapter = None,
    weights: Weights = "auto",
    head: Head = "auto",
    n: Annotated[int, typer.Option("--n", min=1, help="Completions per prompt.")] = 1,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    max_new_tokens: MaxNewTokens = 256,
    seed: Seed = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per completion.")] = False,
    out: Out = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file at --out.")] = False,
    device: Device = "auto",
    max_model_len: MaxModelLen = None,
    speculative_tokens: SpeculativeTokens = 0,
    speculative_max_batch: SpeculativeMaxBatch = 8,
) -> None:
    """Generate completions; the chat template of the model is applied unless --raw is given.

    JSON rows hold the fields of the prompt's row, its index, sample, completion, finish_reason and tokens.
    """
    _check_options(n, temperature, out, force=force, raw_system=raw and system is not None)
    chosen = _prompts(prompt, prompts)
    _check(chosen, system, raw)

    from qerl.cli.progress import quiet_libraries
    from qerl.evaluation.prompts import PromptRenderer
    from qerl.rollout.build import build_engine
    from qerl.rollout.core import SamplingParams

    quiet_libraries()
    sampling = SamplingParams(n=n, max_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed)
    engine, tokenizer, _ = build_engine(
        model,
        weights=weights,
        head=head,
        adapter=None if adapter is None else str(adapter),
        device=device,
        max_model_len=max_model_len,
        speculative_tokens=speculative_tokens,
        speculative_max_batch=speculative_max_batch,
    )
    renderer = PromptRenderer(tokenizer)
    rendered = [renderer.render_raw(item.content) if raw else renderer.render(item.messages(system)) for item in chosen]
    _check_lengths(rendered, max_new_tokens, engine.max_model_len)
    with _opened(out) as file:
        for first in range(0, len(chosen), _BATCH):
            part = range(first, min(first + _BATCH, len(chosen)))
            outputs = engine.generate([rendered[i].token_ids for i in part], sampling, prompt_ids=list(part))
            for index, samples in zip(part, outputs, strict=True):
                for row in _rows(chosen[index], index, samples, tokenizer):
                    _emit(row, file, as_json=as_json, alone=len(chosen) * n == 1)
            if file is not None:
                file.flush()
                typer.echo(f"{part.stop} of {len(chosen)} prompts done", err=True)


def _check_options(n: int, temperature: float, out: Path | None, *, force: bool, raw_system: bool) -> None:
    """Options that contradict each other are refused before anything is read."""
    if n > 1 and temperature == 0:
        from qerl.rollout.core import GreedySamplesError

        raise GreedySamplesError(f"--n {n} at temperature 0 makes {n} equal completions; set --temperature above 0")
    if raw_system:
        raise ValueError("--system needs the chat template; drop it or --raw")
    if out is not None and out.exists() and not force:
        raise FileExistsError(f"{out} exists; add --force to replace it, or choose another --out")


def _prompts(prompt: list[str] | None, source: str | None) -> "list[Prompt]":
    """What the options ask for, or else standard input as one prompt."""
    from qerl.cli.prompts import Prompt, read_prompts

    if prompt and source is not None:
        raise ValueError("--prompt and --prompts both give prompts; use one of them")
    if source is not None:
        return read_prompts(source)
    return [Prompt(text) for text in prompt or [_read_stdin()]]


def _check(prompts: "list[Prompt]", system: str | None, raw: bool) -> None:
    chats = [index for index, item in enumerate(prompts) if not isinstance(item.content, str)]
    if raw and chats:
        raise ValueError(f"--raw takes texts, but prompt {chats[0]} (from 0) is a list of messages; drop --raw")
    doubled = [index for index in chats if prompts[index].content[0]["role"] == "system"]
    if system is not None and doubled:
        raise ValueError(f"--system is given, but prompt {doubled[0]} (from 0) has a system message; drop one of them")


def _check_lengths(rendered: "list[RenderedPrompt]", max_new_tokens: int, limit: int) -> None:
    """Before anything is generated, not after hours of it."""
    long = [i for i, item in enumerate(rendered) if len(item.token_ids) + max_new_tokens > limit]
    if long:
        worst = max(len(rendered[i].token_ids) for i in long)
        raise ValueError(
            f"{len(long)} of {len(rendered)} prompts do not fit, first prompt {long[0]} (from 0): the longest has "
            f"{worst} tokens, and with --max-new-tokens {max_new_tokens} exceeds {limit}; raise --max-model-len or "
            "shorten them"
        )


def _rows(prompt: "Prompt", index: int, samples: "list[CompletionOutput]", tokenizer: Any) -> Iterator[dict[str, Any]]:
    """A row for each sample of a prompt."""
    name = "prompt" if isinstance(prompt.content, str) else "messages"
    for number, sample in enumerate(samples):
        completion = tokenizer.decode(sample.token_ids, skip_special_tokens=True)
        facts = {"finish_reason": sample.finish_reason, "tokens": len(sample.token_ids)}
        asked = {**prompt.columns, "index": index, name: prompt.content}
        yield {**asked, "sample": number, "completion": completion, **facts}


def _emit(row: dict[str, Any], file: TextIO | None, *, as_json: bool, alone: bool) -> None:
    if file is not None:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")
        return
    if as_json:
        typer.echo(json.dumps(row, ensure_ascii=False))
        return
    if not alone:
        place = f"prompt {row['index'] + 1}, sample {row['sample'] + 1}"
        typer.echo(f"--- {place} ({row['tokens']} tokens, {row['finish_reason']})")
    typer.echo(row["completion"])


@contextmanager
def _opened(out: Path | None) -> Iterator[TextIO | None]:
    if out is None:
        yield None
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", encoding="utf-8") as file:
        yield file


def _read_stdin() -> str:
    if sys.stdin.isatty():
        raise ValueError("no prompt: give --prompt TEXT or --prompts FILE, or pipe the text into standard input")
    text = sys.stdin.read().strip("\n")
    if not text.strip():
        raise ValueError("standard input is empty: give --prompt TEXT or pipe the text in")
    return text
