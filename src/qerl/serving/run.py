"""Start the server: checks that need no model first, the port among them, then the model, then clients may connect."""

import ipaddress
import logging
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl.rollout.build import build_engine
from qerl.rollout.core import SamplingParams
from qerl.rollout.engine import RolloutEngine
from qerl.rollout.runner import UnsupportedArchitectureError
from qerl.serving.errors import MissingServerPackageError
from qerl.serving.ports import bound_sockets, listen
from qerl.serving.requests import RequestParser
from qerl.serving.worker import EngineWorker

if TYPE_CHECKING:
    from fastapi import FastAPI

logger = logging.getLogger(__name__)


class UnprotectedServerError(ValueError):
    """A server that anybody on the network could use."""


def check_exposure(host: str, api_key: str | None) -> None:
    """Other machines may connect only with a key.

    Raises:
        UnprotectedServerError: ``host`` is not this machine alone, and there is no key.
        ValueError: the key is empty.
    """
    if api_key is not None and not api_key.strip():
        raise ValueError("the API key is empty: give one, or leave --api-key out")
    if api_key is None and not _is_loopback(host):
        raise UnprotectedServerError(
            f"--host {host} lets other machines connect, who could all use the model: set a key (--api-key KEY, or "
            "QERL_API_KEY in the environment), or keep --host 127.0.0.1 and reach it through an SSH tunnel"
        )


def _warm_up(engine: RolloutEngine) -> None:
    """A few tokens through a session, which also allocates the KV pool that the server will use.

    Kernels are compiled, and weights decoded where that is done once, before the first client waits for it.
    """
    with engine.open_session() as session:
        session.add([0], SamplingParams(max_tokens=4, ignore_eos=True))
        while session.has_unfinished:
            session.step()


def _application(engine: RolloutEngine, tokenizer: Any, name: str, api_key: str | None) -> "FastAPI":
    from qerl.serving.app import Server

    parser = RequestParser(tokenizer, name, engine.max_model_len, engine.runner.vocab_size)
    return Server(EngineWorker(engine), parser, api_key).app()


def _require_packages() -> None:
    """Raise `MissingServerPackageError` unless the packages of the extra ``serve`` are here."""
    try:
        for package in ("uvicorn", "fastapi"):
            import_module(package)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("fastapi", "uvicorn", "starlette"):
            raise
        raise MissingServerPackageError(
            f"serving needs the package {error.name}: pip install 'qerl[serve]' (FastAPI and uvicorn)"
        ) from error


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def serve(
    model: str,
    *,
    adapter: str | None = None,
    name: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    weights: str = "auto",
    head: str = "auto",
    device: str = "auto",
    max_model_len: int | None = None,
    max_num_seqs: int = 256,
    kv_dtype: str = "auto",
    speculative_tokens: int = 0,
    speculative_max_batch: int = 8,
) -> None:
    """Load ``model`` and serve it until interrupted.

    Args:
        name: that clients ask for; default: name of the folder.
        weights, head, max_model_len, max_num_seqs, kv_dtype, speculative_tokens, speculative_max_batch: see
            :func:`qerl.rollout.build.build_engine`.

    Raises:
        UnprotectedServerError: an address that others can reach, without a key.
        PortError: the port is in use, or the host is none of this machine; found before the model is loaded.
        MissingServerPackageError: FastAPI or uvicorn is not installed.
        UnsupportedArchitectureError: a model that the engine does not run.
    """
    check_exposure(host, api_key)
    _require_packages()
    import uvicorn

    with bound_sockets(host, port) as sockets:
        engine, tokenizer, _ = build_engine(
            model,
            weights=weights,
            head=head,
            adapter=adapter,
            device=device,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            kv_dtype=kv_dtype,
            speculative_tokens=speculative_tokens,
            speculative_max_batch=speculative_max_batch,
        )
        if not isinstance(engine, RolloutEngine):
            raise UnsupportedArchitectureError(f"{model} runs on transformers' generation only, which cannot be served")
        _warm_up(engine)
        served_name = name or Path(model).resolve().name
        app = _application(engine, tokenizer, served_name, api_key)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5))
        listen(sockets)
        where = f"http://{host}:{port}/v1"
        logger.info("serving %s at %s (%d tokens a request)", served_name, where, engine.max_model_len)
        # uvicorn raises the signal that stopped it once more; Ctrl-C is how a server ends, so that is no error.
        with suppress(KeyboardInterrupt):
            server.run(sockets=sockets)
