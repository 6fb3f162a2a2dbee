"""Panels of benches: what they draw is what the files in bench/results say, value by value."""

import copy
import json
import math
import re
from collections.abc import Callable, Iterator
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import pytest

from speq.dashboard.bench_panels.kinds import KINDS, kind_of
from speq.dashboard.bench_panels.report import bench_facts
from speq.dashboard.panel import COLOURS, Panel
from speq.errors import SpeqError
from tests.helpers.paths import ROOT

RESULTS = sorted((ROOT / "bench" / "results").glob("*.json"))
Row = dict[str, Any]
# (panel, series, place, value): a point of a picture.
Point = tuple[str, str, str, float]
MB, GIB = 1e-6, 2.0**-30


def read(path: Path) -> Row:
    found: Row = json.loads(path.read_text())
    return found


def panels_of(report: Row) -> list[Panel]:
    return kind_of(report["bench"]).panels(report)


def drawn(panels: list[Panel]) -> Iterator[Point]:
    """Every value of every trace."""
    for panel in panels:
        for trace in panel.data:
            if trace["type"] == "heatmap":
                for name, line in zip(trace["y"], trace["z"], strict=True):
                    for place, value in zip(trace.get("x", range(len(line))), line, strict=True):
                        if value is not None:
                            yield panel.name, str(name), str(place), value
                continue
            for place, value in zip(trace["x"], trace["y"], strict=True):
                if value is not None:
                    yield panel.name, trace["name"], str(place), value


def slug(text: str) -> str:
    return re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")


# What each row of a file stands for in its pictures, by the bench.
def systems(row: Row) -> Iterator[tuple[str, str, Any, Any]]:
    figures = {
        "tpot": row["tpot_ms"],
        "ttft": row["ttft_ms"],
        "moved": of(row["moved_bytes_per_token"], MB),
        "hit-rate": of(row["hit_rate"], 100),
        "memory": of(row["peak_bytes"], GIB),
        "of-best": row["of_best"],
    }
    for panel, value in figures.items():
        yield panel, row["system"], row["budget"], value


def formats(row: Row) -> Iterator[tuple[str, str, Any, Any]]:
    yield "tpot", row["format"], row["budget"], row["tpot_ms"]
    yield "moved", row["format"], row["budget"], of(row["moved_bytes_per_token"], MB)


def of(value: Any, scale: float) -> Any:
    return None if value is None else value * scale


def tpot(row: Row) -> Iterator[tuple[str, str, Any, Any]]:
    figures = {
        "tpot": row["tpot_ms"],
        "ttft": row["ttft_ms"],
        "moved": of(row["moved_bytes_per_token"], MB),
        "hit-rate": of(row["hit_rate"], 100),
        "acceptance": of(row["acceptance_rate"], 100),
    }
    variant = f", {row['variant']}" if row.get("variant") else ""
    for panel, value in figures.items():
        yield panel, f"draft length {row['draft_length']}{variant}", row["budget"], value


def equal_memory(row: Row) -> Iterator[tuple[str, str, Any, Any]]:
    series = f"{row['system']}, {row['part']}"
    yield "bytes", series, row["f"] * 100, row["ratio_to_lru_raw"]
    yield "times", series, row["f"] * 100, row["tpot_ms"]


def kernels(row: Row) -> Iterator[tuple[str, str, Any, Any]]:
    share = row["bandwidth_share"] * 100
    yield f"share-{slug(row['shape'])}", row["kernel"], row["T"], share


def fidelity(row: Row) -> Iterator[tuple[str, str, Any, Any]]:
    if row["layer"] == "all":
        return
    layer = row["layer"]
    for expert, count in enumerate(row["activations"]):
        yield "activation", layer, expert, 100 * count / row["pairs"]
    yield "entropy", "entropy of the choice", layer, row["entropy_bits"]
    yield "entropy", "evenly spread", layer, math.log2(len(row["activations"]))
    yield "matches", "hard: same experts, same order, %", layer, 100 * row["hard"]
    yield "matches", "soft: same experts, another order, %", layer, 100 * row["soft"]
    yield "matches", "mismatch: another expert, %", layer, 100 * row["mismatch"]


def coverage(row: Row) -> Iterator[tuple[str, str, Any, Any]]:
    series = f"{row['tokens']} tokens"
    yield "probability", series, row["experts"], row["probability"] * 100
    yield "served", series, row["experts"], row["served"] * 100


def hit_rate(row: Row) -> Iterator[tuple[str, str, Any, Any]]:
    figures = {
        "at-start": of(row["coverage_at_start"], 100),
        "in-time": of(row["coverage_in_time"], 100),
        "beside": of(row["coverage_in_time_beside"], 100),
        "requests": of(row["request_hit_rate"], 100),
        "moved": of(row["moved_bytes_per_token"], MB),
    }
    for panel, value in figures.items():
        yield panel, row["policy"], row["slots"], value


def governor(row: Row) -> Iterator[tuple[str, str, Any, Any]]:
    yield f"tpot-{slug(row['budget'])}", row["kind"], row["draft_length"], row["tpot_ms"]
    if row["draft_length"] == "auto":
        yield "of-best", row["budget"], row["kind"], row["of_best"]
        yield "forecast", row["budget"], row["kind"], of(row["forecast_error"], 100)


def governor_sim(row: Row) -> Iterator[tuple[str, str, Any, Any]]:
    best, plain = row["within_3_percent_of_best"], row["within_3_percent_of_plain"]
    yield "within", "settings", "within 3% of the best draft length, %", best * 100
    yield "within", "settings", "within 3% of no draft, or faster, %", plain * 100


def ablation(row: Row) -> Iterator[tuple[str, str, Any, Any]]:
    without, moved = row["without"], of(row["moved_bytes_per_token"], MB)
    yield "speed", "of the speed with all parts, %", without, of(row["of_full"], 100)
    yield "tpot", "time per output token, ms", without, row["tpot_ms"]
    yield "moved", "bytes moved per token, MB", without, moved


def batch(row: Row) -> Iterator[tuple[str, str, Any, Any]]:
    length, texts, rows = row["draft_length"], row["texts"], row["rows_mean"]
    yield "speed", length, texts, row["tokens_per_s"]
    yield "target-efficiency", length, texts, row["target_efficiency"]
    yield "experts", "asked for", rows, row["distinct"]
    yield "experts", "independent tokens, N(t)", rows, row["independent"]
    if row["modelled"] is not None:
        place = f"{texts} by {length}"
        told = {"yes": "fitted to", "no": "held out"}[row["fitted"]]
        yield "algorithm-1", "measured", place, row["speedup_held"]
        yield "algorithm-1", told, place, row["modelled"]


def drafters(row: Row) -> Iterator[tuple[str, str, Any, Any]]:
    setting = f"{row['named_budget']}temperature {row['temperature']:g}"
    figures = {
        "tpot": row["tpot_ms"],
        "moved": of(row["moved_bytes_per_token"], MB),
        "length": row["accept_length"],
        "tdi": row["tdi"],
    }
    for panel, value in figures.items():
        yield panel, setting, row["drafter"], value
    for across in ("depth", "rank"):
        for at, value in enumerate(row[f"by_{across}"], start=1):
            yield f"{across}-{slug(setting)}", row["drafter"], at, of(value, 100)


def breakdown(row: Row) -> Iterator[tuple[str, str, Any, Any]]:
    where = f"{row['budget']}, {row['system']}"
    yield "shares", "waiting for experts", where, row["waiting"] * 100
    yield "shares", "drafting", where, row["drafting"] * 100
    yield "shares", "verifying", where, row["verifying"] * 100
    yield "shares", "the rest", where, row["rest"] * 100
    yield "tpot", row["system"], row["budget"], row["tpot_ms"]
    yield "moved", row["system"], row["budget"], row["moved_bytes_per_token"] * MB
    yield "hidden", row["system"], row["budget"], of(row["hidden_share"], 100)


def budget(row: Row) -> Iterator[tuple[str, str, Any, Any]]:
    way = row["ranking"]
    if way != "exact":
        bound = "by number" if row["floor"] is None else "by share"
        way = f"{way}, {row['policy']}, residents {row['residents']}, {bound}"
    over: dict[str, dict[str, Any]] = {
        "moved": {
            "nats": row["nats_added"],
            "same": of(row["same_token"], 100),
            "dropped": of(row["dropped_share"], 100),
        },
        "experts": {
            "error": of(row["reconstruction_error"], 100),
            "length": row.get("accept_length"),
        },
        "tpot_of_exact": {"time": row["nats_added"], "rouge": row.get("rouge_l")},
    }
    for across, figures in over.items():
        for panel, value in figures.items():
            if row.get(across) is not None:
                yield panel, way, row[across], value


def memory(row: Row) -> Iterator[tuple[str, str, Any, Any]]:
    for part in ("draft", "target", "shared"):
        value = row[f"{part}_bytes"] * GIB
        yield f"memory-{slug(row['model'])}-{row['experts']}", part, row["scenario"], value


def codec(row: Row) -> Iterator[tuple[str, str, Any, Any]]:
    yield "bits", "as records", row["codec"], row["bits_per_weight"]
    yield "bits", "of a slot", row["codec"], row["slot_bits_per_weight"]
    yield "bits", "entropy", row["codec"], row["entropy_bits"]
    yield "speeds", "encoding", row["codec"], row["encode_gb_per_s"]
    yield "speeds", "decoding", row["codec"], row["decode_gb_per_s"]
    yield "speeds", "copying", row["codec"], row["copy_gb_per_s"]


def step(row: Row) -> Iterator[tuple[str, str, Any, Any]]:
    if row["part"] != "all":
        yield "parts", row["part"], row["pass"], row["time_ms"]


def transfer(row: Row) -> Iterator[tuple[str, str, Any, Any]]:
    size = {262144: "256 KiB", 16777216: "16 MiB", 17301504: "16.5 MiB"}[row["request_bytes"]]
    panel, series = f"speed-{slug(row['store'])}", f"{row['kind']}, {size}"
    yield panel, series, row["readers"], row["gb_per_s"]


def prefill(row: Row) -> Iterator[tuple[str, str, Any, Any]]:
    yield "ttft", "time to first token", row["budget"], row["ttft_s"]
    yield "ttft", "the link for the same bytes", row["budget"], row["link_s"]
    yield "ttft", "with all experts in memory", row["budget"], row["resident_s"]
    yield "moved", "moved", row["budget"], row["moved_bytes"] * GIB
    yield "moved", "of the experts it uses", row["budget"], row["distinct_bytes"] * GIB


def schedule(row: Row) -> Iterator[tuple[str, str, Any, Any]]:
    memory, where = f"{row['fraction'] * 100:g}", f"{row['fraction']:.0%}, {row['system']}"
    yield "tpot", "time", where, row["tpot_ms"]
    yield "tpot", "floor", where, row["floor_ms"]
    yield "moved", row["system"], memory, row["moved_bytes_per_token"] * MB
    yield "stall", row["system"], memory, row["stall_share"] * 100
    yield "hit-rate", row["system"], memory, row["hit_rate"] * 100


def check(row: Row) -> Iterator[tuple[str, str, Any, Any]]:
    text = row["number"]
    yield "agreement", "exact: same token", text, row["agreement"] * 100
    yield "agreement", "draft: same token", text, row["draft_agreement"] * 100
    yield "agreement", "draft: route recall", text, row["route_recall"] * 100
    yield "difference", "largest difference of a logit", text, row["max_logit_difference"]


ROWS: dict[str, Callable[[Row], Iterator[tuple[str, str, Any, Any]]]] = {
    "ablation": ablation,
    "batch": batch,
    "breakdown": breakdown,
    "budget": budget,
    "check": check,
    "codec": codec,
    "coverage": coverage,
    "drafters": drafters,
    "equal-memory": equal_memory,
    "fidelity": fidelity,
    "formats": formats,
    "governor": governor,
    "governor-sim": governor_sim,
    "hit-rate": hit_rate,
    "kernels": kernels,
    "memory": memory,
    "prefill": prefill,
    "schedule": schedule,
    "step": step,
    "tpot": tpot,
    "tpot-systems": systems,
    "transfer": transfer,
}


def beside_rows(report: Row) -> Iterator[tuple[str, str, Any, Any]]:
    """What stands in other lists than the rows."""
    if report["bench"] == "fidelity":
        names = {
            "forced_recall": "route recall, teacher-forced, %",
            "recall": "route recall, all drafted tokens",
            "accepted_recall": "route recall, accepted tokens, %",
            "accepted": "token accepted, %",
        }
        for row in report["positions"]:
            for key, name in names.items():
                yield "draft", name, row["position"], of(row[key], 100)
    if report["bench"] == "formats":
        sizes = {row["format"]: row["experts_bytes"] for row in report["rows"]}
        for name, experts_bytes in sizes.items():
            yield "experts", "all experts", name, experts_bytes * GIB
    if report["bench"] == "coverage":
        for row in report["unique"]:
            yield "unique", row["shape"], row["rows"], row["distinct"]
            yield "unique", "independent choice", row["rows"], row["independent"]
            yield "unique", "as many tokens of the text", row["rows"], row["of_text"]
        for row in report["layers"][:-1]:
            yield "concentration", "concentration", row["layer"], row["concentration"]
            pairs = combinations(range(len(row["order"])), 2)
            for pair, tokens in zip(pairs, row["coactivation"], strict=True):
                for one, other in permutations(pair):
                    yield "together", one, other, tokens / row["expected"]
    if report["bench"] == "equal-memory":
        for row in report["codecs"]:
            yield "codecs", "bits a weight", row["codec"], row["bits_per_weight"]
        for row in report["aims"]:
            place = f"{row['part']}, {row['f']:.0%}: {row['aim']}"
            yield "aims", "found", place, row["found"]
            yield "aims", "at most", place, row["limit"]


def expected(report: Row) -> Iterator[Point]:
    of_row = ROWS[report["bench"]]
    rows = [row | {"number": number} for number, row in enumerate(report["rows"], start=1)]
    if len({row.get("variant") for row in rows}) == 1:  # what all have in common is not named
        rows = [row | {"variant": ""} for row in rows]
    several = len({row.get("budget") for row in rows}) > 1
    rows = [row | {"named_budget": f"{row['budget']}, " if several else ""} for row in rows]
    points = [point for row in rows for point in of_row(row)]
    for panel, series, place, value in [*points, *beside_rows(report)]:
        if value is not None:
            yield panel, str(series), str(place), value


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_pictures_show_the_rows(path: Path) -> None:
    report = read(path)
    found, wanted = sorted(drawn(panels_of(report))), sorted(expected(report))
    assert [point[:3] for point in found] == [point[:3] for point in wanted]
    assert [point[3] for point in found] == pytest.approx([point[3] for point in wanted])
    assert len(found) >= 2


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_tables_hold_what_is_drawn(path: Path) -> None:
    for panel in panels_of(read(path)):
        cells = {cell for row in panel.table.rows for cell in row}
        assert {point[3] for point in drawn([panel])} <= cells, panel.name
        assert all(len(row) == len(panel.table.columns) for row in panel.table.rows)


def colours(value: Any) -> Iterator[str]:
    """Names of a theme's colours in a figure."""
    if isinstance(value, str) and value.startswith("@"):
        yield value[1:]
    elif isinstance(value, dict):
        for each in value.values():
            yield from colours(each)
    elif isinstance(value, list):
        for each in value:
            yield from colours(each)


def mark_of(trace: Row) -> tuple[Any, ...]:
    """What tells a series from others without its colour."""
    marker = trace["marker"]
    if trace["type"] == "bar":
        return (marker["pattern"]["shape"], marker["pattern"]["solidity"])
    return (marker["symbol"], trace.get("line", {}).get("dash"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_panel_can_be_read(path: Path) -> None:
    panels = panels_of(read(path))
    for panel in panels:
        assert re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", panel.name)
        assert panel.title and panel.aid.endswith(".") and ". " not in panel.aid
        assert panel.table.columns or panel.absent
        assert bool(panel.data) != bool(panel.absent)
        assert set(colours([panel.data, panel.layout])) <= set(COLOURS)
        axes = [axis for name, axis in panel.layout.items() if "axis" in name]
        assert len(axes) == (2 if panel.data else 0)
        assert all(axis["title"]["text"] for axis in axes)
        marks = [mark_of(trace) for trace in panel.data if trace["type"] != "heatmap"]
        assert len(set(marks)) == len(marks), panel.name


def test_most_panels_of_the_files_have_a_picture() -> None:
    absent = {
        (path.stem, panel.name): panel.absent
        for path in RESULTS
        for panel in panels_of(read(path))
        if panel.absent
    }
    assert set(absent.values()) <= {
        "The file has no figures of this kind: drafted tokens accepted, %.",
        "The file has no figures of this kind: token diversity index.",
        "The file keeps no single settings; --verdicts keeps them.",
        "Algorithm 1 was not fitted.",
    }
    for path in RESULTS:
        report = read(path)
        if report["bench"] == "batch":
            not_fitted = "not_fitted" in report["algorithm"]
            assert ((path.stem, "algorithm-1") in absent) == not_fitted


# What a picture says beside its points.


def bars(panel: Panel) -> dict[tuple[str, str], tuple[float, float]]:
    """Ends of bars of error, by series and place."""
    found = {}
    for trace in panel.data:
        ends = trace["error_y"]
        assert (ends["type"], ends["symmetric"]) == ("data", False)
        for at, place in enumerate(trace["x"]):
            value = trace["y"][at]
            if value is not None:
                low, high = value - ends["arrayminus"][at], value + ends["array"][at]
                found[trace["name"], place] = (low, high)
    return found


def test_error_bars_of_systems_go_from_the_fastest_round_to_the_slowest() -> None:
    report = read(ROOT / "bench/results/systems-tiny-moe-widened-intel-xeon-2-cores.json")
    panel = panels_of(report)[0]
    wanted = {
        (row["system"], row["budget"]): (min(row["round_tpot_ms"]), max(row["round_tpot_ms"]))
        for row in report["rows"]
        if row["tpot_ms"] is not None
    }
    found = bars(panel)
    assert set(found) == set(wanted) and len(wanted) == 20  # one failed
    for each, ends in wanted.items():
        assert found[each] == pytest.approx(ends)
    assert "fastest round's median" in panel.aid


def test_error_bars_of_the_governor_go_from_least_to_most() -> None:
    report = read(ROOT / "bench/results/governor-tiny-moe-widened-raw-amd-epyc-2-cores.json")
    times = [panel for panel in panels_of(report) if panel.name.startswith("tpot")]
    budgets = list(dict.fromkeys(row["budget"] for row in report["rows"]))
    assert len(times) == len(budgets)
    for panel, budget in zip(times, budgets, strict=True):
        wanted = {
            (row["kind"], row["draft_length"]): (row["tpot_least_ms"], row["tpot_most_ms"])
            for row in report["rows"]
            if row["budget"] == budget
        }
        for each, ends in bars(panel).items():
            assert ends == pytest.approx(wanted[each])


SYSTEM_ROW = {"budget": "1GiB", "system": "speq", "tpot_ms": 10.0, "round_tpot_ms": [9.0, 12.0]}


def contest(*changes: Row, **more: Any) -> Row:
    rows = [SYSTEM_ROW | change for change in changes]
    return {"bench": "tpot-systems", "model": "m", "settings": {}, "rows": rows} | more


@pytest.mark.parametrize(("slowest", "scale"), [(99.0, None), (100.0, "log")])
def test_times_far_apart_have_a_scale_of_powers(slowest: float, scale: str | None) -> None:
    report = contest({}, {"system": "other", "tpot_ms": slowest, "round_tpot_ms": None})
    panel = panels_of(report)[0]
    assert panel.layout["yaxis"].get("type") == scale
    said = "time per output token, ms"
    title = said if scale is None else f"{said} (log scale)"
    assert panel.layout["yaxis"]["title"]["text"] == title
    assert panel.layout["yaxis"].get("rangemode") == ("tozero" if scale is None else None)
    # Rounds that are not known have no bar.
    assert bars(panel)["other", "1GiB"] == (slowest, slowest)


def test_a_system_that_failed_has_no_point_and_a_note() -> None:
    report = contest(
        {"stolen_share": 0.25, "of_best": 1.0},
        {"system": "other", "tpot_ms": None, "round_tpot_ms": None, "failure": "no memory"},
        {"system": "third", "cut": True, "tpot_ms": 20.0, "of_best": 2.0},
    )
    panels = {panel.name: panel for panel in panels_of(report)}
    first, third = panels["tpot"].data
    assert (first["y"], third["y"]) == ([10.0], [20.0])
    # Each looks as it does in panels of all systems.
    assert (first["marker"]["color"], third["marker"]["color"]) == ("@1", "@3")
    assert third["marker"]["symbol"] == "diamond"
    assert panels["of-best"].data[0]["z"] == [[1.0], [None], [2.0]]
    assert panels["of-best"].data[0]["y"] == ["speq", "other", "third"]
    assert kind_of("tpot-systems").notes(report) == [
        "other failed at 1GiB: no memory.",
        "Texts of third at 1GiB were ended before they were complete.",
        "The host gave up to 25% of the processors' time to other guests; times of such rows say "
        "more of them than of a system.",
    ]


def test_a_format_that_failed_has_no_point_and_a_note() -> None:
    row = {"budget": "1GiB", "format": "bf16", "tpot_ms": 8.0, "round_tpot_ms": [7.0, 9.0]}
    failed = {"format": "fp8", "tpot_ms": None, "round_tpot_ms": None, "failure": "no memory"}
    rows = [row | {"stolen_share": 0.3}, row | failed]
    report = {"bench": "formats", "model": "random", "settings": {}, "rows": rows}
    panel = panels_of(report)[0]
    assert [trace["name"] for trace in panel.data] == ["bf16"]
    assert bars(panel) == {("bf16", "1GiB"): (7.0, 9.0)}
    assert kind_of("formats").notes(report) == [
        "fp8 failed at 1GiB: no memory.",
        "The host gave up to 30% of the processors' time to other guests; times of such rows say "
        "more of them than of a format.",
    ]


def test_an_older_file_says_what_it_lacks() -> None:
    report = contest({}, {"system": "other"})
    panels = {panel.name: panel for panel in panels_of(report)}
    assert panels["hit-rate"].absent == "The file has no figures of this kind: hit rate, %."
    assert panels["of-best"].absent == "The file has no times to compare."
    assert panels["hit-rate"].data == []
    notes = kind_of("tpot-systems").notes(report)
    assert notes == ["The file does not say what the host gave to other guests meanwhile."]


def test_variants_and_neighbours_are_series_of_their_own() -> None:
    row = {"budget": "1GiB", "draft_length": "4", "neighbours": 0, "variant": "", "tpot_ms": 1.0}
    rows = [row, row | {"neighbours": 1, "tpot_ms": 2.0}, row | {"variant": "codec=raw"}]
    report = {"bench": "tpot", "model": "m", "settings": {}, "rows": rows}
    names = [trace["name"] for trace in panels_of(report)[0].data]
    assert names == [
        "draft length 4, 0 neighbours, as it is",
        "draft length 4, 1 neighbours, as it is",
        "draft length 4, 0 neighbours, codec=raw",
    ]


def test_acceptance_that_was_set_is_told() -> None:
    row = {"budget": "1GiB", "draft_length": "4", "tpot_ms": 1.0, "synthetic_acceptance": 0.9}
    report = {"bench": "tpot", "model": "m", "settings": {}, "rows": [row]}
    assert kind_of("tpot").notes(report) == [
        "WHAT-IF: acceptance was set, and is not the draft's own."
    ]


def test_what_an_ablation_could_not_leave_out_is_a_note() -> None:
    path = ROOT / "bench/results/ablation-tiny-moe-widened-intel-xeon-2-cores.json"
    notes = kind_of("ablation").notes(read(path))
    said = "nothing was measured: no draft of INT4 experts is held at this budget."
    assert notes == [f"Without fused kernel {said}", f"Without both {said}"]


def test_missed_aims_are_notes() -> None:
    path = ROOT / "bench/results/equal-memory-tiny-moe-widened-amd-epyc-2-cores.json"
    report = read(path)
    missed = [aim for aim in report["aims"] if not aim["met"]]
    notes = kind_of("equal-memory").notes(report)
    assert len(notes) == len(missed)
    for note, aim in zip(notes, missed, strict=True):
        assert note.startswith(f"Missed in the {aim['part']} at {aim['f']:.0%}: {aim['aim']} is")


DRAFTER_ROW = {
    "budget": "1GiB",
    "temperature": 1.0,
    "drafter": "cached",
    "tpot_ms": 9.0,
    "by_depth": [0.5, None],
    "by_rank": [0.25],
}


def drafters_report(*changes: Row, **more: Any) -> Row:
    rows = [DRAFTER_ROW | change for change in changes]
    return {"bench": "drafters", "model": "m", "settings": {}, "rows": rows} | more


def test_depths_that_were_not_tried_have_no_points() -> None:
    assert {point[:3]: point[3] for point in drawn(panels_of(drafters_report({})))} == {
        ("tpot", "temperature 1", "cached"): 9.0,
        ("depth-temperature-1", "cached", "1"): 50.0,
        ("rank-temperature-1", "cached", "1"): 25.0,
    }


def test_drafters_look_the_same_at_all_settings() -> None:
    none: Row = {"drafter": "none", "by_depth": [], "by_rank": []}
    report = drafters_report(
        none, {"drafter": "ngram"}, {}, none | {"budget": "2GiB"}, {"budget": "2GiB"}
    )
    panels = {panel.name: panel for panel in panels_of(report)}
    first, second = panels["depth-1gib-temperature-1"], panels["depth-2gib-temperature-1"]
    assert [trace["name"] for trace in first.data] == ["ngram", "cached"]
    assert second.data == first.data[1:]
    assert second.table.rows == [["cached", 50.0, None]]


def test_a_setting_without_drafts_says_so() -> None:
    report = drafters_report({"by_depth": [], "by_rank": []})
    absent = {panel.name: panel.absent for panel in panels_of(report)}
    said = "Nothing was drafted at this setting."
    assert absent["depth-temperature-1"] == absent["rank-temperature-1"] == said


def test_drafters_that_were_not_measured_are_notes() -> None:
    report = read(ROOT / "bench/results/drafters-tiny-moe-amd-epyc-2-cores.json")
    assert kind_of("drafters").notes(report) == [
        "Not measured: int4-tree, 18MiB: int4 does not fit the budget; give a larger one."
    ]
    assert kind_of("drafters").notes(drafters_report({})) == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"temperature": "hot"}, "temperature is 'hot'; it must be a number"),
        ({"temperature": None}, "temperature is missing; it must be a number"),
        ({"by_depth": None}, "by_depth is missing; it must be a list of shares"),
        ({"by_depth": {}}, "by_depth is {}; it must be a list of shares"),
        ({"by_rank": [1.5]}, "by_rank is [1.5]; it must be a list of shares"),
        ({"by_rank": [True]}, "by_rank is [True]; it must be a list of shares"),
    ],
)
def test_damage_of_drafters_is_one_sentence(change: Row, sentence: str) -> None:
    with pytest.raises(SpeqError) as caught:
        panels_of(drafters_report({}, change))
    assert str(caught.value) == f"rows[1].{sentence}: measure again"


@pytest.mark.parametrize(
    ("left_out", "sentence"),
    [
        ([], "left_out is []; it must be an object: measure again"),
        ({"int4": 3}, "left_out.int4 is 3; it must be a reason: measure again"),
    ],
)
def test_damage_of_what_was_not_measured_is_one_sentence(left_out: Any, sentence: str) -> None:
    with pytest.raises(SpeqError) as caught:
        kind_of("drafters").notes(drafters_report({}, left_out=left_out))
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"rows_mean": None}, "rows[0].rows_mean is missing; it must be a number: measure again"),
        ({"texts": "two"}, "rows[0].texts is 'two'; it must be a number: measure again"),
    ],
)
def test_damage_of_batches_is_one_sentence(change: Row, sentence: str) -> None:
    report = read(ROOT / "bench/results/batch-tiny-moe-widened-amd-epyc-2-cores.json")
    report["rows"][0] |= change
    with pytest.raises(SpeqError) as caught:
        panels_of(report)
    assert str(caught.value) == sentence


def test_verdicts_stand_in_the_order_of_their_ratios() -> None:
    path = ROOT / "bench/results/governor-sim-tiny-moe-amd-epyc-2-cores.json"
    verdicts = [{"seed": at, "of_best": 2.0 - at, "of_plain": at / 2} for at in range(3)]
    panel = panels_of(read(path) | {"verdicts": verdicts})[1]
    assert [trace["y"] for trace in panel.data] == [[0.0, 1.0, 2.0], [0.0, 0.5, 1.0]]
    assert panel.data[0]["x"] == [1, 2, 3]


def test_more_series_than_patterns_still_differ() -> None:
    report = contest(*({"system": f"s{at}", "hit_rate": 0.5} for at in range(12)))
    panels = {panel.name: panel for panel in panels_of(report)}
    for name in ("tpot", "hit-rate"):
        assert len({mark_of(trace) for trace in panels[name].data}) == 12


def test_more_lines_than_symbols_still_differ() -> None:
    report = drafters_report(*({"drafter": f"head {at}"} for at in range(24)))
    panels = {panel.name: panel for panel in panels_of(report)}
    assert len({mark_of(trace) for trace in panels["depth-temperature-1"].data}) == 24


def test_other_benches_have_a_table_without_a_picture() -> None:
    report = {
        "bench": "new",
        "model": "m",
        "settings": {},
        "rows": [{"a": 1, "b": [2]}, {"c": "x"}],
    }
    (panel,) = panels_of(report)
    assert panel.absent == "Nothing is drawn of this bench; its rows are in the table."
    assert panel.table.columns == ("a", "b", "c")
    assert panel.table.rows == [[1, "[2]", None], [None, None, "x"]]


# Benches of which the repository keeps no results.
OTHERS: dict[str, tuple[list[Row], dict[str, Any]]] = {
    "gpu-link": (
        [
            {"what": "to GPU", "size_bytes": 1 << 20, "time_us": 50.0, "gb_per_s": 21.0},
            {"what": "launch", "size_bytes": None, "time_us": 4.0, "gb_per_s": None},
        ],
        {("speed", "to GPU", "1 MiB"): 21.0, ("calls", "time", "launch"): 4.0},
    ),
    "locality": (
        [{"tokens": 5, "slots": 8, "lru": 3.0, "lookahead": 2.0, "by_curve": 2.5}],
        {
            ("misses", "LRU, replayed", "8"): 3.0,
            ("misses", "lookahead, replayed", "8"): 2.0,
            ("misses", "expected by the curve", "8"): 2.5,
        },
    ),
    "soak": (
        [{"at_s": 1.5, "tokens": 64, "tpot_ms": 7.0, "process_bytes": 1 << 31}],
        {
            ("memory", "process, GiB", "1.5"): 2.0,
            ("tpot", "time per output token, ms", "1.5"): 7.0,
        },
    ),
    "serve": (
        [{"rate": 2.0, "whole": 5, "tokens_per_s": 40.0, "ttft_p50_ms": 9.0, "ttft_p95_ms": 12.0}],
        {
            ("ttft", "p50", "2"): 9.0,
            ("ttft", "p95", "2"): 12.0,
            ("speed", "tokens per second", "2"): 40.0,
            ("outcomes", "answered whole", "2"): 5.0,
        },
    ),
    "paper-systems": (
        [{"model": "mixtral", "budget": "16GB", "system": "sc", "tpot_ms": 90.0}],
        {("tpot", "sc", "mixtral, 16GB"): 90.0},
    ),
    "dense kernels": (
        [{"shape": "64x32", "kernel": "raw", "T": 1, "bandwidth_share": 0.5}],
        {("share-64x32", "raw", "1"): 50.0},
    ),
}


@pytest.mark.parametrize("bench", OTHERS)
def test_other_pictures_show_their_rows(bench: str) -> None:
    rows, wanted = OTHERS[bench]
    report = {"bench": bench, "model": "m", "settings": {}, "rows": rows}
    assert {point[:3]: point[3] for point in drawn(panels_of(report))} == wanted


def test_machine_code_has_both_times() -> None:
    rows = [{"shape": "olmoe", "kernel": "k", "card": "H100", "issue_s": 2e-6, "bytes_s": 3e-6}]
    report = {"bench": "kernels", "model": "m", "settings": {"sass": True}, "rows": rows}
    found = {point[:3]: point[3] for point in drawn(panels_of(report))}
    assert found == {
        ("issue-olmoe", "issuing instructions", "k, H100"): pytest.approx(2.0),
        ("issue-olmoe", "reading bytes", "k, H100"): pytest.approx(3.0),
    }


def test_every_kind_is_tried_here() -> None:
    assert set(KINDS) == {*ROWS, *OTHERS}
    assert {read(path)["bench"] for path in RESULTS} <= set(ROWS)


# Damage.


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"rows": None}, "rows is missing; it must be a list of objects: measure again"),
        ({"rows": "all"}, "rows is 'all'; it must be a list of objects: measure again"),
        ({"rows": [1]}, "rows is [1]; it must be a list of objects: measure again"),
        ({"rows": []}, "rows is an empty list, and there is nothing to draw; measure again"),
        (
            {"rows": [SYSTEM_ROW, {"budget": "1GiB"}]},
            "rows[1].system is missing; it must be a name or a number: measure again",
        ),
        (
            {"rows": [SYSTEM_ROW | {"tpot_ms": "fast"}]},
            "rows[0].tpot_ms is 'fast'; it must be a number: measure again",
        ),
        (
            {"rows": [SYSTEM_ROW | {"tpot_ms": True}]},
            "rows[0].tpot_ms is True; it must be a number: measure again",
        ),
        (
            {"rows": [SYSTEM_ROW | {"tpot_ms": math.nan}]},
            "rows[0].tpot_ms is nan; it must be a number: measure again",
        ),
        (
            {"rows": [SYSTEM_ROW | {"hit_rate": 10**301}]},
            f"rows[0].hit_rate is 1{'0' * 59}...; it must be a number: measure again",
        ),
        (
            {"rows": [SYSTEM_ROW | {"budget": ["1GiB"]}]},
            "rows[0].budget is ['1GiB']; it must be a name or a number: measure again",
        ),
        (
            {"rows": [SYSTEM_ROW | {"round_tpot_ms": [1, "x"]}]},
            "rows[0].round_tpot_ms is [1, 'x']; it must be numbers: measure again",
        ),
        (
            {"rows": [SYSTEM_ROW | {"by_kind": [1]}]},
            "rows[0].by_kind is [1]; it must be an object: measure again",
        ),
    ],
)
def test_damage_is_one_sentence(change: Row, sentence: str) -> None:
    with pytest.raises(SpeqError) as caught:
        panels_of(contest({}) | change)
    assert str(caught.value) == sentence


ONE_OF_EACH = {read(path)["bench"]: path for path in RESULTS}
BROKEN = ("text", [], {}, None, True, -1, 0, math.inf, [[1]], {"a": {}})


@pytest.mark.parametrize("bench", ONE_OF_EACH)
def test_whatever_stands_in_a_file_nothing_but_an_error_of_ours_comes_of_it(bench: str) -> None:
    report = read(ONE_OF_EACH[bench])
    lists = [name for name, value in report.items() if isinstance(value, list) and name != "model"]
    few = report | {name: report[name][:3] for name in lists}
    refused = 0
    for name in few:
        places: list[tuple[Any, ...]] = [(name,)]
        if name in lists and few[name] and isinstance(few[name][0], dict):
            places += [(name, 0), *((name, 0, key) for key in few[name][0])]
        for place in places:
            for value in BROKEN:
                damaged = copy.deepcopy(few)
                inner: Any = damaged
                for each in place[:-1]:
                    inner = inner[each]
                inner[place[-1]] = value
                refused += is_refused(damaged)
    assert refused > len(BROKEN)


def is_refused(report: Row) -> bool:
    """Whether it is, in one sentence. Its bench is a name: nothing else is asked for a kind."""
    if not isinstance(report["bench"], str):
        return False
    kind = kind_of(report["bench"])
    try:
        bench_facts(report)
        panels = kind.panels(report)
        notes = kind.notes(report)
    except SpeqError as error:
        assert "\n" not in str(error)
        return True
    assert all(isinstance(note, str) for note in notes)
    json.dumps([panel.to_dict() for panel in panels], allow_nan=False)
    return False
