"""The live page's routes."""

import asyncio
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI, HTTPException, Request, Response
from starlette.exceptions import HTTPException as Unanswered
from starlette.requests import ClientDisconnect

from speq.dashboard.live.event_stream import EventStream
from speq.dashboard.live.guard import App, Guard, Guarded, Refusal, error_body
from speq.dashboard.live.metrics import Metrics
from speq.dashboard.live.session import Busy, Nothing, Shown
from speq.errors import SpeqError

ASSETS = Path(__file__).parent.parent / "assets"
PAGE = "live.html"
TYPES = {".js": "text/javascript", ".css": "text/css"}
# Stands in the page where addresses of assets want the token.
TOKEN = "@TOKEN@"
# What asks for generations, on a page that only watches those of others.
FORM, HIDDEN_FORM = '<form id="ask">', '<form id="ask" hidden>'


def application(session: Shown, metrics: Metrics, guard: Guard) -> App:
    """An ASGI application: a session's page, behind its guard."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    assets = {path.name: path for path in ASSETS.iterdir() if path.suffix in TYPES}

    @app.get("/")
    async def page() -> Response:
        text = (ASSETS / PAGE).read_text(encoding="utf-8")
        if not session.asks:
            text = text.replace(FORM, HIDDEN_FORM)
        return Response(text.replace(TOKEN, quote(guard.token)), media_type="text/html")

    @app.get("/assets/{name}")
    async def asset(name: str) -> Response:
        if name not in assets:
            raise HTTPException(404, f"there is no {name} among the page's files")
        path = assets[name]
        return Response(path.read_bytes(), media_type=TYPES[path.suffix])

    @app.get("/events")
    async def events() -> Response:
        return EventStream(session.broadcast)

    @app.post("/generate")
    async def generate(request: Request) -> Response:
        asked = given(await request.body())
        prompt = asked.pop("prompt", None)
        return answer({"run": session.start(prompt, asked)}, status=202)

    @app.post("/stop")
    async def stop() -> Response:
        return answer({"stopping": session.stop()})

    @app.get("/metrics")
    async def numbers() -> Response:
        return Response(metrics.text(), headers={"content-type": metrics.content_type})

    @app.get("/run.json")
    async def run() -> Response:
        # Takes long enough for others to wait.
        text = await asyncio.to_thread(lambda: session.record().to_json())
        return Response(text, media_type="application/json")

    @app.exception_handler(SpeqError)
    async def refused(_: Request, error: SpeqError) -> Response:
        status = 409 if isinstance(error, Busy) else 404 if isinstance(error, Nothing) else 400
        return refusal(status, str(error))

    @app.exception_handler(Unanswered)
    async def unanswered(_: Request, error: Unanswered) -> Response:
        return refusal(error.status_code, error.detail)

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, __: ClientDisconnect) -> Response:
        return refusal(400, "the request was cut off")

    return Guarded(app, guard)


def given(body: bytes) -> dict[str, Any]:
    """The object that was posted. Raises SpeqError where it is none."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise SpeqError("the body is no JSON; post an object such as {prompt: TEXT}") from error
    if not isinstance(asked, dict):
        raise SpeqError("the body is no object; post one such as {prompt: TEXT}")
    return asked


def answer(content: dict[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(content), status, media_type="application/json")


def refusal(status: int, sentence: str) -> Response:
    body = error_body(Refusal(status, sentence))
    return Response(body, status, media_type="application/json")
