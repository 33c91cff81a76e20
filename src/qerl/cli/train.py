"""``qerl train``: GRPO / DAPO on verifiable tasks, from a recipe and ``--field value`` options."""

from pathlib import Path
from typing import Annotated

import typer

_MAIN_FIELDS = """\
  model                  local folder of the model: 16-bit or packed checkpoint
  weights                frozen base weights: auto (as stored), bf16, nvfp4, nf4, mxfp4
  task, task_options     gsm8k, math, dapo17k, reasoning_gym:NAME, a .jsonl/.parquet file, a hub data set
  rewards                a list of: correctness, format, soft_overlong, length_penalty
  reward_funcs           own functions: module:function or path/to/file.py:function
  dynamic_sampling       sample groups of equal rewards again (DAPO): true or false
  output_dir             run folder
  max_steps              optimizer updates (or num_train_epochs)
  num_generations        samples per prompt (8)
  per_device_train_batch_size, gradient_accumulation_steps, learning_rate
  max_prompt_length, max_completion_length
  lora_r, lora_alpha, lora_target_modules
  aqn_schedule           exponential, paper, linear, cosine, logarithmic, constant, none
  sigma_start, sigma_end, num_stages, aqn_scope
  loss_type, epsilon, epsilon_high, beta, temperature, num_iterations, save_steps, seed
  resume_from_checkpoint true, or a checkpoint folder
  report_to              tensorboard, trackio, wandb
"""


def train(  # its docstring, the help text, is completed below
    ctx: typer.Context,
    config: Annotated[Path | None, typer.Option(help="Recipe: a YAML file of `field: value` lines.")] = None,
    help_all: Annotated[bool, typer.Option("--help-all", help="List every field with its default.")] = False,
) -> None:
    """Train with GRPO on a verifiable task; any field of the recipe can be set as --field value.

    Example: qerl train --config recipes/smollm2-chain-sum.yaml --model models/smollm2-nvfp4 --max_steps 50

    --help-all lists every field (TRL's GRPOConfig fields keep their names). The ones used most:
    """
    if help_all:
        typer.echo(describe_fields())
        return
    from qerl.trainer.parsing import build_configs, parse_overrides, read_yaml

    values = read_yaml(config) if config is not None else {}
    values |= parse_overrides(ctx.args)
    if not values:
        typer.echo(f"nothing to do: give --config FILE or fields. The fields used most:\n\n{_MAIN_FIELDS}")
        raise typer.Exit(2)
    if "model" not in values:
        raise ValueError("model is not set: add `model: FOLDER` to the recipe or --model FOLDER")

    from qerl.cli.progress import quiet_libraries

    quiet_libraries()
    run, args = build_configs(values)

    from qerl.evaluation.report import write_report
    from qerl.trainer.run import Run

    Run(run, args, show=typer.echo).execute()
    typer.echo(f"report: {write_report(Path(args.output_dir))}")


train.__doc__ = f"{train.__doc__}\n\n\b\n{_MAIN_FIELDS}"


def describe_fields() -> str:
    """All fields of a run, one line each: name, default, help (imports TRL)."""
    import dataclasses

    from qerl.trainer.config import QeRLConfig
    from qerl.trainer.run_config import RunConfig

    lines = []
    for cls in (RunConfig, QeRLConfig):
        lines.append(f"\n{cls.__name__}")
        for field in dataclasses.fields(cls):
            if field.init:
                default = "" if field.default is dataclasses.MISSING else f" [{field.default}]"
                lines.append(f"  --{field.name}{default}  {field.metadata.get('help', '')}")
    return "\n".join(lines)
