"""Cards that the CUDA library has code for, and what a card gets that it has none for."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from speq.kernels import library
from speq.kernels.architectures import MARK, Architectures
from speq.kernels.library import Backend

AS_BUILT = "80-real 86-real 89-real 90-real 100-real 120"
CARD_LACKS = (
    "this card has compute capability 7.5, and libspeq_cuda.so has code for 8.0, 8.6, 8.9, 9.0, "
    "10.0, 12.0 and later"
)


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Torch with CUDA that sees a Turing card, a library as we build it, and nothing resolved."""
    built = tmp_path / "libspeq_cuda.so"
    built.write_bytes(b"\x7fELF\0" + MARK + AS_BUILT.encode() + b"\0...")
    monkeypatch.setattr(library, "CUDA_LIBRARY", built)
    monkeypatch.setattr(library, "MISSING", library._Missing(cpu=None))
    monkeypatch.setattr(library, "load", lambda path: None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    return monkeypatch


@pytest.mark.parametrize(
    ("architectures", "runs", "does_not"),
    [
        ("80-real", [(8, 0), (8, 6), (8, 9)], [(7, 5), (9, 0), (10, 0)]),
        ("86-real", [(8, 6), (8, 9)], [(8, 0), (9, 0)]),
        ("90-virtual", [(9, 0), (10, 0), (12, 1)], [(8, 9)]),
        ("90", [(9, 0), (12, 0)], [(8, 9)]),
        (AS_BUILT, [(8, 0), (8, 7), (9, 0), (10, 3), (12, 0), (12, 1)], [(7, 5), (11, 0)]),
        ("", [], [(9, 0)]),
    ],
)
def test_an_image_runs_within_its_major_and_ptx_later(
    architectures: str, runs: list[tuple[int, int]], does_not: list[tuple[int, int]]
) -> None:
    built_for = Architectures.parse(architectures)
    assert [card for card in runs + does_not if built_for.run_on(card)] == runs


def test_the_built_library_says_its_cards() -> None:
    if not library.CUDA_LIBRARY.exists():
        pytest.skip("there was no nvcc to build the CUDA library with")
    built_for = Architectures.of_library(library.CUDA_LIBRARY)
    assert built_for.machine_code


@pytest.mark.parametrize("content", [b"no such thing\0", MARK + b"80-real", MARK + b"native\0"])
def test_a_library_that_does_not_say_is_not_loaded(
    card: pytest.MonkeyPatch, content: bytes
) -> None:
    library.CUDA_LIBRARY.write_bytes(content)
    card.setattr(library, "load", None)
    assert library.MISSING["cuda"].endswith("; build it again")


def test_a_card_without_an_image_gets_the_reference(card: pytest.MonkeyPatch) -> None:
    """And the library is not loaded, so that no kernel of it can be launched."""
    card.setattr(library, "load", None)
    assert library.backend_of("moe_int4", "cuda") == Backend("reference", CARD_LACKS)
    assert library.MISSING == {"cpu": None, "cuda": CARD_LACKS}


def test_a_card_with_an_image_gets_the_library(card: pytest.MonkeyPatch) -> None:
    loaded = []
    card.setattr(library, "load", loaded.append)
    card.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    card.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda op, key: key == "CUDA")
    backend = library.backend_of("moe_int4", "cuda")
    assert backend.name == "cuda"
    assert library.MISSING["cuda"] is None
    library.backend_of("moe_grouped", "cuda")
    assert loaded == [library.CUDA_LIBRARY]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("is_available", lambda: False, "torch sees no CUDA device"),
        ("version.cuda", None, "this torch is built without CUDA"),
    ],
)
def test_no_card_is_asked_where_there_is_none(
    card: pytest.MonkeyPatch, name: str, value: object, reason: str
) -> None:
    card.setattr(torch.cuda, "get_device_capability", None)
    card.setattr(f"torch.{name}" if "." in name else f"torch.cuda.{name}", value)
    assert library.backend_of("read_sum", "cuda") == Backend("reference", reason)


def test_a_first_call_on_a_device_loads_its_kernels(card: pytest.MonkeyPatch) -> None:
    """Whoever never asked what runs an op gets what `backend_of` says."""

    class OnDevice:
        is_cuda = True

    ran = []
    card.setitem(library._OVERLOADS, "read_sum", lambda *given: ran.append(dict(library.MISSING)))
    library.call("read_sum", OnDevice(), None)
    assert ran == [{"cpu": None, "cuda": CARD_LACKS}]


def test_importing_the_kernels_starts_no_driver() -> None:
    code = (
        "import torch\n"
        "torch.cuda.is_available = torch.cuda.get_device_capability = None\n"
        "from speq.kernels import library\n"
        "print(sorted(library.MISSING), torch.cuda.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['cpu'] False\n"
