"""A run's record, made by hand."""

import base64
from dataclasses import replace
from typing import Any

from speq.dashboard.run_record import Residency, RunRecord, StepRecord, TokenRecord

MIB = 1 << 20
LAYERS, EXPERTS = 2, 5


def bits(*places: int) -> str:
    """Of 2 layers of 5 experts: ten bits, number 5 is expert 0 of layer 1."""
    whole = sum(1 << place for place in places)
    return base64.b64encode(whole.to_bytes(2, "little")).decode()


def figures(**changed: float) -> dict[str, float]:
    names = (
        *("draft_length", "accepted", "emitted", "requests", "hits", "late", "used", "wasted"),
        *("layers", "covered", "moved", "moved_bytes", "ahead_bytes", "rejected_bytes"),
        *("read_bytes", "named", "choices", "draft_ms", "verify_ms", "transfer_ms", "link_ms"),
        *("exposed_ms", "stall_ms", "late_ms"),
    )
    return dict.fromkeys(names, 0) | changed


PROMPT = StepRecord(
    number=0,
    phase="prefill",
    start_ms=10.0,
    end_ms=110.0,
    figures=figures(emitted=1, moved_bytes=4 * MIB, link_ms=60.0, exposed_ms=20.0, stall_ms=25.0),
    ground="",
    reason="",
    forecast=None,
    positions=[],
    transfers=[[10.0, 70.0, 4 * MIB]],
    stalls=[[10.0, 30.0], [75.0, 80.0]],
    layers=[[3, 0, 0, 0, 0, 20.0], [3, 1, 0, 0, 0, 5.0]],
)
DRAFTED = StepRecord(
    number=1,
    phase="decode",
    start_ms=120.0,
    end_ms=220.0,
    figures=figures(
        draft_length=2,
        accepted=1,
        emitted=2,
        requests=8,
        hits=5,
        late=2,
        used=3,
        wasted=1,
        moved_bytes=3 * MIB,
        ahead_bytes=2 * MIB,
        rejected_bytes=MIB,
        read_bytes=3 * MIB + 4096,
        draft_ms=30.0,
        verify_ms=65.0,
        transfer_ms=55.0,
        link_ms=40.0,
        exposed_ms=10.0,
        stall_ms=15.0,
        late_ms=5.0,
    ),
    ground="best",
    reason="as short as can be",
    forecast={
        "draft_length": 2,
        "serial_ms": 120.0,
        "overlapped_ms": 80.0,
        "step_ms": 90.0,
        "tokens": 2.2,
    },
    positions=[(True, 3, 4), (True, 2, 4), (False, 0, 0)],
    transfers=[[125.0, 150.0, 2 * MIB], [170.0, 185.0, MIB]],
    stalls=[[160.0, 165.0], [175.0, 185.0]],
    layers=[[4, 3, 1, 2, 0, 5.0], [4, 2, 1, 1, 1, 10.0]],
)
PLAIN = StepRecord(
    number=2,
    phase="decode",
    start_ms=220.0,
    end_ms=270.0,
    figures=figures(
        emitted=1,
        requests=4,
        hits=3,
        moved_bytes=MIB,
        read_bytes=MIB,
        verify_ms=48.0,
        transfer_ms=8.0,
        link_ms=8.0,
        exposed_ms=8.0,
        stall_ms=8.0,
    ),
    ground="probe",
    reason="plain decoding is measured",
    forecast={
        "draft_length": 0,
        "serial_ms": 60.0,
        "overlapped_ms": 50.0,
        "step_ms": 55.0,
        "tokens": 1.0,
    },
    positions=[(True, 0, 0)],
    transfers=[[230.0, 238.0, MIB]],
    stalls=[[230.0, 238.0]],
    layers=[[2, 2, 0, 0, 0, 0.0], [2, 1, 0, 0, 0, 8.0]],
)
RUN = RunRecord(
    model="by-hand",
    version="0.1.0",
    commit=None,
    machine={"processor": "abacus", "cores": 2},
    device="cpu",
    link="disk",
    options={"memory_budget": 40 * MIB},
    sampling={"max_new_tokens": 4},
    prompt_tokens=7,
    layers=LAYERS,
    experts=EXPERTS,
    memory={
        "budget": 40 * MIB,
        "non_expert_weights": 10 * MIB,
        "draft": 5 * MIB,
        "kv_cache": MIB,
        "read_buffers": 0,
        "workspace": 2 * MIB,
        "slots": 20 * MIB,
        "unused": 2 * MIB,
    },
    planned="a draft is expected to pay",
    expected={
        "draft_length": 2,
        "tpot_ms": 40.0,
        "moved_bytes_per_token": 2 * MIB,
        "tokens": 2.0,
        "draft_ms": 25.0,
        "verify_ms": 50.0,
        "transfer_ms": 30.0,
    },
    stats={
        "new_tokens": 4,
        "tpot_ms": 50.0,
        "ttft_ms": 110.0,
        "hit_rate": 8 / 12,
        "stall_s": 0.023,
        "moved_bytes_per_token": 4 * MIB / 3,
        "hidden_share": 30 / 48,
        "acceptance_rate": 0.5,
        "accept_length_mean": 1.5,
        "draft_length_mean": 1.0,
        "codec": "raw",
        "dense": "raw",
    },
    tokens=[
        TokenRecord(5, "a", 0, "prompt", 25.0),
        TokenRecord(6, "b", 1, "accepted", 15.0),
        TokenRecord(7, "c", 1, "exact", 15.0),
        TokenRecord(8, "d", 2, "exact", 8.0),
    ],
    steps=[PROMPT, DRAFTED, PLAIN],
    left_out=0,
    residency=Residency(
        [0, 1, 2],
        [bits(0, 1, 5), bits(0, 2, 5, 6), bits(0, 2, 6, 9)],
        [bits(), bits(0, 2, 6, 7), bits(0, 9)],
    ),
    estimates=[
        {
            "draft_length": 2,
            "tokens": 2.0,
            "draft_s": 0.03,
            "verify_s": 0.05,
            "new_s": 0.04,
            "moved_bytes": 4.0 * MIB,
            "step_s": 0.1,
            "compute_s": 0.08,
        },
        {
            "draft_length": 0,
            "tokens": 1.0,
            "draft_s": 0.0,
            "verify_s": 0.04,
            "new_s": 0.01,
            "moved_bytes": 0.0,
            "step_s": 0.05,
            "compute_s": 0.04,
        },
    ],
)


def changed(**values: Any) -> RunRecord:
    """`RUN` with other values."""
    return replace(RUN, **values)
