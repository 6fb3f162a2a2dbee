"""Requests that schemathesis makes of the page that describes the routes: none is our fault."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.api_server import Rig, api_server
from tests.helpers.scripted_engine import ScriptedEngine, ScriptedModel, pieces

EXAMPLES = 40
ROUTES = [
    *(("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("POST", "/tokenize")),
    *(("POST", "/v1/responses"), ("POST", "/v1/messages"), ("POST", "/v1/messages/count_tokens")),
    *(("GET", "/v1/models"), ("GET", "/v1/models/{name}"), ("GET", "/health"), ("GET", "/metrics")),
    *(("POST", "/api/chat"), ("POST", "/api/generate"), ("POST", "/api/show")),
    *(("GET", "/api/tags"), ("GET", "/api/ps"), ("GET", "/api/version"), ("GET", "/v1/speq")),
    ("POST", "/v1/speq/resize"),
]


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with api_server(ScriptedEngine(pieces("a", "b")), ScriptedModel(max_context=100_000)) as made:
        yield made


@pytest.fixture(scope="module")
def described(rig: Rig) -> Any:
    # Here, since it takes seconds to import.
    import schemathesis

    return schemathesis.openapi.from_url(f"http://{rig.server.access.host}:{rig.port}/openapi.json")


@pytest.mark.wide
def test_all_routes_are_tried(described: Any) -> None:
    operations = (found.ok() for found in described.get_all_operations())
    assert {(each.method.upper(), each.path) for each in operations} == set(ROUTES)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("mode", "method", "path"),
    [("positive", *route) for route in ROUTES]
    # Nothing can be wrong about a route without fields.
    + [("negative", *route) for route in ROUTES if route[0] == "POST"],
)
def test_no_request_is_our_fault(described: Any, mode: str, method: str, path: str) -> None:
    from hypothesis import HealthCheck, given, settings
    from schemathesis.checks import not_a_server_error
    from schemathesis.generation import GenerationMode

    operation = described[path][method]
    statuses: set[int] = set()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=GenerationMode(mode)))
    def ask(case: Any) -> None:
        response = case.call()
        case.validate_response(response, checks=[not_a_server_error])
        statuses.add(response.status_code)

    ask()
    assert statuses and max(statuses) < 500
