"""What subscribers read of requests, whenever they come and however slow they are."""

import json
from typing import Any

from speq.dashboard.live.event_bus import EventBus, Subscriber


def take(bus: EventBus, subscriber: Subscriber) -> list[tuple[str, Any]]:
    return [(each.kind, json.loads(each.data)) for each in bus.take(subscriber)]


def test_who_comes_late_or_is_slow_loses_pictures_and_no_tokens() -> None:
    bus = EventBus()
    woken: list[str] = []
    with (
        bus.subscribe(lambda: woken.append("quick")) as quick,
        bus.subscribe(lambda: woken.append("slow")) as slow,
    ):
        assert take(bus, quick) == []
        assert bus.begin({"prompt": "Once"}) == 1
        read = take(bus, quick)
        for at in range(3):
            bus.replace("panels", {"at": at})
            bus.add_token({"id": at})
            read += take(bus, quick)
        bus.end("finished", {"stats": None})
        read += take(bus, quick)
        late = take(bus, slow)
        assert take(bus, quick) == take(bus, slow) == []
    begun = ("begun", {"prompt": "Once", "run": 1})
    tokens = [("token", {"id": at}) for at in range(3)]
    end = ("finished", {"stats": None})
    assert late == [begun, *tokens, ("panels", {"at": 2}), end]
    assert [each for each in read if each[0] != "panels"] == [begun, *tokens, end]
    assert [data["at"] for kind, data in read if kind == "panels"] == [0, 1, 2]
    assert woken.count("quick") == woken.count("slow") == 8
    with bus.subscribe(lambda: None) as later:
        assert take(bus, later) == late


def test_a_new_request_replaces_the_one_before() -> None:
    bus = EventBus()
    with bus.subscribe(lambda: None) as subscriber:
        bus.begin({"prompt": "one"})
        bus.add_token({"id": 1})
        assert [kind for kind, _ in take(bus, subscriber)] == ["begun", "token"]
        bus.add_token({"id": 2})
        bus.end("finished", {})
        bus.begin({"prompt": "two"})
        bus.add_token({"id": 3})
        assert take(bus, subscriber) == [
            ("begun", {"prompt": "two", "run": 2}),
            ("token", {"id": 3}),
        ]


def test_who_left_is_not_called() -> None:
    bus = EventBus()
    woken: list[int] = []
    with bus.subscribe(lambda: woken.append(1)):
        bus.begin({})
        assert bus.has_subscribers
    bus.add_token({})
    assert woken == [1]
    assert not bus.has_subscribers


def test_all_are_sent_home() -> None:
    bus = EventBus()
    woken: list[int] = []
    with bus.subscribe(lambda: woken.append(1)) as subscriber:
        bus.close()
        assert subscriber.closed and woken == [1]
    with bus.subscribe(lambda: None) as later:
        assert later.closed
