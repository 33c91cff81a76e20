"""``qerl serve``: a model over OpenAI's HTTP interface."""

from typing import Annotated

import typer

from qerl.cli.options import Adapter, Device, Head, MaxModelLen, Model, SpeculativeMaxBatch, SpeculativeTokens, Weights


def serve(
    model: Model,
    adapter: Adapter = None,
    name: Annotated[str | None, typer.Option(help="Name that clients ask for; default: of the folder.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen at; other than loopback needs a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="QERL_API_KEY", help="Key that clients must send (Bearer).")
    ] = None,
    weights: Weights = "auto",
    head: Head = "auto",
    device: Device = "auto",
    max_model_len: MaxModelLen = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences that run at once.")] = 256,
    kv_dtype: Annotated[str, typer.Option(help="KV cache: auto (compute dtype) or fp8.")] = "auto",
    speculative_tokens: SpeculativeTokens = 0,
    speculative_max_batch: SpeculativeMaxBatch = 8,
) -> None:
    """Serve /v1/completions, /v1/chat/completions and /v1/models until interrupted."""
    from qerl.serving.run import check_exposure
    from qerl.serving.run import serve as run

    check_exposure(host, api_key)
    from qerl.cli.progress import quiet_libraries

    quiet_libraries()
    run(
        model,
        adapter=None if adapter is None else str(adapter),
        name=name,
        host=host,
        port=port,
        api_key=api_key,
        weights=weights,
        head=head,
        device=device,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        kv_dtype=kv_dtype,
        speculative_tokens=speculative_tokens,
        speculative_max_batch=speculative_max_batch,
    )
