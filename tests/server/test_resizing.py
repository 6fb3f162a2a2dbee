"""Another memory budget over HTTP: of a real model, while it answers."""

from pathlib import Path

from speq import Generator
from speq.server.access import Keys, digest
from tests.helpers.api_server import api_server

RESIZE, ADMIN = "/v1/speq/resize", "an-admin-key-of-its-own"
GIVEN = {"Authorization": f"Bearer {ADMIN}"}
ASKED = {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0, "ignore_eos": True}


def test_a_server_follows_a_budget(bundled: Path) -> None:
    generator = Generator.from_pretrained(bundled, "64MiB", dtype="float32", draft="none")
    runtime, keys = generator.runtime, Keys((digest(ADMIN),))
    with api_server(generator, generator, admin_keys=keys) as rig:
        before = rig.complete(**ASKED).json["choices"][0]["text"]
        assert rig.get("/v1/speq").json["memory_bytes"]["budget"] == 64 << 20
        asked = {"memory_budget": "30MiB"}
        assert rig.post(RESIZE, asked).status == 401
        assert rig.post(RESIZE, asked, Authorization="Bearer another-key-16-chars").status == 401
        slots = runtime.plan.slots
        reply = rig.post(RESIZE, asked, **GIVEN)
        assert (reply.status, reply.json) == (200, {"memory_budget": 30 << 20})
        assert runtime.plan.slots < slots
        assert rig.get("/v1/speq").json["memory_bytes"]["budget"] == 30 << 20
        assert rig.complete(**ASKED).json["choices"][0]["text"] == before
        with rig.streaming(max_tokens=60, ignore_eos=True) as response:
            response.readline()
            least = runtime.least_budget
            assert rig.post(RESIZE, {"memory_budget": least}, **GIVEN).status == 200
            assert response.read().endswith(b"data: [DONE]\n\n")
        assert runtime.plan.slots == 2
        refused = rig.post(RESIZE, {"memory_budget": least - 1}, **GIVEN)
        assert refused.status == 400 and f"({least} bytes) at the least" in refused.error["message"]
        for content in ({}, {"memory_budget": None}, {"memory_budget": "much"}, {"budget": 1}):
            assert rig.post(RESIZE, content, **GIVEN).status == 400
        assert rig.post(RESIZE, {"memory_budget": 64 << 20}, **GIVEN).status == 200
        assert runtime.plan.slots == slots
        assert rig.complete(**ASKED).json["choices"][0]["text"] == before
    generator.close()


def test_without_admin_keys_nobody_may(bundled: Path) -> None:
    generator = Generator.from_pretrained(bundled, "64MiB", draft="none")
    with api_server(generator, generator) as rig:
        refused = rig.post(RESIZE, {"memory_budget": "30MiB"}, **GIVEN)
        assert refused.status == 403 and "--admin-key-file" in refused.error["message"]
        assert generator.wanted_budget == 64 << 20
    generator.close()
