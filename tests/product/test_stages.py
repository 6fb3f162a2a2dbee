"""Layers on several machines: what passes through them, what they refuse, how they end."""

import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from speq.config import RunConfig, SamplingParams
from speq.devices.device import Processor
from speq.engine.draft import Draft
from speq.engine.request import Request
from speq.errors import EngineLost, SpeqError
from speq.files import contents
from speq.files.alignment import allocate_aligned
from speq.files.checkpoint import Checkpoint
from speq.generator import Generator
from speq.heads.predicted_experts import open_head
from speq.measure.probe import verify
from speq.models import moe_model
from speq.models.kv_cache import KVCache
from speq.models.layer_range import LayerRange, layer_ranges
from speq.models.opened import Opened, open_model
from speq.models.shape import DTYPES
from speq.pipeline.fingerprint import ModelFingerprint, current_versions, part_for
from speq.pipeline.first_stage import RingStages, open_first, open_stage
from speq.pipeline.messages import apply_changes
from speq.pipeline.rendezvous import Rendezvous, join_ring, open_ring
from speq.pipeline.settings import StagesSettings, address_of, counts_of, stage_count, with_stages
from speq.pipeline.waiting import Waiter
from speq.pipeline.wire import MessageKind, Ring, StageMessage, sizes_of, unpack
from tests.helpers.command import arguments_of
from tests.helpers.heads import write_random_head
from tests.helpers.held_collections import held_collections
from tests.helpers.packing import pack_to
from tests.helpers.stages import (
    AGREED,
    MOST_BYTES,
    PATIENCE_S,
    SHARED,
    first_of,
    free_port,
    in_threads,
    stage_process,
)
from tests.helpers.tiny_models import FAMILIES, drawn_tokens, greedy_tokens, load_plain

PROMPT = "the sea the sea the land and the sea"
DRAWN = SamplingParams(temperature=0.8, top_k=40, seed=3, ignore_eos=True)
# Families in stages; the installed transformers may lack some.
PASSES = (
    ("qwen2_moe", "2,1", "bfloat16"),
    ("deepseek_v2", "2", "float64"),
    ("olmoe", "3", "float32"),
    ("gpt_oss", "1,2", "float32"),
    ("qwen3_next", "1,2", "float32"),
    ("qwen3_5_moe", "2,1", "float32"),
    ("gemma4", "1,1,1", "float32"),
    ("afmoe", "2,1", "float32"),
    ("lfm2_moe", "2,1", "float32"),
    ("granitemoehybrid", "1,2", "bfloat16"),
    ("nemotron_h", "2,3", "float32"),
    ("kimi_linear", "2,1", "float32"),
    ("mistral4", "2,1", "bfloat16"),
    ("mimo_v2_flash", "2,1", "float32"),
    ("flex_olmo", "1,2", "bfloat16"),
    ("deepseek_v32", "2,1", "float32"),
    ("glm_moe_dsa", "2,1", "bfloat16"),
    ("minimax_m3_vl", "2,1", "float32"),
)


def logits_of(generator: Generator) -> list[torch.Tensor]:
    """A prompt in chunks, a chain, a tree of which a branch is kept, and what follows that."""
    engine = generator.runtime.reserve(100)
    engine.chunk = engine.prefixes.chunk = 16
    text = Request(generator.encode(PROMPT * 2), SamplingParams(), frozenset())
    engine.prefill(text)
    found = [verify(engine, 5, Draft.chain([6, 7])).logits]
    engine.caches[0].keep_path([0, 1])
    engine.caches[0].settle()
    found.append(verify(engine, 7, Draft([8, 9, 10, 11], [0, 0, 1, 2])).logits)
    engine.caches[0].keep_path([0, 2, 4])
    engine.caches[0].settle()
    found.append(verify(engine, 3, Draft()).logits)
    return found


def hf_layers(model: Path) -> int:
    layers: int = AutoConfig.from_pretrained(model).get_text_config().num_hidden_layers
    return layers


def check_passes(model: Path, stages: str, dtype: str, **more: Any) -> None:
    options: dict[str, Any] = {"dtype": dtype, "drafter": "none", "codec": "raw", "dense": "raw"}
    options |= {"context_length": 128, "profile": "none"} | more
    config = RunConfig.of("64MiB", **options, device="cpu", draft="none", packed_copy="none")
    whole = Generator.load(model, config)
    try:
        wanted = logits_of(whole)
    finally:
        whole.close()
    budgets = ["64MiB"] * len(counts_of(stages, hf_layers(model)))
    with in_threads(model, stages, budgets, **options) as generator:
        found = logits_of(generator)
    assert wanted[0].dtype == DTYPES[dtype]
    assert all(map(torch.equal, found, wanted))


def test_passes_are_those_of_one_machine(tiny: Callable[[str], Path]) -> None:
    """Bit for bit: of a prompt, a chain, a tree, and behind a branch that was kept."""
    check_passes(tiny("qwen2_moe"), "2", "float32")


@pytest.mark.wide
@pytest.mark.parametrize(
    ("family", "stages", "dtype"),
    [row for row in PASSES if row[0] in FAMILIES],
)
def test_passes_of_other_families(
    tiny: Callable[[str], Path], family: str, stages: str, dtype: str
) -> None:
    check_passes(tiny(family), stages, dtype)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("family", "stages", "dtype", "codec", "dense"),
    [
        ("qwen2_moe", "2,1", "bfloat16", "lossless", "lossless"),
        ("deepseek_v2", "2", "float32", "lossless", "raw"),
        ("olmoe", "1,1,1", "bfloat16", "raw", "raw"),
    ],
)
def test_passes_over_packs(
    tiny_bfloat16: Callable[[str], Path],
    tmp_path: Path,
    family: str,
    stages: str,
    dtype: str,
    codec: str,
    dense: str,
) -> None:
    packed = tmp_path / "packed"
    pack_to(tiny_bfloat16(family), packed, codec=codec).close()
    check_passes(packed, stages, dtype, codec="auto", dense=dense, verify_reads=True)


def test_a_stage_reads_its_own_of_a_pack(
    tiny_bfloat16: Callable[[str], Path], tmp_path: Path
) -> None:
    """Records and other weights of its layers; what is damaged elsewhere is not read."""
    packed = tmp_path / "packed"
    whole = pack_to(tiny_bfloat16("deepseek_v2"), packed, codec="lossless")
    parts = [open_stage(str(packed), "2", number, verify_reads=True)[0] for number in (1, 2)]
    layers = [layer for opened in parts for layer in opened.shape.experts.layers]
    assert tuple(layers) == whole.shape.experts.layers
    stores: list[Any] = [whole.store, *(opened.store for opened in parts)]

    def record(store: Any, layer: int, expert: int) -> bytes:
        slot = allocate_aligned(1, store.codec.slot_bytes)[0]
        store.read(layer, expert, slot)
        return bytes(slot[: store.record_bytes(layer, expert)].numpy())

    def records(store: Any) -> list[bytes]:
        keys = itertools.product(range(store.num_layers), range(store.num_experts))
        return [record(store, *key) for key in keys]

    wanted = records(stores[0])
    assert [each for store in stores[1:] for each in records(store)] == wanted
    checkpoint = whole.checkpoint
    file, info = checkpoint.tensors["model.layers.0.input_layernorm.weight"]
    for path, offset in ((packed / "experts.bin", 64), (file.path, info.offset)):
        with path.open("r+b") as damaged:
            damaged.seek(offset)
            damaged.write(b"\xff\x5a")
    with pytest.raises(SpeqError, match=r"expert 0 in MoE layer 0, .* is not what was packed"):
        records(stores[1])
    assert records(stores[2]) == wanted[-len(records(stores[2])) :]

    def loaded(opened: Opened) -> moe_model.MoEModel:
        taken = opened.family, opened.checkpoint, torch.bfloat16, Processor()
        return moe_model.load(*taken, part=opened.part)

    assert loaded(parts[1]).nbytes == parts[1].shape.resident_bytes(torch.bfloat16)
    with pytest.raises(
        SpeqError, match=r"layers\.0\.input_layernorm\.weight is not what was packed"
    ):
        loaded(parts[0])
    for opened in (whole, *parts):
        opened.close()


def test_a_pack_that_is_read_over_a_draft_is_refused(
    tiny_bfloat16: Callable[[str], Path], tmp_path: Path
) -> None:
    pack_to(tiny_bfloat16("qwen2_moe"), tmp_path / "packed", codec="residual").close()
    with pytest.raises(SpeqError, match=r"packed with codec residual, .* --codec lossless"):
        open_stage(str(tmp_path / "packed"), "2", 1)


@pytest.mark.wide
@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v2"])
@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_tokens_are_those_of_plain_transformers(
    tiny: Callable[[str], Path], family: str, drafter: str
) -> None:
    model = tiny(family)
    plain = load_plain(model)
    with in_threads(
        model, "2", ["2MiB", "1MiB"], dtype="float32", drafter=drafter, codec="raw"
    ) as generator:
        drawing = asdict(DRAWN) | {"max_new_tokens": 24}
        for prompt in (PROMPT, PROMPT * 4, PROMPT * 4 + " so"):  # memory grows, entries are kept
            ids = generator.encode(prompt)
            greedy = generator.generate(prompt, max_new_tokens=24, ignore_eos=True)
            assert greedy.token_ids == greedy_tokens(plain, ids, 24)
            drawn = generator.generate(prompt, **drawing)
            assert drawn.token_ids == drawn_tokens(plain, ids, 24, DRAWN)


@pytest.mark.wide
def test_a_head_drafts_over_stages(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """It hears last hidden states, which come back to the first stage. One that goes by layers
    elsewhere is refused.
    """
    model = tmp_path / "model"
    shutil.copytree(tiny("qwen2_moe"), model)
    write_random_head(model)
    plain = load_plain(model)
    given: dict[str, Any] = {"dtype": "float32", "drafter": "head", "codec": "raw"}
    given |= {"draft_length": 3, "max_batch": 2}
    with in_threads(model, "2", ["8MiB", "4MiB"], **given) as generator:
        prompts = [PROMPT, PROMPT * 3]
        alone = [generator.generate(each, max_new_tokens=20, ignore_eos=True) for each in prompts]
        made = generator.generate_batch(prompts, max_new_tokens=20, ignore_eos=True)
        for prompt, *both in zip(prompts, alone, made, strict=True):
            wanted = greedy_tokens(plain, generator.encode(prompt), 20)
            assert [each.token_ids for each in both] == [wanted, wanted]
        assert alone[0].stats["draft_length_mean"] > 2
    write_random_head(model, names=True)
    opened = open_stage(str(model), "2", 1)[0]
    for head in ("auto", "mtp"):
        with pytest.raises(SpeqError, match=f"head {head} needs layers of the whole model"):
            open_head(head, opened)
    opened.close()


@pytest.mark.wide
def test_texts_side_by_side(tiny: Callable[[str], Path]) -> None:
    """Texts of several lengths share passes through all stages, and begin as earlier ones."""
    model = tiny("qwen2_moe")
    plain = load_plain(model)
    prompts = [PROMPT, PROMPT[3:], PROMPT * 3, PROMPT * 3 + "!", "a"]
    with in_threads(
        model, "2", ["4MiB", "2MiB"], dtype="float32", drafter="ngram", codec="raw", max_batch=3
    ) as generator:
        generator.check_alive()
        made = generator.generate_batch(prompts, max_new_tokens=20, ignore_eos=True)
        for prompt, each in zip(prompts, made, strict=True):
            assert each.token_ids == greedy_tokens(plain, generator.encode(prompt), 20)


@pytest.mark.wide
def test_a_stage_that_has_no_room_says_so_and_goes_on(tiny: Callable[[str], Path]) -> None:
    with in_threads(
        tiny("olmoe"), "2", ["64MiB", "350KiB"], dtype="float32", codec="raw"
    ) as generator:
        before = generator.generate("a", max_new_tokens=4).token_ids
        with pytest.raises(SpeqError, match=r"^stage 2 of 2: memory budget 350 KiB is too small"):
            generator.generate("a" * 400, max_new_tokens=4)
        assert generator.generate("a", max_new_tokens=4).token_ids == before


def test_a_part_has_no_others_tensors(tiny: Callable[[str], Path]) -> None:
    """All parts together have each tensor of the model outside its experts, and each expert, once.
    What a part is planned to take is what it takes.
    """
    model = tiny("deepseek_v2")
    whole = open_model(model)
    parts = [open_stage(str(model), "2", number)[0] for number in (1, 2)]
    sizes = []
    for opened in parts:
        loaded = moe_model.load(
            opened.family, opened.checkpoint, torch.float32, Processor(), part=opened.part
        )
        assert loaded.nbytes == opened.shape.resident_bytes(torch.float32)
        sizes.append(loaded.nbytes - opened.shape.own_bytes)
        opened.close()
    assert sum(sizes) == whole.shape.resident_bytes(torch.float32) - whole.shape.own_bytes
    layers = [layer for opened in parts for layer in opened.shape.experts.layers]
    assert tuple(layers) == whole.shape.experts.layers
    tokens = [opened.shape.kv_elements_per_token for opened in parts]
    assert sum(tokens) == whole.shape.kv_elements_per_token
    whole.close()


def test_a_stage_without_experts_is_refused(tiny: Callable[[str], Path]) -> None:
    with pytest.raises(SpeqError, match=r"layers 1 to 1 of .* no routed experts: give that stage"):
        open_stage(str(tiny("qwen2_moe")), "3", 2)


def test_caches_follow_one_another() -> None:
    """Whatever is done to a text's entries is done to those of other machines, in order."""

    def made() -> list[KVCache]:
        shapes = ((1, 1), (1, 1))
        caches = [KVCache(1, shapes, 8, torch.float32, torch.device("cpu"), n) for n in (0, 1)]
        for cache in caches:
            written = torch.arange(8.0).view(1, 1, 8, 1) + 10 * cache.number
            cache.layers[0].keys.copy_(written)
            cache.layers[0].values.copy_(-written)
            cache.written = 8
        return caches

    here, there, changes = made(), made(), []
    for cache in here:
        cache.changes = changes
    here[0].advance(3)
    here[0].settle()
    here[0].keep_path([0, 2, 3])
    here[0].rewind(1)
    here[0].known = [1, 2]
    here[1].take(here[0], 2)
    apply_changes(json.loads(json.dumps(changes)), there)
    changes.clear()
    here[1].advance(2)
    there[1].written = 4  # by a pass in between
    apply_changes(json.loads(json.dumps(changes)), there)
    for one, other in zip(here, there, strict=True):
        assert (one.length, one._length.settled) == (other.length, other._length.settled)
        assert all(map(torch.equal, one.tensors(), other.tensors()))
    assert here[0].layers[0].keys.flatten().tolist()[:6] == [0, 1, 2, 3, 5, 6]
    changes.clear()
    here[0].erase()
    apply_changes(json.loads(json.dumps(changes)), there)
    assert not there[0].length and not there[0].tensors()[0].any()


def test_messages_come_as_they_went() -> None:
    rows = torch.randn(3, 5, dtype=torch.bfloat16)
    head, payload = StageMessage(
        MessageKind.PASS, {"a": [1, None]}, rows.view(-1).view(torch.uint8)
    ).pack()
    kind, text_bytes, row_bytes = sizes_of(head, MOST_BYTES)
    message = unpack(kind, text_bytes, payload)
    assert (message.kind, message.content, row_bytes) == (MessageKind.PASS, {"a": [1, None]}, 30)
    assert torch.equal(message.rows.view(torch.bfloat16).view(3, 5), rows)
    for place, number in ((0, 7), (1, 9), (2, 1 << 40), (3, MOST_BYTES + 1), (3, -1)):
        odd = head.clone()
        odd[place] = number
        with pytest.raises(SpeqError, match="a message of another version"):
            sizes_of(odd, MOST_BYTES)
    for text in (b"{", b"[]", b"\xff"):
        with pytest.raises(SpeqError, match="a stage sent"):
            unpack(kind, len(text), torch.frombuffer(bytearray(text), dtype=torch.uint8))


def test_layers_are_divided() -> None:
    assert counts_of("2", 5) == [3, 2]
    assert counts_of("1, 3,1", 5) == [1, 3, 1]
    assert layer_ranges([1, 3, 1]) == [LayerRange(0, 1), LayerRange(1, 4), LayerRange(4, 5)]
    for stages, sentence in (
        ("1", "give from 2 to 5"),
        ("6", "give from 2 to 5"),
        ("2,2", "which is 4 layers, and the model has 5"),
        ("0,5", "numbers from 1 on"),
        ("two", "must be a number"),
    ):
        with pytest.raises(SpeqError, match=sentence):
            counts_of(stages, 5)
    with pytest.raises(SpeqError, match="stage is 3 and there are 2 stages"):
        part_for("2", 4, 3)
    assert address_of("10.0.0.1:29400") == ("10.0.0.1", 29400)
    assert address_of("[fe80::1]:29400") == ("fe80::1", 29400)
    for text in ("10.0.0.1", ":1", "a:0", "a:x", "0.0.0.0:29400", "::1:29400", "[a]:1", "[::]:1"):
        with pytest.raises(SpeqError, match="rendezvous is"):
            address_of(text)
    with pytest.raises(SpeqError, match="rendezvous is given and stages is not"):
        StagesSettings(rendezvous="a:1").check_together()
    with pytest.raises(SpeqError, match="stages is given and rendezvous is not"):
        open_first("none", RunConfig.of("1GiB"), StagesSettings(stages="2"))
    assert [stage_count(each) for each in ("2", "3,1", "1,1,1")] == [2, 2, 3]
    for text in ("1", "65", "x"):
        with pytest.raises(SpeqError, match="stages is"):
            stage_count(text)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *[("drafter", "int4"), ("prune_rows", "on"), ("device", "cuda")],
        *[("codec", "residual"), ("dense", "residual")],
    ],
)
def test_options_that_stages_do_not_take(option: str, value: Any) -> None:
    config = RunConfig.of("1GiB", **{option: value})
    with pytest.raises(
        SpeqError, match=f"{option} is {value} and the model runs in pipeline stages"
    ):
        with_stages(config)


def test_stages_that_differ_are_refused() -> None:
    for theirs, sentence in (
        (replace(AGREED, model="e" * 64), "another checkpoint"),
        (replace(AGREED, versions=current_versions() | {"speq": "0"}), "stage 2 of 2 runs speq 0,"),
        (replace(AGREED, counts=[1, 2]), "divides the layers into 1,2 and this one into 2,1"),
    ):
        with pytest.raises(SpeqError, match=sentence):
            AGREED.check(theirs, "stage 2 of 2")
    assert ModelFingerprint.of_json(AGREED.to_json().encode(), "it") == AGREED
    for text in (b"{}", b"7", b'{"model": 1, "versions": {}, "counts": []}', b"\x80"):
        with pytest.raises(SpeqError, match="that this version does not understand"):
            ModelFingerprint.of_json(text, "it")


def test_a_stage_with_other_weights_of_the_same_shapes_is_refused(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In shards of gigabytes the fingerprint misses a changed expert."""
    monkeypatch.setattr(Checkpoint, "fingerprint", lambda self: "the same")
    first = tiny("olmoe")
    second, third = (Path(shutil.copytree(first, tmp_path / name)) for name in ("two", "three"))
    with (third / "model.safetensors").open("r+b") as shard:
        shard.seek(-1000, os.SEEK_END)
        shard.write(bytes(64))
    found = []
    for model in (first, second, third):
        opened, agreement = open_stage(str(model), "2", 1)
        opened.close()
        found.append(agreement)
    found[0].check(found[1], "stage 2 of 2")
    with pytest.raises(SpeqError, match="stage 2 of 2 has another checkpoint"):
        found[0].check(found[2], "stage 2 of 2")


def test_a_digest_is_kept_until_a_file_is_touched(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Path(shutil.copytree(tiny("olmoe"), tmp_path / "model"))
    read: list[int] = []
    of_files = contents._read
    monkeypatch.setattr(
        contents, "_read", lambda files, *more: (read.append(len(files)), of_files(files, *more))[1]
    )

    def digest() -> str:
        with closing(Checkpoint(model)) as checkpoint:
            return contents.content_digest(checkpoint)

    before = digest()
    assert digest() == before
    assert read == [1]
    os.utime(model / "model.safetensors")
    assert digest() == before
    assert read == [1, 1]
    with (model / "model.safetensors").open("r+b") as shard:
        shard.seek(-1, os.SEEK_END)
        shard.write(b"\x01")
    assert digest() != before


def pass_on(ring: Ring) -> None:
    ring.send(ring.receive(PATIENCE_S))


def has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as listening, contextlib.suppress(OSError):
        listening.bind(("::1", 0))
        return True
    return False


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_rendezvous(host: str) -> None:
    """Two stages meet, in threads; one with another checkpoint is told so, and so is the first."""
    if host == "[::1]" and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    other = replace(AGREED, model="e" * 64)
    for theirs in (AGREED, other) if host == "127.0.0.1" else (AGREED,):
        met = f"{host}:{free_port()}"
        outcome: list[Any] = []

        def come(
            theirs: ModelFingerprint = theirs, met: str = met, outcome: list[Any] = outcome
        ) -> None:
            try:
                outcome.append(join_ring(met, 2, theirs, MOST_BYTES, PATIENCE_S))
            except SpeqError as error:
                outcome.append(error)

        coming = threading.Thread(target=come, daemon=True)
        coming.start()
        if theirs == other:
            with pytest.raises(SpeqError, match="stage 2 of 2 has another checkpoint"):
                open_ring(Rendezvous.at(met), AGREED, SHARED, MOST_BYTES, PATIENCE_S)
            coming.join(PATIENCE_S)
            assert "the first stage has another checkpoint" in str(outcome[0])
            continue
        ring = open_ring(Rendezvous.at(met), AGREED, SHARED, MOST_BYTES, PATIENCE_S)
        coming.join(PATIENCE_S)
        there, shared = outcome[0]
        assert shared == SHARED
        answering = threading.Thread(target=pass_on, args=[there])
        answering.start()
        ring.send(StageMessage(MessageKind.RESERVE, {"context": 3}))
        assert ring.receive(PATIENCE_S).content == {"context": 3}
        answering.join(PATIENCE_S)
        with pytest.raises(SpeqError, match=r"stage 1 of 2 was silent for 0\.2 s"):
            there.receive(0.2)


def test_an_address_that_is_taken_or_elsewhere() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        taken = f"127.0.0.1:{listening.getsockname()[1]}"
        for met in (taken, "192.0.2.1:29400", "[2001:db8::1]:29400"):
            with pytest.raises(SpeqError, match=r"cannot be listened on: .*; give an address of"):
                open_ring(Rendezvous.at(met), AGREED, SHARED, MOST_BYTES, 0.3)


def test_nobody_comes() -> None:
    met = f"127.0.0.1:{free_port()}"
    with pytest.raises(SpeqError, match=r"stage 2 of 2 did not come to .* within 0\.3 s"):
        open_ring(Rendezvous.at(met), AGREED, SHARED, MOST_BYTES, 0.3)
    with pytest.raises(SpeqError, match=r"nobody listens on rendezvous"):
        join_ring(f"127.0.0.1:{free_port()}", 2, AGREED, MOST_BYTES, 0.3)


def test_an_interrupt_ends_a_wait() -> None:
    """Which the wait itself would not let through."""

    def wait() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        over.wait(PATIENCE_S)

    over = threading.Event()
    waiter = Waiter()
    # A shell's background commands ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with held_collections(), pytest.raises(KeyboardInterrupt):
            waiter.do(wait)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not waiter.rest(0.05)
    over.set()
    assert waiter.rest(PATIENCE_S)
    assert waiter.do(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        waiter.do(lambda: 1 // 0)


def test_the_thread_of_waits_ends_with_them() -> None:
    waiter = Waiter()
    thread = waiter.do(threading.current_thread)
    assert thread is not threading.main_thread()
    assert thread.is_alive()
    del waiter
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_broken_pass_is_not_gone_on_with() -> None:
    """The answer to an earlier pass is never taken for that to a later one."""

    class Interrupted:
        number, count = 1, 2

        def send(self, message: StageMessage, wait_s: float | None = None) -> None:
            raise KeyboardInterrupt

        def receive(self, wait_s: float) -> StageMessage:
            raise AssertionError

    stages = RingStages(Interrupted(), 1.0)
    with pytest.raises(KeyboardInterrupt):
        stages.reserve(8)
    with pytest.raises(SpeqError, match="interrupted; start all of them again"):
        stages.reserve(8)
    stages.close()  # says nothing more


@pytest.mark.wide
def test_two_processes_write_what_one_does(bundled: Path) -> None:
    """Over gloo, with less than the model in each; the other process ends with the first."""
    plain = load_plain(bundled)
    met = f"127.0.0.1:{free_port()}"
    with stage_process(bundled, met, "12MiB", "--codec", "raw") as process:
        with first_of(bundled, met, drafter="ngram", codec="raw") as generator:
            for prompt in ("Once upon a time", "Lily and Tom play. Lily and Tom play. Lily"):
                ids = generator.encode(prompt)
                greedy = generator.generate(prompt, max_new_tokens=40, ignore_eos=True)
                assert greedy.token_ids == greedy_tokens(plain, ids, 40)
                drawn = generator.generate(prompt, **asdict(DRAWN) | {"max_new_tokens": 40})
                assert drawn.token_ids == drawn_tokens(plain, ids, 40, DRAWN)
        out = process.communicate(timeout=PATIENCE_S)[0]
        assert process.returncode == 0, out
        assert "the first stage has closed the run" in out


@pytest.mark.wide
def test_a_stage_that_dies_ends_the_run(tiny: Callable[[str], Path]) -> None:
    model, met = tiny("olmoe"), f"127.0.0.1:{free_port()}"
    with (
        stage_process(model, met, "8MiB", "--codec", "raw") as process,
        first_of(model, met, codec="raw") as generator,
    ):
        stream = generator.stream("a", max_new_tokens=100, ignore_eos=True)
        next(stream)
        process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE_S)
        with pytest.raises(EngineLost, match="stage 2 of 2 has ended"):
            list(stream)
        for asked in (lambda: generator.generate("a"), generator.check_alive):
            with pytest.raises(EngineLost, match="stage 2 of 2 has ended"):
                asked()


@pytest.mark.wide
def test_a_stage_outlives_no_first(tiny: Callable[[str], Path]) -> None:
    model, met = tiny("olmoe"), f"127.0.0.1:{free_port()}"
    first = ("generate", model, "--stages", 2, "--rendezvous", met, "--memory-budget", "8MiB")
    with (
        stage_process(model, met, "8MiB", "--codec", "raw") as process,
        subprocess.Popen(
            arguments_of(*first, "--prompt", "a", "--max-new-tokens", 400, "--ignore-eos"),
            stdout=subprocess.PIPE,
        ) as killed,
    ):
        assert killed.stdout is not None
        killed.stdout.read(1)  # it writes
        killed.kill()
        out = process.communicate(timeout=PATIENCE_S)[0]
        assert process.returncode == 1
        assert "error: stage 1 of 2 has ended, or cannot be reached" in out
        assert "Traceback" not in out
