"""Options that several commands share, so that they are named and explained alike everywhere."""

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[str, typer.Argument(help="Folder of the model: 16-bit or quantized.")]
Adapter = Annotated[Path | None, typer.Option(help="Folder of a LoRA adapter (PEFT format).")]
Weights = Annotated[str, typer.Option(help="auto (as stored), bf16, nvfp4, nf4 or mxfp4.")]
Head = Annotated[str, typer.Option(help="Output head: auto (as stored), bf16 or nvfp4.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 is greedy.")]
TopP = Annotated[float, typer.Option(min=0.0, max=1.0, help="Nucleus sampling; 1 is off.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Token limit of a completion.")]
Seed = Annotated[int, typer.Option(help="Seed of sampling.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
MaxModelLen = Annotated[int | None, typer.Option(min=1, help="Longest prompt + completion, tokens.")]
SpeculativeTokens = Annotated[
    int,
    typer.Option(
        min=0, max=64, help="Tokens guessed ahead for a sample while few run (0: off); only rounding changes."
    ),
]
SpeculativeMaxBatch = Annotated[int, typer.Option(min=1, help="Samples running up to which tokens are guessed.")]
