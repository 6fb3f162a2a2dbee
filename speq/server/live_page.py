"""Routes of the live page: it asks at the server's own, and sees here how text comes."""

import asyncio
from pathlib import Path
from urllib.parse import quote

from fastapi import FastAPI, HTTPException, Response

from speq.dashboard.live.event_stream import EventStream
from speq.dashboard.live.live_view import LiveView

ASSETS = Path(__file__).parent.parent / "dashboard" / "assets"
PAGE = "live.html"
TYPES = {".js": "text/javascript", ".css": "text/css"}
# Stands in the page where addresses of assets want the token.
TOKEN = "@TOKEN@"


def add_live_page(app: FastAPI, view: LiveView, token: str) -> None:
    """Add the page to a server's application. token: the page's key"""
    assets = {path.name: path for path in ASSETS.iterdir() if path.suffix in TYPES}

    @app.get("/")
    async def page() -> Response:
        text = (ASSETS / PAGE).read_text(encoding="utf-8")
        return Response(text.replace(TOKEN, quote(token)), media_type="text/html")

    @app.get("/assets/{name}")
    async def asset(name: str) -> Response:
        if name not in assets:
            raise HTTPException(404, f"there is no {name} among the page's files")
        path = assets[name]
        return Response(path.read_bytes(), media_type=TYPES[path.suffix])

    @app.get("/events")
    async def events() -> Response:
        return EventStream(view.bus)

    @app.get("/run.json")
    async def run() -> Response:
        # Takes long enough for others to wait.
        record = await asyncio.to_thread(view.record)
        if record is None:
            raise HTTPException(404, "nothing was generated yet; ask for something first")
        text = await asyncio.to_thread(record.to_json)
        return Response(text, media_type="application/json")
