"""How runs that write a packed copy hold experts, whatever is faster on this machine."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

from speq.planning import choose_plan
from speq.planning.fitting import FittingPlan
from speq.planning.model_spec import ModelSpec

WEIGHED = choose_plan.drop_needless_copies


@contextmanager
def first_runs_hold(records: bool) -> Iterator[None]:
    """Let them hold records, or words as published."""

    def only(model_spec: ModelSpec, fitting: Sequence[FittingPlan]) -> list[FittingPlan]:
        whole = WEIGHED(model_spec, fitting)
        return [each for each in whole if each[0].encoded == records] or whole

    with mock.patch.object(choose_plan, "drop_needless_copies", only):
        yield
