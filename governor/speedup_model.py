"""MoESD: the speed-up of speculation by batch size (Huang et al., NeurIPS 2025).

N(t) assumes that tokens choose experts independently; real routes share more. If routes were
measured, their counts replace N(t), and both are reported.
"""


def activated_experts(num_experts: int, top_k: float, tokens: float) -> float:
    """N(t) = E (1 - (1 - K/E)^t): distinct experts of a layer that t independent tokens choose."""
    return num_experts * (1 - (1 - top_k / num_experts) ** tokens)


def target_efficiency(single_s: float, verify_s: float) -> float:
    """T_T(B, 1) / T_T(B, gamma): time of a pass over one token over that of a verification.

    1: verification is free.
    """
    return single_s / verify_s
