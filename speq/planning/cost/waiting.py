"""Expects how long a pass waits for experts that it misses.

A layer asks for its missing experts when its router has chosen them. Those in slots are computed
while the others come one after another, and the last one is computed when it has come. Whether an
expert is missing does not depend on the others.
"""

from math import exp, lgamma, log, log1p

# Of what fetching on demand does not hide, prefetching leaves so much. By what the next layer's
# router says early: 0.5 to 0.8 in replays of recorded routes, with links and processors of several
# speeds. Along a draft: of the widened model (bench/results/schedule-*.json), 0.4 in place of 0.75.
ROUTER_LEAVES, DRAFT_LEAVES = 0.7, 0.53


def waiting_s(asked: float, missing: float, expert_s: float, transfer_s: float) -> float:
    """Seconds that a layer is expected to wait, beyond those that its experts compute.

    asked       experts of the layer; missing: share of them that are in no slot
    expert_s    of computing one; transfer_s: of the link for one
    """
    count = max(round(asked), 1)
    if missing <= 0:
        return 0.0
    if missing >= 1:
        return max(count * transfer_s - (count - 1) * expert_s, 0.0)
    total = 0.0
    for late in range(1, count + 1):
        # Of a thousand experts the number of ways is beyond a float, and its logarithm is not.
        ways = lgamma(count + 1) - lgamma(late + 1) - lgamma(count - late + 1)
        chance = exp(ways + late * log(missing) + (count - late) * log1p(-missing))
        total += chance * max(late * transfer_s - (count - 1) * expert_s, 0.0)
    return total


def exposed_share(compute_s: float, link_s: float, wait_s: float, leaves: float) -> float:
    """Share of the transfers that computing might hide and does not.

    wait_s  of a pass that fetches on demand, in all layers
    leaves  what prefetching leaves of that; 1: nothing is prefetched
    """
    hideable_s = min(compute_s, link_s)
    if hideable_s <= 0:
        return leaves
    exposed_s = max(compute_s + wait_s - max(compute_s, link_s), 0.0)
    return min(leaves * exposed_s / hideable_s, 1.0)
