"""Routes that validate their body beside the event loop, one long body at a time."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import ValidationError

from speq.server.api_error import ApiError, error_of_fields
from speq.server.fields import Body

# Shorter bodies are validated at once: it takes less than a hop to a thread and back.
SHORT_BYTES = 16 << 10


class BodyRoute(APIRoute):
    """Of an endpoint (body, request), whose body is a `Body`. Other endpoints are FastAPI's own."""

    _long = asyncio.Lock()

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        kind = self.endpoint.__annotations__.get("body")
        if kind is None:
            return super().get_route_handler()

        async def handler(request: Request) -> Response:
            written = await request.body()
            if len(written) <= SHORT_BYTES:
                body = validated(kind, written)
            else:
                async with self._long:
                    body = await asyncio.to_thread(validated, kind, written)
            response: Response = await self.endpoint(body, request)
            return response

        return handler


def validated(kind: type[Body], written: bytes) -> Body:
    """A body as a request wrote it. Raises ApiError for what is no JSON, or has another field."""
    try:
        given = json.loads(written or b"null")
    except (ValueError, RecursionError):
        sentence = "the body is no JSON; send an object"
        raise ApiError(400, sentence, code="invalid_json") from None
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        faults = error.errors(include_url=False)
    raise error_of_fields(faults)
