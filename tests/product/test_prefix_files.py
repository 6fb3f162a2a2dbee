"""Chunks of prompts on disk: a later run reads them, and its bits are those of a run anew."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from speq import Generator
from speq.config import RunConfig
from speq.engine import prefix_files, spilled_prefixes
from speq.engine.prefix_files import PrefixFiles, nbytes_of
from speq.engine.spilled_prefixes import SpilledPrefixes
from speq.errors import SpeqError
from speq.models.kv_cache import KVCache
from tests.helpers.often import often
from tests.helpers.tiny_models import INDEXED, WITH_STATES, greedy_tokens, load_plain

PROMPT = [*range(20, 70)]
OTHER = [*range(120, 160)]
CHUNK = 16
# Its chunks end there; the last one belongs to it alone.
ENDS = [16, 32, 48]


def made(folder: Path, kept: Path | str | None, **options: Any) -> Generator:
    given = {"dtype": "float32", "draft_length": 2, "context_length": 160} | options
    where = "none" if kept is None else kept
    generator = Generator.from_pretrained(folder, "64MiB", prefix_cache=where, **given)
    engine = generator.runtime.engine
    engine.chunk = engine.prefixes.chunk = CHUNK
    return generator


def asked(generator: Generator, prompt: list[int]) -> tuple[list[int], int]:
    told = generator.generate(prompt, max_new_tokens=10, ignore_eos=True)
    return told.token_ids, told.stats["cached_tokens"]


def asked_anew(folder: Path, kept: Path | None, prompt: list[int], **options: Any) -> Any:
    """(tokens, tokens that were not run, all that the cache holds) of a run of its own."""
    generator = made(folder, kept, **options)
    try:
        found = asked(generator, prompt)
        cache = generator.runtime.engine.caches[0]
        return *found, left_in(cache, len(prompt))
    finally:
        generator.close()


def left_in(cache: KVCache, count: int) -> list[Tensor]:
    """The KV of so many tokens, and the states after the last chunk."""
    held = [*cache.entries(0, count), *cache.states_after(cache.ends[-1])]
    return [tensor.clone() for tensor in held]


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime_ns)


@pytest.mark.parametrize("family", ["olmoe", "deepseek_v2", "gemma4", *WITH_STATES, *INDEXED])
def test_a_later_run_reads_what_was_run(
    family: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, kept = tiny(family), tmp_path / "kept"
    plain = load_plain(folder)
    longer = [*PROMPT[:40], 1, 2, 3, *range(100, 130)]
    _, _, alone = asked_anew(folder, None, PROMPT)
    first, cached, there = asked_anew(folder, kept, PROMPT)
    assert (first, cached) == (greedy_tokens(plain, PROMPT, 10), 0)
    assert len(files_in(kept)) == len(ENDS)
    again, cached, read = asked_anew(folder, kept, PROMPT)
    assert (again, cached) == (first, ENDS[-1])
    # The copies of states are of the last chunks' ends, wherever the second run took them from.
    for one, other, each in zip(alone, there, read, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, each)
    # Another prompt takes what it shares, goes on from there, and leaves its own chunks.
    other, cached, _ = asked_anew(folder, kept, longer)
    assert (other, cached) == (greedy_tokens(plain, longer, 10), 32)
    assert len(files_in(kept)) == len(ENDS) + 2
    assert {file.stat().st_mode & 0o777 for file in files_in(kept)} == {0o600}


def test_what_memory_has_is_not_read(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Files go on where memory ends, and memory where files end."""
    plain = load_plain(tiny("olmoe"))
    longer = [*PROMPT, *range(130, 150)]
    asked_anew(tiny("olmoe"), tmp_path, longer)
    for file in files_in(tmp_path):
        os.utime(file, ns=(0, 0))
    generator = made(tiny("olmoe"), tmp_path)
    try:
        assert asked(generator, PROMPT)[1] == 48
        assert asked(generator, longer) == (greedy_tokens(plain, longer, 10), 64)
        read = [file for file in files_in(tmp_path) if file.stat().st_mtime_ns]
        assert len(read) == 4
        for file in read:
            file.unlink()
        assert asked(generator, longer)[1] == 64
    finally:
        generator.close()


def test_nothing_is_shared_with_another_run(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Of another dtype or model, or of another owner."""
    asked_anew(tiny("olmoe"), tmp_path, PROMPT)
    count = len(files_in(tmp_path))
    for at, (family, options) in enumerate(
        [
            ("olmoe", {"dtype": "float64"}),
            ("olmoe", {"dtype": "bfloat16"}),
            ("qwen3_moe", {}),
        ]
    ):
        assert asked_anew(tiny(family), tmp_path, PROMPT, **options)[1] == 0
        assert len(files_in(tmp_path)) == count * (at + 2)
    files = PrefixFiles(tmp_path, 1 << 20, "the same")
    names = {
        files.name(owner, ids, ends)
        for owner in ("", "one")
        for ids in ([1, 2, 3], [1, 2, 4], [1, 2])
        for ends in ([3], [2, 3], [])
    }
    assert len(names) == 18
    assert PrefixFiles(tmp_path, 1 << 20, "another").name("", [1, 2, 3], [3]) not in names


@pytest.mark.parametrize("family", ["olmoe", "qwen3_next"])
def test_forms_of_the_weights_share_chunks(
    family: str, tiny_bfloat16: Callable[[str], Path], tmp_path: Path
) -> None:
    """Which form a run takes is measured at load: bits do not depend on it."""
    forms: list[dict[str, Any]] = [
        {"dtype": "bfloat16", "codec": form, "dense": form} for form in ("raw", "lossless")
    ]
    folder = tiny_bfloat16(family)
    assert asked_anew(folder, tmp_path, PROMPT, **forms[0])[1] == 0
    _, cached, read = asked_anew(folder, tmp_path, PROMPT, **forms[1])
    assert cached == 48
    _, _, alone = asked_anew(folder, None, PROMPT, **forms[1])
    assert all(
        torch.equal(one[:, :48], other[:, :48]) for one, other in zip(read, alone, strict=True)
    )


@pytest.mark.parametrize("damage", ["a bit", "the end", "more", "another beginning", "a pipe"])
def test_a_damaged_file_is_run_again(
    damage: str, tiny: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny("olmoe")
    first, _, entries = asked_anew(folder, tmp_path, PROMPT)
    file = files_in(tmp_path)[1]
    content = bytearray(file.read_bytes())
    if damage == "a bit":
        content[len(content) // 2] ^= 4
    elif damage == "the end":
        del content[-5:]
    elif damage == "more":
        content += b"\0"
    elif damage == "another beginning":
        content[:4] = b"none"
    file.unlink()
    if damage == "a pipe":
        os.mkfifo(file)
    else:
        file.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        again, cached, read = asked_anew(folder, tmp_path, PROMPT)
    assert (again, cached) == (first, 16)
    assert all(torch.equal(*each) for each in zip(entries, read, strict=True))
    assert "is removed, and its tokens are run again" in caplog.text
    assert asked_anew(folder, tmp_path, PROMPT)[1] == 48


def tensors(seed: int) -> list[Tensor]:
    drawn = torch.randn(3, 5, generator=torch.Generator().manual_seed(seed))
    return [drawn, drawn.bfloat16()[:, 1:4], torch.zeros(0, 4)]


def test_a_limit_is_kept_to(tmp_path: Path) -> None:
    """What was used longest ago goes; other files are left alone."""
    one = len(prefix_files.MAGIC) + sum(each.nbytes + 4 for each in tensors(0))
    files = PrefixFiles(tmp_path / "made", 3 * one, "")
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "other.txt").write_text("x" * 10_000)
    names = [files.name("", [at], [1]) for at in range(5)]
    for at, name in enumerate(names[:3]):
        files.write(name, tensors(at))
        os.utime(tmp_path / "made" / name, ns=(at, at))
    found = [torch.empty_like(each) for each in tensors(0)]
    assert files.read(names[0], found)
    assert all(torch.equal(*each) for each in zip(found, tensors(0), strict=True))
    files.write(names[3], tensors(3))
    assert [files.has(name) for name in names] == [True, False, True, True, False]
    files.write(names[4], [torch.zeros(100, 100)])  # larger than the limit
    assert [files.has(name) for name in names] == [True, False, True, True, False]
    assert (tmp_path / "made" / "other.txt").exists()


def test_a_full_disk_ends_writing_and_nothing_else(
    tiny: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = asked_anew(tiny("olmoe"), None, PROMPT)[0]

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prefix_files, "store", full)
    with caplog.at_level(logging.WARNING):
        assert asked_anew(tiny("olmoe"), tmp_path, PROMPT)[:2] == (first, 0)
    assert caplog.text.count("no more prompts are kept") == 1
    assert "No space left on device" in caplog.text
    assert files_in(tmp_path) == []


@pytest.mark.parametrize("drafts", often([3, 0], quick=1))
@pytest.mark.parametrize(
    "family", often([*WITH_STATES, "olmoe", "deepseek_v2", "gemma4"], quick=3, wide=3)
)
def test_what_one_cache_gives_up_is_read_again(
    family: str, drafts: int, tiny: Callable[[str], Path]
) -> None:
    """Two prompts take turns in one KV cache, and one that is too long for it comes between."""
    folder = tiny(family)
    plain = load_plain(folder)
    longer = [*PROMPT, *range(1, 120)]
    _, _, alone = asked_anew(folder, None, PROMPT, draft_length=drafts)
    generator = made(folder, "auto", draft_length=drafts, context_length=None)
    try:
        engine = generator.runtime.engine
        wanted = {len(each): greedy_tokens(plain, each, 10) for each in (PROMPT, OTHER, longer)}
        assert asked(generator, PROMPT) == (wanted[50], 0)
        assert asked(generator, OTHER) == (wanted[40], 0)
        assert asked(generator, PROMPT) == (wanted[50], 48)
        read = left_in(engine.caches[0], 50)
        assert all(torch.equal(*each) for each in zip(alone, read, strict=True))
        assert asked(generator, OTHER) == (wanted[40], 32)
        assert asked(generator, longer)[0] == wanted[169]
        engine = generator.runtime.engine
        engine.chunk = engine.prefixes.chunk = CHUNK
        assert asked(generator, OTHER) == (wanted[40], 32)
        generator.forget()
        assert asked(generator, PROMPT) == (wanted[50], 0)
        assert [*(Path.home() / ".cache" / "speq" / "prefixes").iterdir()] == []
    finally:
        generator.close()


def test_what_is_given_up_stays_within_its_limit(tmp_path: Path) -> None:
    one = nbytes_of(tensors(0))
    spilled = SpilledPrefixes(tmp_path / "made", 3 * one)
    names = [spilled.name("", [at], [1]) for at in range(5)]
    for at, name in enumerate(names[:3]):
        spilled.write(name, tensors(at))
    found = [torch.empty_like(each) for each in tensors(0)]
    assert spilled.read(names[0], found)
    assert all(torch.equal(*each) for each in zip(found, tensors(0), strict=True))
    spilled.write(names[3], tensors(3))
    assert [spilled.has(name) for name in names] == [True, False, True, True, False]
    spilled.write(names[4], [torch.zeros(100, 100)])  # larger than the limit
    assert [spilled.has(name) for name in names] == [True, False, True, True, False]
    assert spilled.nbytes == 3 * one
    # Another owner's is another name, and a file of other sizes fills nothing.
    assert not spilled.has(spilled.name("one", [0], [1]))
    before = [torch.full_like(each, 7) for each in tensors(0)]
    assert not spilled.read(names[0], [*before, torch.zeros(3)])
    assert not spilled.has(names[0])
    spilled.close()
    assert not any(map(spilled.has, names))
    assert [*(tmp_path / "made").iterdir()] == []


def test_no_more_files_are_open_than_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spilled_prefixes, "MOST_FILES", 2)
    spilled = SpilledPrefixes(tmp_path, 1 << 20)
    for name in "abc":
        spilled.write(name, tensors(0))
    assert [spilled.has(name) for name in "abc"] == [False, True, True]
    spilled.close()


def test_a_full_disk_ends_spilling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(spilled_prefixes, "store", full)
    spilled = SpilledPrefixes(tmp_path, 1 << 20)
    with caplog.at_level(logging.WARNING):
        spilled.write("a", tensors(0))
        spilled.write("b", tensors(0))
    assert not spilled.has("a")
    assert caplog.text.count("no more prompts are kept") == 1


def test_a_folder_that_cannot_be_is_refused_at_once(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpeqError, match="cannot be written"):
        made(tiny("olmoe"), tmp_path / "file" / "kept")
    with pytest.raises(SpeqError, match="prefix_cache is given and prefix_reuse is tokens"):
        RunConfig.of("1GiB", prefix_reuse="tokens", prefix_cache=tmp_path)
