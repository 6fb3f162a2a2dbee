"""The server's routes."""

import json
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as Unanswered
from starlette.requests import ClientDisconnect

from speq.engine.engine_thread import EngineThread
from speq.errors import SpeqError
from speq.server.answer import Answer, StreamedAnswer, TextChoice, ToldBeside, WholeAnswer
from speq.server.api_error import ApiError, error_of
from speq.server.body_route import BodyRoute
from speq.server.fields import ChatBody, CompletionBody, ResizeBody, SampledBody, TokenizeBody
from speq.server.gate import OWNER_KEY
from speq.server.message_fields import CountBody, MessagesBody
from speq.server.messages import error_content
from speq.server.metrics import Metrics
from speq.server.ollama import loaded, ollama_error
from speq.server.ollama_fields import OllamaBody, OllamaChatBody, OllamaGenerateBody, ShowBody
from speq.server.response_fields import ResponseBody
from speq.server.service import Asked, Service
from speq.version import __version__

OWNER = "speq"
# Anthropic's routes.
MESSAGES = "/v1/messages"
# Errors of APIs that do not have OpenAI's.
ERRORS = {MESSAGES: error_content, "/api/": ollama_error}
# For the page that describes the routes; answers are written by `speq.server.answer_formats`.
ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer: one object, or chunks of it where `stream` is true.",
        "content": {"application/json": {}, "text/event-stream": {}},
    },
    400: {"description": "A field is wrong or not supported; `error.param` names it."},
    404: {"description": "There is no such model."},
    429: {"description": "Too many requests wait; ask again after `Retry-After` seconds."},
    500: {"description": "The engine failed at this request."},
    503: {"description": "The engine has died, or the server is ending."},
}


def make_app(service: Service, thread: EngineThread, metrics: Metrics) -> FastAPI:
    """Make an ASGI application of what clients ask for, without a gate before it."""
    app = FastAPI(
        title="speq", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.router.route_class = BodyRoute
    model = {
        "id": service.name,
        "object": "model",
        "created": 0,
        "owned_by": OWNER,
        "max_model_len": service.max_context,
    }

    def answer(
        body: SampledBody | MessagesBody | ResponseBody | OllamaBody,
        asked: Request,
        texts: Asked,
    ) -> Answer:
        for request, _ in texts:
            request.owner = asked.scope.get(OWNER_KEY, "")
        streams = thread.submit_all([request for request, _ in texts])
        formats = [format for _, format in texts]
        choices = [TextChoice(*each) for each in zip(streams, formats, strict=True)]
        if body.stream or (isinstance(body, OllamaBody) and body.stream is None):
            beside = ToldBeside.of(body) if isinstance(body, SampledBody) else ToldBeside()
            return StreamedAnswer(thread, choices, beside)
        return WholeAnswer(thread, choices)

    @app.post("/v1/chat/completions", responses=ANSWERS, response_class=Response)
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        return answer(body, request, await service.chat(body))

    @app.post("/v1/completions", responses=ANSWERS, response_class=Response)
    async def completions(body: CompletionBody, request: Request) -> Response:
        return answer(body, request, await service.completion(body))

    @app.post("/v1/responses", responses=ANSWERS, response_class=Response)
    async def one_response(body: ResponseBody, request: Request) -> Response:
        return answer(body, request, await service.response(body))

    @app.post(MESSAGES, responses=ANSWERS, response_class=Response)
    async def messages(body: MessagesBody, request: Request) -> Response:
        return answer(body, request, await service.message(body))

    @app.post(f"{MESSAGES}/count_tokens")
    async def count_tokens(body: CountBody, request: Request) -> Response:
        return JSONResponse({"input_tokens": await service.count(body)})

    @app.post("/api/chat", responses=ANSWERS, response_class=Response)
    async def ollama_chat(body: OllamaChatBody, request: Request) -> Response:
        if not body.messages:
            return JSONResponse(loaded(body.model or service.name, generates=False))
        return answer(body, request, await service.ollama(body))

    @app.post("/api/generate", responses=ANSWERS, response_class=Response)
    async def ollama_generate(body: OllamaGenerateBody, request: Request) -> Response:
        if not body.prompt:
            return JSONResponse(loaded(body.model or service.name, generates=True))
        return answer(body, request, await service.ollama(body))

    @app.get("/api/tags")
    @app.get("/api/ps")
    async def ollama_models() -> Response:
        return JSONResponse({"models": [service.ollama_model.listed()]})

    @app.post("/api/show")
    async def ollama_show(body: ShowBody, request: Request) -> Response:
        return JSONResponse(service.ollama_model.shown())

    @app.get("/api/version")
    async def ollama_version() -> Response:
        return JSONResponse({"version": __version__})

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [model]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        service.check_model(name)
        return JSONResponse(model)

    @app.get("/v1/speq")
    async def facts() -> Response:
        return JSONResponse(service.facts)

    @app.post("/v1/speq/resize")
    async def resize(body: ResizeBody, request: Request) -> Response:
        return JSONResponse(await service.resize(body))

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody, request: Request) -> Response:
        ids = await service.tokenize(body)
        told = {"count": len(ids), "max_model_len": service.max_context, "tokens": ids}
        return JSONResponse(told)

    @app.get("/health")
    async def health() -> Response:
        if thread.failure is not None:
            return refusal(ApiError(503, thread.failure, code="unavailable"))
        lengths = thread.queue_lengths
        return JSONResponse(
            {"status": "ok", "running": lengths.running, "waiting": lengths.waiting}
        )

    @app.get("/metrics")
    async def get_metrics() -> Response:
        return Response(metrics.text(), headers={"content-type": metrics.content_type})

    @app.exception_handler(ApiError)
    async def refused(asked: Request, error: ApiError) -> Response:
        return refusal(error, asked)

    @app.exception_handler(SpeqError)
    async def bad(asked: Request, error: SpeqError) -> Response:
        return refusal(error_of(error), asked)

    @app.exception_handler(Unanswered)
    async def unanswered(_: Request, error: Unanswered) -> Response:
        return refusal(ApiError(error.status_code, error.detail, headers=dict(error.headers or {})))

    @app.exception_handler(Exception)
    async def fault(_: Request, error: Exception) -> Response:
        # The log has it: it is raised again once this is sent.
        sentence = f"the server failed ({type(error).__name__}); its log has more"
        return refusal(ApiError(500, sentence))

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, __: ClientDisconnect) -> Response:
        return refusal(ApiError(400, "the request was cut off"))

    return app


def refusal(error: ApiError, asked: Request | None = None) -> Response:
    """An error as the API of the route that was asked has it."""
    body = error.body
    if asked is not None:
        for prefix, write in ERRORS.items():
            if asked.url.path.startswith(prefix):
                body = json.dumps(write(error)).encode()
    return Response(body, error.status, error.headers, media_type="application/json")
