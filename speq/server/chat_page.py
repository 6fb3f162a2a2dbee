"""Routes of the chat page, which asks by the server's other routes as any client does."""

from fastapi import FastAPI, Response

from speq.dashboard.page import asset
from speq.server.access import CHAT_FILES

TYPES = {"css": "text/css", "js": "text/javascript"}
# The page runs its own script, and asks nobody but this server.
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


def add_chat_page(app: FastAPI) -> None:
    """Add the page to a server's application."""

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return Response(asset("chat.html"), media_type="text/html", headers=HEADERS)

    for name in CHAT_FILES:
        add_file(app, name)


def add_file(app: FastAPI, name: str) -> None:
    @app.get(f"/assets/{name}", include_in_schema=False)
    async def file() -> Response:
        kind = TYPES[name.rpartition(".")[2]]
        return Response(asset(name), media_type=kind, headers=HEADERS)
