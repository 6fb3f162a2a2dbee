"""Routes that validate their body beside the event loop, one long body at a time."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from speq.server.api_error import ApiError, validated
from speq.server.fields import Body

# Shorter bodies are validated at once: it takes less than a hop to a thread and back.
SHORT_BYTES = 16 << 10


class BodyRoute(APIRoute):
    """Routes to endpoints (body, request) whose body is a `Body`; others are FastAPI's own."""

    _long = asyncio.Lock()

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        kind = self.endpoint.__annotations__.get("body")
        if kind is None:
            return super().get_route_handler()

        async def handler(request: Request) -> Response:
            content = await request.body()
            if len(content) <= SHORT_BYTES:
                body = validate_body(kind, content)
            else:
                async with self._long:
                    body = await asyncio.to_thread(validate_body, kind, content)
            response: Response = await self.endpoint(body, request)
            return response

        return handler


def validate_body(kind: type[Body], content: bytes) -> Body:
    """A body as a request wrote it. Raises ApiError for what is no JSON, or has another field."""
    try:
        given = json.loads(content or b"null")
    except (ValueError, RecursionError):
        sentence = "the body is no JSON; send an object"
        raise ApiError(400, sentence, code="invalid_json") from None
    return validated(kind, given)
