"""The ``qerl`` command: a table of commands, each imported only when it is called.

``qerl --help`` prints the table and imports none of the commands (nor torch), so it answers at once.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any

import typer
import typer.core

from qerl import __version__
from qerl.cli.errors import user_errors


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand: where its function lives, and the line that ``qerl --help`` shows for it."""

    module: str
    function: str
    help: str
    free_options: bool = False

    def load(self, name: str) -> Any:
        """Import the module and build the command from the signature of its function."""
        function = getattr(import_module(self.module), self.function)
        if isinstance(function, typer.Typer):
            # a command with subcommands of its own, which report users' mistakes themselves
            return typer.main.get_command(function)
        # train reads `--field value` for every field of its configuration from ctx.args.
        settings = {"allow_extra_args": True, "ignore_unknown_options": True} if self.free_options else {}
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        single.command(name, context_settings=settings)(user_errors()(function))
        return typer.main.get_command(single)


COMMANDS: dict[str, Command] = {
    "quantize": Command("qerl.cli.quantize", "quantize", "Quantize a model to 4 bits (NVFP4, NF4, MXFP4)."),
    "train": Command("qerl.cli.train", "train", "Train a model with GRPO on verifiable tasks.", free_options=True),
    "eval": Command("qerl.cli.evaluate", "evaluate", "Evaluate a model on tasks, with intervals."),
    "compare": Command("qerl.cli.compare", "compare", "Compare two evaluations: interval and paired test."),
    "task": Command("qerl.cli.task", "app", "Check a task's prompts, golds and scoring before training."),
    "generate": Command("qerl.cli.generate", "generate", "Generate completions of prompts."),
    "export": Command("qerl.cli.export", "export", "Export a trained run: PEFT adapter or merged 16-bit model."),
    "serve": Command("qerl.cli.serve", "serve", "Serve a model over OpenAI's HTTP interface."),
    "bench": Command("qerl.cli.bench", "app", "Measure rollouts and kernels against their ceilings."),
    "report": Command("qerl.cli.report", "report", "Write the HTML report of a training run."),
    "verify": Command("qerl.cli.verify", "verify", "Check predictions against gold answers (JSONL)."),
    "demo": Command("qerl.cli.demo", "demo", "Quantize, train, evaluate and report a small model, end to end."),
    "doctor": Command("qerl.cli.doctor", "doctor", "Check this machine: packages, GPU, memory, disk."),
}


class LazyGroup(typer.core.TyperGroup):
    """A group that lists commands from the static table and imports the one that is called."""

    def list_commands(self, ctx: typer.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:
        """A placeholder that carries only the help line; ``resolve_command`` swaps in the real command."""
        if cmd_name not in COMMANDS:
            return None
        return typer.core.TyperCommand(cmd_name, help=COMMANDS[cmd_name].help)

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> tuple[str | None, Any, list[str]]:
        # The table stands in for the registered commands where the base class looks for near names.
        self.commands = dict.fromkeys(COMMANDS)
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and COMMANDS[args[0]].load(args[0]), rest


app = typer.Typer(cls=LazyGroup, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"qerl {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Reinforcement learning for reasoning LLMs with frozen 4-bit weights."""


def main() -> None:
    """Entry point of the ``qerl`` script."""
    app(prog_name="qerl")


if __name__ == "__main__":
    main()
