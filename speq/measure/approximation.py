"""The warning that a run within an expert budget prints."""

from typing import Any


def approximate(budget: dict[str, Any]) -> str:
    """Make the warning from BUDGET_FIGURES."""
    dropped = f"{budget['dropped_share']:.1%}"
    parts = [f"APPROXIMATE: {dropped} of the routing weight was dropped"]
    if budget["audited"]:
        low, high = budget["differing_interval"]
        parts.append(
            f"{budget['differing']} of {budget['audited']} audited tokens would have differed "
            f"({low:.1%} to {high:.1%})"
        )
        nats = f"{budget['nats']:.3f} nats a token"
        if budget["nats_interval"] is not None:
            nats += " ({:.3f} to {:.3f})".format(*budget["nats_interval"])
        parts.append(nats)
    else:
        parts.append("no verification was audited")
    return "; ".join(parts)
