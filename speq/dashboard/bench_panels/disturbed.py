"""What the notes of several benches say: what failed, and how much of the machine others had."""

from speq.dashboard.bench_panels.rows import Column, Row, label, share

STOLEN = share("processors' time given to other guests", "stolen_share")
FAILURE = label("failure", "failure", needed=False)
# Above this, a time says more of the machine's other guests than of what was measured.
DISTURBED_SHARE = 0.1


def failures(rows: list[Row], of: Column) -> list[str]:
    """A sentence for each row that failed. of: what was measured"""
    return [
        f"{row[of.key]} failed at {row['budget']}: {row['failure']}."
        for row in rows
        if row["failure"]
    ]


def given_away(rows: list[Row], of: str) -> str | None:
    """What the host gave to other guests at most; None where nothing is known of that.

    of  what was measured, as "a system"
    """
    found = [row["stolen_share"] for row in rows if row["stolen_share"] is not None]
    if not found:
        return None
    said = f"The host gave up to {max(found):.0f}% of the processors' time to other guests"
    if max(found) > 100 * DISTURBED_SHARE:
        said += f"; times of such rows say more of them than of {of}"
    return f"{said}."
