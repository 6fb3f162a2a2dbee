"""Loading a model leaves transformers as it was."""

import threading

import torch
from transformers.models.qwen2_moe import modeling_qwen2_moe

from speq.layers.offloaded_experts import OffloadedExperts
from speq.models.families import FAMILIES


def test_two_threads_leave_the_familys_own_experts() -> None:
    """The second waits: otherwise it would take the first one's stand-in for the original."""
    original = modeling_qwen2_moe.Qwen2MoeExperts
    family = FAMILIES["qwen2_moe"]
    inside, leave = threading.Event(), threading.Event()
    entered: list[str] = []

    def first() -> None:
        with family.without_experts():
            entered.append("first")
            inside.set()
            leave.wait(10)

    def second() -> None:
        with family.without_experts():
            entered.append("second")

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert inside.wait(10)
    assert modeling_qwen2_moe.Qwen2MoeExperts is OffloadedExperts
    threads[1].start()
    assert entered == ["first"]
    leave.set()
    for thread in threads:
        thread.join(10)
    assert entered == ["first", "second"]
    assert modeling_qwen2_moe.Qwen2MoeExperts is original
    assert issubclass(original, torch.nn.Module)
