"""The HTTP application: routes, keys, streaming, and clients that go away."""

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from qerl.serving.choices import Piece
from qerl.serving.errors import ApiError
from qerl.serving.generation import Generation
from qerl.serving.requests import GenerationRequest, RequestParser
from qerl.serving.responses import ChatFormat, CompletionFormat, Format, join, usage
from qerl.serving.worker import EngineWorker

# Nobody reads a response whose client has gone; this is nginx's status for it.
_CLIENT_GONE = 499


class Server:
    """One model behind OpenAI's routes.

    Args:
        worker: of the engine; started and stopped with the application.
        parser: of request bodies.
        api_key: asked from every client; None: open to all who can connect.
    """

    def __init__(self, worker: EngineWorker, parser: RequestParser, api_key: str | None) -> None:
        self.worker = worker
        self.parser = parser
        self._api_key = api_key
        # Tokenizers are not safe in several threads at once.
        self._parsing = asyncio.Lock()

    def app(self) -> FastAPI:
        """The ASGI application."""
        app = FastAPI(title="qerl", lifespan=self._lifespan, openapi_url=None)
        app.add_exception_handler(ApiError, _api_error)
        app.add_exception_handler(HTTPException, _http_error)
        app.add_exception_handler(ClientDisconnect, _client_gone)
        app.add_exception_handler(RequestValidationError, _validation_error)
        app.get("/health")(self.health)
        app.get("/v1/models")(self.models)
        app.get("/v1/models/{name:path}")(self.model)
        app.post("/v1/completions")(self.completions)
        app.post("/v1/chat/completions")(self.chat_completions)
        return app

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        self.worker.start(asyncio.get_running_loop())
        yield
        await asyncio.to_thread(self.worker.stop)

    async def health(self) -> JSONResponse:
        """200 while the engine serves, 503 once it has failed; needs no key."""
        failure = self.worker.failure
        body = {"status": "ok" if failure is None else "failed", "open_requests": self.worker.open_requests}
        return JSONResponse(body, status_code=200 if failure is None else 503)

    async def models(self, request: Request) -> JSONResponse:
        """The one model."""
        self._check_key(request)
        return JSONResponse({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request, name: str) -> JSONResponse:
        """The model by name."""
        self._check_key(request)
        if name != self.parser.model_name:
            raise ApiError(
                f"the model {name!r} does not exist; this server has {self.parser.model_name!r}",
                status=404, param="model", code="model_not_found",
            )  # fmt: skip
        return JSONResponse(self._model_card())

    async def completions(self, request: Request) -> Response:
        """``/v1/completions``."""
        return await self._generate(request, self.parser.completion, CompletionFormat)

    async def chat_completions(self, request: Request) -> Response:
        """``/v1/chat/completions``."""
        return await self._generate(request, self.parser.chat, ChatFormat)

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self.parser.model_name,
            "object": "model",
            "created": 0,
            "owned_by": "qerl",
            "max_model_len": self.parser.max_model_len,
        }

    def _check_key(self, request: Request) -> None:
        if self._api_key is None:
            return
        given = request.headers.get("authorization", "").encode()
        if not secrets.compare_digest(given, f"Bearer {self._api_key}".encode()):
            raise ApiError("a valid API key is needed: Authorization: Bearer KEY", status=401, code="invalid_api_key")

    async def _generate(
        self, request: Request, parse: Callable[[Any], GenerationRequest], make_format: Callable[[str, bool], Format]
    ) -> Response:
        self._check_key(request)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # A page in the user's browser may post any other type to a loopback port without asking.
            raise ApiError(f"the body must be application/json, the request says {kind or 'nothing'}", status=415)
        try:
            body = json.loads(await request.body())
            json.dumps(body, ensure_ascii=False).encode()  # half a surrogate pair is text for JSON, for no tokenizer
        except (json.JSONDecodeError, UnicodeError, RecursionError) as error:
            raise ApiError(f"the body is no JSON of Unicode text, or nested too deeply: {error}") from error
        # In a thread: rendering and tokenizing a long prompt would hold up every stream.
        async with self._parsing:
            asked = await asyncio.to_thread(parse, body)
        generation = Generation(self.worker, self.parser.tokenizer, asked)
        form = make_format(self.parser.model_name, asked.logprobs)
        if asked.stream:
            return await self._streamed(request, generation, form)
        pieces: list[list[Piece]] = [[] for _ in generation.choices]
        async with aclosing(_while_connected(request, generation.pieces())) as steps:
            async for step in steps:
                for piece in step:
                    pieces[piece.index].append(piece)
        if not all(choice.finished for choice in generation.choices):
            return Response(status_code=_CLIENT_GONE)
        counts = usage(generation.prompt_tokens, generation.completion_tokens)
        return JSONResponse(form.whole([join(parts) for parts in pieces], counts))

    async def _streamed(self, request: Request, generation: Generation, form: Format) -> Response:
        """Server-sent events. The first step is awaited before the status is sent, so that errors have one."""
        steps = _while_connected(request, generation.pieces())
        try:
            first = await anext(steps)
        except StopAsyncIteration:
            return Response(status_code=_CLIENT_GONE)
        return StreamingResponse(_events(first, steps, generation, form), media_type="text/event-stream")


async def _events(
    first: list[Piece], steps: AsyncGenerator[list[Piece]], generation: Generation, form: Format
) -> AsyncIterator[str]:
    async with aclosing(steps):
        for opening in form.opening(len(generation.choices)):
            yield _event(opening)
        for piece in first:
            yield _event(form.piece(piece))
        try:
            async for step in steps:
                for piece in step:
                    yield _event(form.piece(piece))
        except ApiError as error:
            # The status has gone out; clients look for an error among the events.
            yield _event(error.body())
            return
        if generation.request.include_usage:
            yield _event(form.usage(usage(generation.prompt_tokens, generation.completion_tokens)))
        yield "data: [DONE]\n\n"


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


async def _while_connected(request: Request, steps: AsyncGenerator[list[Piece]]) -> AsyncGenerator[list[Piece]]:
    """``steps`` until they end or the client is gone, whatever comes first; closes them in any case."""
    gone = asyncio.create_task(_disconnected(request))
    step: asyncio.Future[list[Piece] | None] | None = None
    try:
        while True:
            step = asyncio.ensure_future(anext(steps, None))
            await asyncio.wait({step, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not step.done():
                return
            pieces = step.result()
            if pieces is None:
                return
            yield pieces
    finally:
        gone.cancel()
        if step is not None and not step.done():
            # A generator that runs cannot be closed: it has to stop first.
            step.cancel()
            await asyncio.wait({step})
        await steps.aclose()


async def _disconnected(request: Request) -> None:
    """Returns once the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _api_error(request: Request, error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), status_code=error.status)


async def _http_error(request: Request, error: HTTPException) -> JSONResponse:
    body = ApiError(f"{request.method} {request.url.path}: {error.detail}", status=error.status_code).body()
    return JSONResponse(body, status_code=error.status_code)


async def _client_gone(request: Request, error: ClientDisconnect) -> Response:
    """The client left before its body had arrived."""
    return Response(status_code=_CLIENT_GONE)


async def _validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
    return JSONResponse(ApiError(str(error)).body(), status_code=400)
