"""Names of the link that loads experts."""

from speq.dashboard.run_record import RunRecord

NAMES = {"disk": "the disk", "PCIe": "PCIe"}
ACTS = {"disk": "reading from the disk", "PCIe": "copying over PCIe"}


def act_of(run: RunRecord) -> str:
    return ACTS[run.link]
