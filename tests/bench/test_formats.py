"""A model in three formats: what each stands for, as transformers and numpy read it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from speq.bench.formats import run as bench
from speq.bench.formats.files import FORMATS, write
from speq.bench.formats.source import CheckpointModel, RandomModel, Source
from speq.bench.rivals.contest import Contest
from speq.bench.rivals.job import Job
from speq.bench.rivals.process import Heard
from speq.bench.rivals.worker import TextRun, perform
from speq.bench.settings import FormatSettings
from speq.errors import SpeqError
from speq.models.opened import open_model
from tests.helpers import fp8_files, mxfp4_files
from tests.helpers.command import Command
from tests.helpers.tiny_models import write_model

# Blocks of FP8 that are not whole, and a head of 64.
SMALL = FormatSettings(
    layers=2, hidden_size=192, expert_width=160, experts=4, top_k=2, vocab_size=64
)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def experts_of(folder: Path, name: str, layer: int, expert: int) -> list[Tensor]:
    """Gate, up and down of a checkpoint: by transformers, or from the format's definition."""
    tensors, prefix = tensors_of(folder), f"model.layers.{layer}.mlp.experts."
    if name == "mxfp4":
        both, down = (
            convert_moe_packed_tensors(
                *(tensors[f"{prefix}{each}_{part}"] for part in ("blocks", "scales"))
            ).mT[expert]
            for each in ("gate_up_proj", "down_proj")
        )
        return [both[0::2], both[1::2], down]
    named = [f"{prefix}{expert}.{each}_proj.weight" for each in ("gate", "up", "down")]
    if name == "bf16":
        return [tensors[each] for each in named]
    return [
        fp8_files.words_of(
            tensors[each].view(torch.uint8).numpy(),
            np.asarray(tensors[f"{each}_scale_inv"], np.float32),
        )
        for each in named
    ]


@pytest.fixture(scope="module", params=["random", "checkpoint"])
def source(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Source, int]:
    """A source, and its first layer with experts."""
    if request.param == "random":
        return RandomModel(SMALL), 0
    folder = tmp_path_factory.mktemp("source") / "model"
    sizes = {"hidden_size": 160, "moe_intermediate_size": 160}
    return CheckpointModel(str(write_model(folder, "deepseek_v3", torch.bfloat16, **sizes))), 1


def test_formats_hold_the_nearest_words(source: tuple[Source, int], tmp_path: Path) -> None:
    made, layer = source
    folders = write(made, tmp_path, FORMATS)
    for expert, (gate_up, down) in enumerate(made.experts(layer)):
        exact = [*gate_up.chunk(2), down]
        found = {name: experts_of(tmp_path / name, name, layer, expert) for name in FORMATS}
        for at, matrix in enumerate(exact):
            assert torch.equal(found["bf16"][at], found["fp8"][at])
            _, _, words = mxfp4_files.coded(matrix.float().numpy())
            assert torch.equal(found["mxfp4"][at].float(), torch.from_numpy(words))
            _, _, nearest = fp8_files.coded(matrix, torch.float32)
            # Codes at the same distance are as good.
            off = (found["fp8"][at].float() - matrix.float()).abs()
            least = (nearest.float() - matrix.float()).abs()
            assert (off - least).abs().max() <= matrix.abs().max() / 512
            assert (off - least).abs().mean() < 1e-6
    rest = [
        {key: value for key, value in tensors_of(tmp_path / name).items() if ".experts." not in key}
        for name in FORMATS
    ]
    assert rest[0].keys() == rest[1].keys() == rest[2].keys()
    assert all(torch.equal(one[key], rest[0][key]) for one in rest for key in rest[0])
    for name in FORMATS:
        opened = open_model(tmp_path / name)
        assert opened.store.codec.name == {"bf16": "raw"}.get(name, name)
        count = opened.store.num_layers * opened.store.num_experts
        assert made.num_experts == count
        weights = opened.store.codec.shape.weights
        assert made.experts_weights == count * weights
        opened.close()
    assert folders["bf16"].experts_bytes == 2 * made.experts_weights
    assert folders["mxfp4"].experts_bytes == made.experts_weights * 17 // 32
    codes = folders["fp8"].experts_bytes - made.experts_weights
    assert codes == 4 * made.num_experts * 3 * 2 * 2  # scales of two blocks by two


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"top_k": 5}, "top_k is 5 and a layer has 4 experts"),
        ({"hidden_size": 96}, "hidden_size is 96; give a multiple of 64"),
        ({"expert_width": 72}, "the expert width is 72, and blocks of MXFP4 are 32 weights"),
        ({"formats": ("fp8", "fp8")}, "formats name one twice"),
        ({"prompts": (Path("code"),)}, "random weights have no tokenizer"),
    ],
)
def test_what_cannot_be_is_refused(
    change: dict[str, object], sentence: str, tmp_path: Path
) -> None:
    settings = replace(SMALL, work=tmp_path / "work", **change)
    with pytest.raises(SpeqError, match=sentence):
        bench.run(settings, None, False)
    assert not (tmp_path / "work").exists()


def test_other_families_are_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "gpt_oss", torch.bfloat16)
    with pytest.raises(SpeqError, match="is of family 'gpt_oss', whose experts are published in"):
        CheckpointModel(str(model))


def test_folders_that_are_there_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "fp8").mkdir()
    with pytest.raises(SpeqError, match="fp8 exists already"):
        write(RandomModel(SMALL), tmp_path, ("bf16", "fp8"))


def test_rows_have_bytes_and_times_beside_words(tmp_path: Path) -> None:
    made = RandomModel(SMALL)
    folders = write(made, tmp_path, FORMATS)
    settings = replace(SMALL, num_prompts=1, max_new_tokens=4)
    cells = bench.cells_of(settings, folders, [("1MiB", 1 << 20)])
    done = {"load_s": 1.0, "peak_rss_bytes": 1, "device_peak_bytes": None}
    times = {"bf16": 0.008, "fp8": 0.004, "mxfp4": 0.002}
    for cell in cells:
        options = cell.entry.options
        assert options["codec"] == {"bf16": "raw"}.get(cell.entry.label, cell.entry.label)
        texts = [TextRun([1, 2], 0.5, times[cell.entry.label], figures={"hit_rate": 0.5})]
        cell.rounds.append(
            Heard({"codec": options["codec"], "slots": 6, "dtype": "bfloat16"}, texts, done)
        )
    cells[2].rounds = [Heard(failure="has no room")]
    rows = bench.rows_of(cells, bench.terms_of(settings, tmp_path, folders), folders, made)
    words, codes, failed = rows
    weights = 2 * 4 * 3 * 192 * 160
    assert (words["experts_bytes"], words["used_bytes_per_token"]) == (2 * weights, weights)
    assert (words["of_bf16"], codes["of_bf16"], failed["of_bf16"]) == (1.0, 0.5, None)
    assert (words["slots_share"], failed["slots_share"]) == (6 / 8, None)
    assert (codes["codec"], codes["dtype"], codes["hit_rate"]) == ("fp8", "bfloat16", 0.5)


def in_this_process(contest: Contest, job: Job, budget_bytes: int) -> Heard:
    """What `test_rival_process.py` has for processes of their own."""
    heard = Heard()
    perform(job, heard.take)
    return heard


def test_the_command_compares_tokens_and_measures(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Contest, "run", in_this_process)
    shown = command(
        *("bench", "formats", "--layers", 2, "--hidden-size", 128, "--expert-width", 64),
        *("--experts", 8, "--top-k", 2, "--vocab-size", 128, "--rounds", 1, "--num-prompts", 1),
        *("--max-new-tokens", 8, "--budgets", "64MiB", "--work", tmp_path / "work"),
        *("--json", tmp_path / "a.json"),
    )
    assert shown.code == 0, shown.err
    assert "BF16 and FP8 gave the same 24 tokens in float32" in shown.out
    report = json.loads((tmp_path / "a.json").read_text())
    assert [row["format"] for row in report["rows"]] == [*FORMATS]
    assert [row["codec"] for row in report["rows"]] == ["raw", "fp8", "mxfp4"]
    for row in report["rows"]:
        # All experts lie in slots behind the prompt.
        assert (row["failure"], row["slots_share"], row["hit_rate"]) == ("", 1.0, 1.0)
        assert row["tpot_ms"] > 0
    assert (tmp_path / "work" / "mxfp4" / "config.json").exists()
