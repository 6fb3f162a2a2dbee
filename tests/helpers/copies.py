"""How runs of published models hold experts, whatever is faster on this machine."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from speq.experts.packed_copy import CODEC as COPY_CODEC
from speq.planning import candidates, choose_plan
from speq.planning.cost.residency_plan import ResidencyPlan
from speq.planning.model_spec import ModelSpec

FORMS = {True: COPY_CODEC, False: "raw"}


@contextmanager
def first_runs_hold(records: bool) -> Iterator[None]:
    """Let them hold records, or words as published."""

    def only(model_spec: ModelSpec, *options: Any) -> list[ResidencyPlan]:
        found = candidates.open_candidates(model_spec, *options)
        return [
            way for way in found if (way.encoded, way.codec) == (records, FORMS[records])
        ] or found

    with mock.patch.object(choose_plan, "open_candidates", only):
        yield
