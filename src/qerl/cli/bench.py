"""``qerl bench``: how fast rollouts and kernels are here, beside what the memory and the arithmetic would allow, and
how far engine and trainer are apart."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qerl.cli.errors import user_errors
from qerl.cli.options import Adapter, Device, Head, Weights

if TYPE_CHECKING:
    from qerl.benchmarking.geometry import Geometry
    from qerl.benchmarking.speculative import SpeculativePlan

DEFAULT_ROWS = "1,2,8,16,32,64,128,256,512,1024,2048,4096,8192"
FIXED_BATCHES, PLACES = "1,8,32,64,128,256", "32"
PARTS = ("linears", "attention", "decode_ops", "dequantize", "quantizer")
# A pass over more weights than this takes minutes on a CPU.
CPU_PARAMETER_LIMIT = 1_000_000_000

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Out = Annotated[Path | None, typer.Option(help="JSON file of the results; rewritten after every row.")]
Append = Annotated[bool, typer.Option("--append", help="Keep the rows that --out holds already.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the file at --out.")]
DependentLaunch = Annotated[
    bool, typer.Option(help="Kernels may start while the one before them ends (sm_90); off to compare.")
]
Commit = Annotated[str | None, typer.Option(help="Commit of the code, where there is no git to ask.")]
Seed = Annotated[int, typer.Option(help="Seed of random weights and of sampling.")]
RolloutWeights = Annotated[
    str, typer.Option(help="bf16, nvfp4, nf4, mxfp4 (or auto with a folder); several with commas.")
]
LoraRanks = Annotated[str, typer.Option(help="Rank of LoRA on every linear, 0 for none; several with commas.")]
Batches = Annotated[
    str | None,
    typer.Option(help=f"Sequences at once; several with commas. [default: {FIXED_BATCHES}; lognormal: {PLACES}]"),
]
HeadDtype = Annotated[str, typer.Option(help="Output head: auto (as stored), the compute dtype, or nvfp4.")]
Drafts = Annotated[
    int, typer.Option(min=0, max=64, help="Measure decoding with so many drafts on the prompts of --prompts instead.")
]
Epochs = Annotated[
    int, typer.Option(min=1, help="With drafts: passes over the prompts; later ones draft from earlier ones too.")
]


@app.callback()
def _group() -> None:
    """Measure rollouts, kernels and parity; every figure comes with its check and its ceiling."""


@app.command()
@user_errors()
def rollout(
    context: typer.Context,
    model: Annotated[Path | None, typer.Argument(help="Model folder; or use --config-json.")] = None,
    config_json: Annotated[Path | None, typer.Option(help="config.json of the geometry; weights are random.")] = None,
    weights: RolloutWeights = "nvfp4",
    lora_rank: LoraRanks = "0",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 256,
    new: Annotated[int, typer.Option(min=2, help="Tokens to generate (fixed lengths; with drafts: at most).")] = 1024,
    batch: Batches = None,
    lengths: Annotated[str, typer.Option(help="fixed, or lognormal: continuous against static batches.")] = "fixed",
    mean_new: Annotated[float, typer.Option(min=1, help="Mean length (lognormal).")] = 600,
    max_new: Annotated[int, typer.Option(min=1, help="Longest length (lognormal).")] = 4096,
    samples: Annotated[int, typer.Option(min=1, help="Completions (lognormal).")] = 128,
    prefill: Annotated[str | None, typer.Option(help="Also time prefill: SEQUENCESxTOKENS, such as 256x256.")] = None,
    kv_dtype: Annotated[str, typer.Option(help="Dtype of the KV cache: auto (compute dtype) or fp8.")] = "auto",
    head_dtype: HeadDtype = "auto",
    speculative_tokens: Drafts = 0,
    prompts: Annotated[str | None, typer.Option(help="With drafts: prompts as in qerl generate --prompts.")] = None,
    group: Annotated[int, typer.Option(min=1, help="With drafts: samples of a prompt (1 where greedy).")] = 8,
    temperature: Annotated[str, typer.Option(help="With drafts: temperatures, with commas; 0 is greedy.")] = "1,0",
    epochs: Epochs = 1,
    peer: Annotated[str | None, typer.Option(help="Measure transformers or vllm on the same work too.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the model in the rows; default: of its file.")] = None,
    out: Out = None,
    append: Append = False,
    force: Force = False,
    dependent_launch: DependentLaunch = True,
    commit: Commit = None,
    device: Device = "auto",
    seed: Seed = 0,
) -> None:
    """Time generation: distinct random prompts, every token sampled at T = 1, nothing ends a sample early.

    With --speculative-tokens: real prompts on a real model, with drafts and without, until the model's EOS.
    """
    _check_out(out, append=append, force=force)
    source = _source(model, config_json)
    _check_mode(context, lengths, drafts=speculative_tokens > 0, prompts=prompts is not None)
    work = {
        "weights": [part.strip() for part in weights.split(",")],
        "ranks": numbers("--lora-rank", lora_rank, lowest=0),
        "batches": numbers("--batch", batch or (FIXED_BATCHES if lengths == "fixed" else PLACES)),
        "prefill": None if prefill is None else _sizes(prefill),
        "lognormal": (mean_new, max_new, samples) if lengths == "lognormal" else None,
    }
    temperatures = _temperatures(temperature)

    from qerl.benchmarking.run_rollout import RolloutPlan, run_rollout
    from qerl.cli.progress import quiet_libraries

    quiet_libraries()
    drafts = None if prompts is None else _drafts(speculative_tokens, prompts, group, temperatures, epochs)
    run_rollout(
        RolloutPlan(
            source=source, name=name, prompt=prompt, new=new, kv_dtype=kv_dtype, head_dtype=head_dtype, peer=peer,
            device=device, seed=seed, out=out, append=append, dependent_launch=dependent_launch, commit=commit,
            cpu_parameter_limit=CPU_PARAMETER_LIMIT, speculative=drafts, **work,
        ),
        typer.echo,
    )  # fmt: skip


def _source(model: Path | None, config_json: Path | None) -> Path:
    """The one of the two that is given."""
    if (model is None) == (config_json is None):
        raise ValueError("give a model folder or --config-json, one of them")
    source = model or config_json
    if not source.exists():
        raise FileNotFoundError(f"no such file or folder: {source}")
    return source


def _check_mode(context: typer.Context, lengths: str, *, drafts: bool, prompts: bool) -> None:
    """Options that the kind of measurement asked for would ignore are refused."""
    if lengths not in ("fixed", "lognormal"):
        raise ValueError(f"--lengths {lengths!r} is unknown; use fixed or lognormal")
    if drafts != prompts:
        raise ValueError("--speculative-tokens and --prompts go together: drafts are measured on real prompts")
    long_tailed = ("mean_new", "max_new", "samples")
    if drafts:
        if lengths == "lognormal":
            raise ValueError(
                "--lengths lognormal does not go with --speculative-tokens: samples end at the model's EOS"
            )
        _refuse(context, "with --speculative-tokens, which has its own --prompts", "prompt", "peer", *long_tailed)
        return
    _refuse(context, "without --speculative-tokens and --prompts", "group", "temperature", "epochs")
    if lengths == "fixed":
        _refuse(context, "without --lengths lognormal", *long_tailed)
    else:
        _refuse(context, "with --lengths lognormal", "new", "peer")


def _refuse(context: typer.Context, where: str, *names: str) -> None:
    """None of the options ``names`` may be given; ``where`` says what makes them meaningless."""
    given = [name for name in names if context.get_parameter_source(name).name == "COMMANDLINE"]
    if given:
        options = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ValueError(f"{options} would be ignored {where}; leave it out")


def _drafts(tokens: int, prompts: str, group: int, temperatures: list[float], epochs: int) -> "SpeculativePlan":
    from qerl.benchmarking.speculative import SpeculativePlan
    from qerl.cli.prompts import read_prompts

    chats = [prompt.messages(None) for prompt in read_prompts(prompts)]
    return SpeculativePlan(tokens, chats, group, temperatures, epochs)


@app.command()
@user_errors()
def kernels(
    model: Annotated[str, typer.Option(help="7B, 32B (Qwen2.5); several with commas.")] = "7B,32B",
    config_json: Annotated[Path | None, typer.Option(help="config.json of another geometry.")] = None,
    format: Annotated[str, typer.Option(help="nvfp4 or nf4.")] = "nvfp4",
    rows: Annotated[str, typer.Option(help="Numbers of rows M, with commas.")] = DEFAULT_ROWS,
    lora_rank: Annotated[int, typer.Option(min=0, help="Rank of LoRA in the linears.")] = 0,
    rest_ms: Annotated[
        float, typer.Option(min=0, help="Rest before each measured replay of linears: a GPU below its power limit.")
    ] = 0.0,
    parts: Annotated[str, typer.Option(help=f"What to measure: {', '.join(PARTS)}; with commas.")] = ",".join(PARTS),
    quantizer_layers: Annotated[int, typer.Option(min=1, help="Layers that the quantizer packs.")] = 4,
    out: Out = None,
    append: Append = False,
    force: Force = False,
    dependent_launch: DependentLaunch = True,
    commit: Commit = None,
    device: Device = "auto",
) -> None:
    """Time the quantized matmul of every linear and the kernels beside it, against cuBLAS bf16 and the roofline."""
    _check_out(out, append=append, force=force)
    if format not in ("nvfp4", "nf4"):
        raise ValueError(
            f"--format {format!r} has no kernels of its own; use nvfp4 (whose kernels serve mxfp4, which is held in "
            "the same layout) or nf4"
        )
    chosen = [part.strip() for part in parts.split(",")]
    unknown = [part for part in chosen if part not in PARTS]
    if unknown:
        raise ValueError(f"--parts {', '.join(unknown)} is unknown; choose from {', '.join(PARTS)}")
    counts = numbers("--rows", rows)
    geometries = _geometries(model, config_json)

    from qerl.benchmarking.run_kernels import KernelPlan, run_kernels

    run_kernels(
        KernelPlan(
            geometries=tuple(geometries), format=format, rows=tuple(counts), lora_rank=lora_rank, rest_ms=rest_ms,
            parts=tuple(chosen), quantizer_layers=quantizer_layers, device=device, out=out, append=append,
            dependent_launch=dependent_launch, commit=commit,
            cpu_parameter_limit=CPU_PARAMETER_LIMIT,
        ),
        typer.echo,
    )  # fmt: skip


@app.command()
@user_errors()
def parity(
    context: typer.Context,
    model: Annotated[Path, typer.Argument(help="Model folder.")],
    adapter: Adapter = None,
    lora_rank: Annotated[int, typer.Option(min=0, help="Without --adapter: rank of a random one, 0 for none.")] = 32,
    adapter_scale: Annotated[float, typer.Option(min=0.0, help="Spread of the random adapter's update.")] = 0.1,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to draw at least (completions stay whole).")] = 2048,
    prompts: Annotated[str | None, typer.Option(help="FILE of prompts, as of qerl generate; default: sums.")] = None,
    task: Annotated[str | None, typer.Option(help="Instead: training questions of a task, as trained on.")] = None,
    task_option: Annotated[list[str] | None, typer.Option(help="KEY=VALUE for the task; repeatable.")] = None,
    new: Annotated[int, typer.Option(min=1, help="Token limit of a completion.")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="Of sampling and scoring.")] = 1.0,
    weights: Weights = "auto",
    head: Head = "auto",
    kv_dtype: Annotated[str, typer.Option(help="KV cache: auto (compute dtype) or fp8.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Arithmetic: auto, bfloat16 or float32.")] = "auto",
    name: Annotated[str | None, typer.Option(help="Name of the model in the row; default: of its folder.")] = None,
    out: Out = None,
    append: Append = False,
    force: Force = False,
    commit: Commit = None,
    device: Device = "auto",
    seed: Seed = 0,
) -> None:
    """Compare log-probs of sampled tokens: the engine's, the trainer's and those of an fp32 forward."""
    _check_out(out, append=append, force=force)
    if adapter is not None:
        _refuse(context, "with --adapter, which has its own", "lora_rank", "adapter_scale")
    if not (model / "config.json").is_file():
        raise FileNotFoundError(f"{model} holds no model (no config.json): give a local folder")
    chats = _chats(prompts, task, task_option or [])

    from qerl.benchmarking.parity import ParityPlan, default_chats, run_parity
    from qerl.cli.progress import quiet_libraries

    quiet_libraries()
    run_parity(
        ParityPlan(
            model=model, chats=chats or default_chats(), adapter=adapter, lora_rank=lora_rank,
            adapter_scale=adapter_scale, tokens=tokens, new=new, batch=batch, temperature=temperature,
            weights=weights, head=head, kv_dtype=kv_dtype, dtype=dtype, device=device, seed=seed, name=name, out=out,
            append=append, commit=commit,
        ),
        typer.echo,
    )  # fmt: skip


def _chats(prompts: str | None, task: str | None, pairs: list[str]) -> list[list[dict[str, str]]]:
    """Messages of the prompts that the options name; none where they name none."""
    from qerl.cli.evaluate import parse_options
    from qerl.cli.prompts import read_prompts
    from qerl.tasks.registry import load_task

    if prompts is not None and task is not None:
        raise ValueError("--prompts and --task both give prompts; use one of them")
    if pairs and task is None:
        raise ValueError("--task-option goes with --task")
    if prompts is not None:
        return [prompt.messages(None) for prompt in read_prompts(prompts)]
    if task is None:
        return []
    loaded = load_task(task, **parse_options(pairs))
    examples = loaded.train or loaded.test
    if not examples:
        raise ValueError(f"task {task} has no problems; give it a size")
    return [loaded.messages(example) for example in examples]


def _check_out(out: Path | None, *, append: bool, force: bool) -> None:
    """Rows of an earlier measurement are kept or replaced only where that is asked for."""
    if append and force:
        raise ValueError("--append keeps the rows at --out and --force replaces them; give one of them")
    if out is not None and out.exists() and not (append or force):
        raise FileExistsError(
            f"{out} exists; add --append to keep its rows, --force to replace it, or choose another --out"
        )


def numbers(option: str, text: str, lowest: int = 1) -> list[int]:
    """Comma-separated whole numbers of at least ``lowest``."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) >= lowest for part in parts):
        raise ValueError(f"{option} {text!r} must be whole numbers of at least {lowest}, separated by commas")
    return [int(part) for part in parts]


def _temperatures(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"--temperature {text!r} must be numbers, separated by commas, such as 1,0") from error


def _sizes(text: str) -> tuple[int, int]:
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdigit() and int(part) for part in parts):
        raise ValueError(f"--prefill {text!r} must be SEQUENCESxTOKENS, such as 256x256")
    return int(parts[0]), int(parts[1])


def _geometries(names: str, config_json: Path | None) -> "list[Geometry]":
    from qerl.benchmarking.geometry import KNOWN, geometry_of_values, read_config

    if config_json is not None:
        values: dict[str, Any] = read_config(config_json)
        return [geometry_of_values(values, config_json.stem)]
    chosen = [name.strip() for name in names.split(",")]
    unknown = [name for name in chosen if name not in KNOWN]
    if unknown:
        raise ValueError(f"--model {', '.join(unknown)} is unknown; use {', '.join(KNOWN)} or --config-json")
    return [KNOWN[name] for name in chosen]
