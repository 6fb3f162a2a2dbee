"""A page with a panel of every kind: `python -m tests.helpers.sample_page FILE` writes it."""

import base64
import sys
from pathlib import Path
from typing import Any

import numpy as np

from speq.dashboard.page import write_page
from speq.dashboard.panel import Frames, Page, Panel, Table

STEPS = 40
PARTS = (("draft", "/"), ("verify", ""), ("stall", "x"), ("rest", "."))


def packed(bits: np.ndarray[Any, Any]) -> str:
    """Bits in the form that `Frames` wants."""
    return base64.b64encode(np.packbits(bits.reshape(-1), bitorder="little").tobytes()).decode()


def random_frames(layers: int, experts: int, steps: int, seed: int, host: bool = False) -> Frames:
    """Frames in which about half of the experts lie in slots, and a tenth is asked for."""
    draw = np.random.default_rng(seed)
    slots = draw.random((steps, layers, experts)) < 0.5
    used = draw.random((steps, layers, experts)) < 0.1
    return Frames(
        layers=layers,
        experts=experts,
        labels=[f"step {step} (verify)" for step in range(steps)],
        slots=[packed(each) for each in slots],
        used=[packed(each) for each in used],
        host=packed(draw.random((layers, experts)) < 0.7) if host else None,
    )


def bars() -> Panel:
    draw = np.random.default_rng(1)
    times = {name: draw.gamma(2.0, 7.0, STEPS).tolist() for name, _ in PARTS}
    steps = list(range(STEPS))
    data = [
        {
            **{"type": "bar", "name": name, "x": steps, "y": times[name]},
            "marker": {"color": f"@{name}", "pattern": {"shape": shape}},
        }
        for name, shape in PARTS
    ]
    layout = {
        "barmode": "stack",
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {"title": {"text": "time (ms)"}},
    }
    rows = [[step, *(times[name][step] for name, _ in PARTS)] for step in steps]
    columns = ("step", *(f"{name} (ms)" for name, _ in PARTS))
    aid = "Each bar is a step; its parts, from below, are what the time went to."
    return Panel("bars", "Where the time went", aid, data, layout, Table(columns, rows))


def lines() -> Panel:
    budgets = [16, 20, 24, 28, 32]
    curves = {
        "measured, least recently used": [91.2, 71.0, 50.5, 33.25, 20.125],
        "measured, lookahead": [80.0, 60.5, 41.0, 27.75, 18.0],
        "expected by the plan": [84.0, 63.0, 44.0, 29.0, 17.0],
    }
    marks = (("solid", "circle", "@1"), ("dash", "square", "@2"), ("dot", "diamond", "@expected"))
    data = [
        {
            **{"type": "scatter", "mode": "lines+markers", "name": name, "x": budgets, "y": values},
            "line": {"dash": dash, "color": colour},
            "marker": {"symbol": symbol, "color": colour},
        }
        for (name, values), (dash, symbol, colour) in zip(curves.items(), marks, strict=True)
    ]
    layout = {
        "xaxis": {"title": {"text": "memory budget (MiB)"}},
        "yaxis": {"title": {"text": "time per output token (ms)"}, "rangemode": "tozero"},
    }
    rows = [[*row] for row in zip(budgets, *curves.values(), strict=True)]
    table = Table(("budget (MiB)", *(f"{name} (ms)" for name in curves)), rows)
    aid = "Lower is better; a line is a policy, and the dots are what the plan expected."
    return Panel("lines", "Time per token and budget", aid, data, layout, table)


def heat(layers: int = 24, experts: int = 60, name: str = "heat") -> Panel:
    misses = np.random.default_rng(2).gamma(1.5, 9.0, (layers, experts))
    title = {"text": "misses per 1,000 requests"}
    data = [{"type": "heatmap", "z": misses.tolist(), "colorbar": {"title": title}}]
    layout = {
        "xaxis": {"title": {"text": "expert"}},
        "yaxis": {"title": {"text": "MoE layer"}, "autorange": "reversed"},
    }
    rows = [
        [layer, expert, float(misses[layer, expert])]
        for layer in range(layers)
        for expert in range(experts)
    ]
    table = Table(("MoE layer", "expert", "misses per 1,000 requests"), rows)
    aid = "A darker cell in the light theme, or a lighter one in the dark theme, missed more often."
    return Panel(name, "Misses of each expert", aid, data, layout, table)


def absent() -> Panel:
    reason = "This run drafted nothing, so there are no drafted tokens to look at."
    return Panel("drafted", "Drafted tokens", "", [], {}, Table((), []), absent=reason)


def frames(name: str, given: Frames) -> Panel:
    aid = "Each cell is an expert; move the slider to see where experts lay after each step."
    title = "Experts in slots" if given.host is None else "Experts in slots, and in host memory"
    return Panel(name, title, aid, [], {}, Table((), []), frames=given)


def sample_page() -> Page:
    return Page(
        title="speq: a run of tiny-moe",
        facts=[
            ("model", "models/tiny-moe"),
            ("machine", "2 cores of an Intel Xeon, AVX-512, 23 GiB"),
            ("memory budget", "24 MiB"),
            ("commit", "0123456789abcdef0123456789abcdef01234567"),
            ("prompt", "Once upon a time </script><script>alert(1)</script> & <b>so on</b>"),
        ],
        panels=[
            bars(),
            lines(),
            heat(),
            absent(),
            frames("experts", random_frames(8, 16, 12, seed=3)),
            frames("hosted", random_frames(24, 60, 6, seed=4, host=True)),
        ],
        notes=["Times are of the host's clock.", "The first step is the prompt."],
    )


if __name__ == "__main__":
    write_page(sample_page(), Path(sys.argv[1]))
