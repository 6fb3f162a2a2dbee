"""Training of heads: texts, features, steps, and the whole command, interrupted or not."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import speq
from speq import Generator, SpeqError
from speq.cli import app
from speq.files.alone import lock_folder
from speq.files.journal import Journal
from speq.heads.head_file import read_head
from speq.heads.head_shape import HeadShape, NamedLayers
from speq.heads.moe_head import rotations
from speq.stats import StepStats
from speq.training import acceptance, routes
from speq.training import train_head as command
from speq.training.acceptance import ChainAcceptance
from speq.training.features import (
    FEATURES,
    FeatureFile,
    HeldOut,
    Window,
    held_out_of,
    window_of,
)
from speq.training.routes import Recalls
from speq.training.settings import HeadSettings
from speq.training.texts import PIECE_CHARACTERS, Texts, pieces_of
from speq.training.trainer import (
    FINAL_RATE_SHARE,
    WARMUP_STEPS,
    TrainedAttention,
    Trainer,
    TrainingVocabulary,
    learning_rate_share,
)
from tests.helpers.heads import head_in_numpy, random_head
from tests.helpers.tiny_models import greedy_tokens, load_plain

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "dogs")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rng = tmp_path_factory.mktemp("texts"), random.Random(1)
    for name, lines in (("one.txt", 400), ("two.txt", 200)):
        text = "\n".join(" ".join(rng.choices(WORDS, k=8)) for _ in range(lines))
        (folder / name).write_text(text)
    return folder


@pytest.fixture(autouse=True)
def short_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "NUM_PROMPTS", 1)
    monkeypatch.setattr(acceptance, "NEW_TOKENS", 24)


@pytest.fixture
def model(tiny: Callable[[str], Path], tmp_path: Path) -> Path:
    path = tmp_path / "model"
    shutil.copytree(tiny("olmoe"), path, ignore=shutil.ignore_patterns(".speq"))
    return path


def codes(text: str) -> list[int]:
    return [*text.encode()]


# Texts.


def test_pieces_are_the_text() -> None:
    rng = random.Random(2)
    text = "".join(rng.choice("ab \n") * rng.randint(1, 90) for _ in range(2000))
    pieces = pieces_of(text)
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= PIECE_CHARACTERS
    assert all(piece.endswith("\n") for piece in pieces[:-1])
    assert pieces_of("x" * 20_000) == ["x" * 8192, "x" * 8192, "x" * (20_000 - 2 * 8192)]
    assert pieces_of(" \n ") == []


def test_windows_are_all_of_the_texts_but_their_ends(texts: Path) -> None:
    found = Texts.of_folder(texts)
    windows = [*found.windows(codes, 64, 256, seed=3)]
    assert windows and all(len(window) == 64 for window in windows)
    ids = torch.cat(windows).tolist()
    trained = "".join(map(chr, (i for i in ids if i != 256)))
    for name in ("one.txt", "two.txt"):
        whole = (texts / name).read_text()
        assert found.texts[name] + found.held_out[name] == whole
        assert len(found.held_out[name]) == int(0.05 * len(whole))
    total = sum(map(len, found.texts.values()))
    assert total - 64 < len(trained) <= total
    again = [*found.windows(codes, 64, 256, seed=3)]
    assert all(map(torch.equal, windows, again))
    firsts = {tuple(next(found.windows(codes, 64, 256, seed)).tolist()) for seed in range(8)}
    assert len(firsts) > 1
    prompts = found.prompts(codes, 16, 2)
    # Of each file in turn.
    assert prompts == [codes(found.held_out[name][:16]) for name in ("one.txt", "two.txt")]


def test_texts_have_names(texts: Path, tmp_path: Path) -> None:
    digest = Texts.of_folder(texts).digest()
    assert digest == Texts.of_folder(texts).digest()
    other = tmp_path / "other"
    shutil.copytree(texts, other)
    (other / "two.txt").write_text((texts / "two.txt").read_text().replace("cat", "cow", 1))
    assert Texts.of_folder(other).digest() != digest


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(None, "is not a folder; give one"), ({}, "holds no .txt file"), ({"a.txt": " "}, "holds no")],
)
def test_folders_without_texts(
    content: dict[str, str] | None, sentence: str, tmp_path: Path
) -> None:
    folder = tmp_path / "texts"
    if content is not None:
        folder.mkdir()
        for name, text in content.items():
            (folder / name).write_text(text)
    with pytest.raises(SpeqError, match=sentence):
        Texts.of_folder(folder)


# Features.


def test_features_are_the_models_own(model: Path) -> None:
    """Plain transformers' last hidden states, in any budget."""
    plain = load_plain(model)
    for budget in ("900KiB", "64MiB"):
        generator = Generator.from_pretrained(
            model, budget, draft="none", draft_length=0, dtype="float32"
        )
        for seed in (0, 1):
            ids = torch.randint(256, (40,), generator=torch.Generator().manual_seed(seed))
            with torch.no_grad():
                wanted = plain.model(ids[None]).last_hidden_state[0]
            found = window_of(generator.runtime, ids).features
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        generator.close()


def test_routes_are_the_models_own(model: Path) -> None:
    """Plain transformers' choices; a layer's guess is its router on what enters the one before."""
    plain = load_plain(model)
    ids = torch.randint(256, (40,), generator=torch.Generator().manual_seed(2))
    entered: list[Tensor] = []
    layers = [*plain.model.layers]
    for layer in layers:
        layer.mlp.register_forward_pre_hook(lambda _, given: entered.append(given[0][0]))
    with torch.no_grad():
        plain(ids[None])
        routers = [layer.mlp.gate.weight.T for layer in layers]
        logits = [x @ router for x, router in zip(entered, routers, strict=True)]
        early = [x @ router for x, router in zip(entered[:-1], routers[1:], strict=True)]
    generator = Generator.from_pretrained(
        model, "900KiB", draft="none", draft_length=0, dtype="float32"
    )
    found = held_out_of(generator.runtime, ids)
    top_k = generator.runtime.shape.top_k
    generator.close()
    for at, wanted in enumerate(logits):
        chosen = wanted.topk(top_k).indices.sort().values
        assert torch.equal(found.window.routes[:, at].long().sort().values, chosen)
    assert len(found.guessed) == len(early)
    for guess, wanted in zip(found.guessed, early, strict=True):
        assert torch.equal(guess.long(), wanted.topk(top_k).indices)


def feature_file(folder: Path, count: int = 5, length: int = 12, width: int = 8) -> FeatureFile:
    folder.mkdir(exist_ok=True)
    journal = Journal(folder / "training.journal", {"f": 1}, command.is_ours)
    features = FeatureFile(folder, journal, length, width, torch.float32, (2, 3))
    generator = torch.Generator().manual_seed(9)
    windows = [
        Window(
            torch.randint(40, (length,), generator=generator),
            torch.randn(length, width, generator=generator),
            torch.rand(length, 2, 5, generator=generator).argsort(-1)[..., :3],
        )
        for _ in range(count)
    ]
    if not len(features):
        features.append(windows[:2])
        features.append(windows[2:])
    return features


def test_what_is_kept_of_features_is_read_again(tmp_path: Path) -> None:
    features = feature_file(tmp_path / "work")
    again = feature_file(tmp_path / "work")
    assert len(again) == 5
    for at in range(5):
        assert all(map(torch.equal, features.read(at), again.read(at)))
    tokens, rows = again.batch([3, 1])
    assert tokens.dtype == torch.int64
    assert torch.equal(tokens[1], features.read(1)[0].long())
    assert torch.equal(rows[0], features.read(3)[1])


@pytest.mark.parametrize("damage", ["bit", "cut"])
def test_damaged_windows_are_made_again(damage: str, tmp_path: Path) -> None:
    feature_file(tmp_path / "work")
    path = tmp_path / "work" / FEATURES
    content = bytearray(path.read_bytes())
    if damage == "bit":
        content[3 * 12 * 8 * 4 + 5] ^= 4
    else:
        del content[4 * 12 * 8 * 4 - 1 :]
    path.write_bytes(content)
    journal = Journal(tmp_path / "work" / "training.journal", {"f": 1}, command.is_ours)
    assert len(FeatureFile(tmp_path / "work", journal, 12, 8, torch.float32, (2, 3))) == 3
    again = Journal(tmp_path / "work" / "training.journal", {"f": 1}, command.is_ours)
    assert len(again.entries) == 3


# Steps.


def vocabulary(width: int = 8) -> TrainingVocabulary:
    generator = torch.Generator().manual_seed(8)
    table = torch.randn(40, width, generator=generator)
    return TrainingVocabulary(table, table * 0.5, None)


def trainer(folder: Path, **settings: Any) -> Trainer:
    shape = HeadShape(8, 32, window=5)
    given = {"batch_size": 2, "sequence_length": 12, "learning_rate": 0.01, **settings}
    given = {"token_share": 1.0, **given}
    return Trainer(random_head(shape), feature_file(folder), vocabulary(), HeadSettings(**given))


def weights_of(of: Trainer) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in of.head.weights().items()}


def test_training_resumes_to_the_same_bits(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "a")
    losses = [whole.step(8) for _ in range(8)]
    parts, found = trainer(tmp_path / "b"), []
    assert not parts.resume(tmp_path / "b")
    for _ in range(8):
        found.append(parts.step(8))
        parts.save(tmp_path / "b")
        parts = trainer(tmp_path / "b")
        assert parts.resume(tmp_path / "b")
    assert found == losses
    assert parts.taken == 8
    for name, weight in weights_of(whole).items():
        assert torch.equal(weight, parts.head.weight(name))
    assert losses[7]["feature"] < losses[1]["feature"]


def test_a_damaged_state_is_not_gone_on_from(tmp_path: Path) -> None:
    one = trainer(tmp_path / "a")
    one.step(4)
    one.save(tmp_path / "a")
    path = tmp_path / "a" / "state.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    other = trainer(tmp_path / "a")
    assert not other.resume(tmp_path / "a")
    assert other.taken == 0


def test_every_window_comes_once_before_any_comes_again(tmp_path: Path) -> None:
    one = trainer(tmp_path / "a")
    places = [window for step in range(10) for window in one.windows_of(step)]
    epochs = [places[at : at + 5] for at in range(0, 20, 5)]
    assert all(sorted(epoch) == [0, 1, 2, 3, 4] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_blocks_of_rows_make_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = trainer(tmp_path / "a")
    losses = [whole.step(4) for _ in range(2)]
    monkeypatch.setattr("speq.training.trainer.BLOCK_ELEMENTS", 1)
    monkeypatch.setattr("speq.training.trainer.FEWEST_ROWS", 4)
    parts = trainer(tmp_path / "b")
    for loss in losses:
        assert parts.step(4) == pytest.approx(loss, rel=1e-5)
    for name, weight in weights_of(whole).items():
        torch.testing.assert_close(weight, parts.head.weight(name).detach(), rtol=1e-3, atol=1e-5)


def test_the_first_loss_is_the_formulas(tmp_path: Path) -> None:
    """Against numpy's pass over each window, with the noise of the step taken away."""
    from speq.training import trainer as module

    before, module.NOISE = module.NOISE, 0.0
    try:
        one = trainer(tmp_path / "a")
        features, words = feature_file(tmp_path / "a"), vocabulary()
        wanted = {"feature": 0.0, "next_tokens": 0.0}
        for window in one.windows_of(0):
            tokens, rows, _ = features.read(window)
            embedded = words.table[tokens.long()][1:10]
            state = head_in_numpy(one.head, embedded.numpy(), rows[:9].numpy())
            said = torch.from_numpy(state["feature"])
            error = (said - rows[1:10]).abs()
            smooth = torch.where(error < 1, error**2 / 2, error - 0.5)
            wanted["feature"] += float(smooth.mean()) / 2
            probs = (rows[1:10] @ words.words.T).double().softmax(-1)
            logs = (said @ words.words.T.double()).log_softmax(-1)
            wanted["next_tokens"] -= float((probs * logs).sum(-1).mean()) / 2
        found = one.step(4)
    finally:
        module.NOISE = before
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("window", [3, 50])
def test_second_rows_see_what_drafts_see(window: int) -> None:
    """The text's entries up to theirs, and their own, made of what the head said."""
    head = random_head(HeadShape(8, 12, window=window))
    embedded, features = torch.randn(2, 9, 8)
    attention = TrainedAttention(7, window, embedded.device)
    first = rotations(torch.arange(7), head.shape.head_width)
    second = rotations(torch.arange(1, 8), head.shape.head_width)
    state = head(embedded[None, :7], features[None, :7], first, attention.first)
    again = head(embedded[None, 1:8], state.feature, second, attention.second)
    for row in range(7):
        given = torch.cat([features[: row + 1], state.feature[0, row : row + 1]]).detach()
        wanted = head_in_numpy(head, embedded[: row + 2].numpy(), given.numpy())
        close = torch.from_numpy(wanted["feature"][-1]).float()
        torch.testing.assert_close(again.feature[0, row], close, rtol=1e-4, atol=1e-5)


def test_rates_rise_and_fall() -> None:
    assert learning_rate_share(0, 100) == learning_rate_share(0, None) == 1 / WARMUP_STEPS
    assert learning_rate_share(WARMUP_STEPS - 1, None) == 1
    assert learning_rate_share(WARMUP_STEPS, 100) == pytest.approx(1)
    middle = (WARMUP_STEPS + 100) // 2
    assert learning_rate_share(middle, 100) == pytest.approx((1 + FINAL_RATE_SHARE) / 2)
    assert learning_rate_share(100, 100) == pytest.approx(FINAL_RATE_SHARE)
    # What comes before the number of steps is known does not depend on it.
    assert all(
        learning_rate_share(at, None) == learning_rate_share(at, 7000) for at in range(WARMUP_STEPS)
    )


# Names of experts.


def held_out(count: int = 2) -> list[HeldOut]:
    """Random windows of 12 tokens, 2 layers of 5 experts, 3 of a token."""
    generator = torch.Generator().manual_seed(3)

    def chosen() -> Tensor:
        return torch.rand(12, 2, 5, generator=generator).argsort(-1)[..., :3]

    return [
        HeldOut(
            Window(
                torch.randint(40, (12,), generator=generator),
                torch.randn(12, 8, generator=generator),
                chosen(),
            ),
            [chosen()[:, 0]],
        )
        for _ in range(count)
    ]


def test_recalls_are_counted_by_token() -> None:
    """Against numpy's pass over each window, expert by expert."""
    head = random_head(HeadShape(8, 12, window=50))
    weight = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(4))
    windows, words = held_out(), vocabulary()
    found = routes.recalls(head, weight, windows, words)
    counts = {name: [0, 0] for name in ("drafted", "pending", "guessed")}
    used = [[0] * 5, [0] * 5]
    w = {name: each.double().numpy() for name, each in head.weights().items()}

    def normed(row: Any, name: str) -> Any:
        return row / np.sqrt((row**2).mean() + 1e-6) * w[name]

    for (tokens, features, wanted), (guesses,) in windows:
        embedded, f = words.table[tokens].double().numpy(), features.double().numpy()
        own = head_in_numpy(head, embedded[1:11], f[:10])["feature"]
        for row in range(10):
            given = {"pending": (row + 1, f[row]), "drafted": (row + 2, own[row])}
            for layer in range(2):
                for kind, (at, feature) in given.items():
                    pair = [
                        normed(embedded[at], "embedding_norm"),
                        normed(feature, "feature_norm"),
                    ]
                    logits = weight[layer].double().numpy() @ np.concatenate(pair)
                    named = set(np.argsort(-logits)[:3].tolist())
                    counts[kind][layer] += len(named & set(wanted[at, layer].tolist()))
                chosen = set(wanted[row + 2, layer].tolist())
                counts["guessed"][layer] += layer * len(set(guesses[row + 2].tolist()) & chosen)
                for expert in chosen:
                    used[layer][expert] += 1
    assert found.tokens == 20
    assert found.drafted == pytest.approx([count / 60 for count in counts["drafted"]])
    assert found.pending == pytest.approx([count / 60 for count in counts["pending"]])
    assert found.guessed == [None, pytest.approx(counts["guessed"][1] / 60)]
    assert found.most_used == pytest.approx([sum(sorted(each)[-3:]) / 60 for each in used])


def test_layers_in_which_others_find_more_are_left_out() -> None:
    found = Recalls(10, [0.9, 0.7, 0.8, 0.7], [1.0] * 4, [None, 0.7, 0.6, 0.5], [0.4] * 3 + [0.7])
    assert found.won() == (0, 2)
    head, weight = random_head(HeadShape(8, 12)), torch.randn(4, 5, 16)
    kept = routes.with_predictions(head, weight, found.won(), top_k=3)
    assert kept.shape.named == NamedLayers((0, 2), 5, 3)
    assert torch.equal(kept.weight("routes"), weight[[0, 2]])
    assert all(torch.equal(kept.weight(name), w) for name, w in head.weights().items())
    assert routes.with_predictions(head, weight, (), top_k=3) is head


def test_names_are_learnt(tmp_path: Path) -> None:
    """Where a token's experts follow from the token alone."""
    generator = torch.Generator().manual_seed(5)
    table = torch.rand(40, 2, 5, generator=generator).argsort(-1)[..., :3]
    words = TrainingVocabulary(torch.randn(40, 32, generator=generator), torch.zeros(40, 32), None)
    folder = tmp_path / "work"
    folder.mkdir()
    journal = Journal(folder / "training.journal", {"f": 1}, command.is_ours)
    features = FeatureFile(folder, journal, 48, 32, torch.float32, (2, 3))

    def window() -> Window:
        tokens = torch.randint(40, (48,), generator=generator)
        return Window(tokens, torch.randn(48, 32, generator=generator), table[tokens])

    features.append([window() for _ in range(8)])
    head = random_head(HeadShape(32, 12))
    weight = routes.fit(head, features, words, num_experts=5, steps=150, seed=0)
    found = routes.recalls(head, weight, [HeldOut(window(), [])], words)
    assert min(found.drafted) > max(found.most_used) + 0.1


# Acceptance.


def test_acceptance_by_depth() -> None:
    steps = []
    for drafted, accepted in [(3, 3), (3, 0), (3, 1), (2, 1), (0, 0)]:
        stats = StepStats("decode")
        stats.draft_length, stats.accepted = drafted, accepted
        steps.append(stats)
    found = ChainAcceptance.of(steps)
    assert (found.steps, found.tried, found.stood) == (4, [4, 3, 1], [3, 1, 1])
    assert found.by_depth == pytest.approx([3 / 4, 1 / 3, 1.0])
    assert found.accept_length == (4 + 1 + 2 + 2) / 4
    assert ChainAcceptance.of([]).to_json()["by_depth"] == []


# The whole command.

SMALL = (
    *("--width", "32", "--sequence-length", "32", "--windows", "6", "--steps", "30"),
    *("--batch-size", "2", "--learning-rate", "0.003", "--memory-budget", "64MiB", "--quiet"),
)


def train(model: Path, texts: Path, *options: str) -> Any:
    arguments = ["train-head", str(model), "--texts", str(texts), *SMALL, *options]
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_the_command_trains_a_head_that_drafts(model: Path, texts: Path) -> None:
    result = train(model, texts)
    assert result.exit_code == 0
    assert "train-head" in result.stdout
    folder = model / ".speq" / "head"
    assert sorted(path.name for path in folder.iterdir()) == ["head.safetensors", "report.json"]
    report = json.loads((folder / "report.json").read_text())
    assert report["texts"] == ["one.txt", "two.txt"]
    assert (report["windows"], report["tokens"], report["steps"]) == (6, 6 * 32, 30)
    names = report["routes"]
    assert names["tokens"] == 8 * 30
    assert report["named_layers"] == [
        at
        for at, share in enumerate(names["drafted"])
        if share > max(names["guessed"][at] or 0, names["most_used"][at])
    ]
    kept = read_head(folder / "head.safetensors", report["model"], 64)
    assert list(kept.predicted_layers) == report["named_layers"]
    for found in report["acceptance"].values():
        assert len(found["by_depth"]) == report["draft_length"] == 4
        assert found["tried"][0] == found["steps"] > 4
    # What runs go by is the lesser of both.
    greedy, drawn = (report["acceptance"][name]["by_depth"] for name in ("greedy", "drawn"))
    stand = read_head(folder / "head.safetensors", report["model"], 64).acceptance_rates
    assert stand == tuple(min(pair) for pair in zip(greedy, drawn, strict=True))
    prompt = [*range(40, 60)]
    expected = greedy_tokens(load_plain(model), prompt, 40)
    for nodes in (None, 8):
        generator = Generator.from_pretrained(
            model, "64MiB", drafter="head", draft_length=3, draft_nodes=nodes, dtype="float32"
        )
        made = generator.generate(prompt, max_new_tokens=40, ignore_eos=True)
        assert made.token_ids == expected
        assert made.stats["draft_length_mean"] > 1
        generator.close()


@pytest.mark.wide
def test_an_interrupted_command_goes_on_to_the_same_bits(
    model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the features, within the steps, and behind them."""
    options = {
        **{"width": 32, "sequence_length": 32, "windows": 6, "steps": 6, "batch_size": 2},
        "memory_budget": "64MiB",
    }
    whole = speq.train_head(model, texts, out=tmp_path / "whole", **options)  # type: ignore[arg-type]
    wanted = (whole.folder / "head.safetensors").read_bytes()
    monkeypatch.setattr(command, "SAVE_S", -1.0)
    monkeypatch.setattr(command, "GROUP", 2)
    out, calls = tmp_path / "parts", {"features": 0, "steps": 0}

    def counted(name: str, function: Callable[..., Any], stops: tuple[int, ...]) -> Any:
        def call(*given: Any) -> Any:
            calls[name] += 1
            if calls[name] in stops:
                raise KeyboardInterrupt
            return function(*given)

        return call

    monkeypatch.setattr(command, "window_of", counted("features", window_of, (2, 5)))
    monkeypatch.setattr(Trainer, "step", counted("steps", Trainer.step, (3, 6)))
    for _ in range(4):
        with pytest.raises(KeyboardInterrupt):
            speq.train_head(model, texts, out=out, **options)  # type: ignore[arg-type]
        assert not (out / "head.safetensors").exists()
    with pytest.raises(SpeqError, match="with other texts or options"):
        speq.train_head(model, texts, out=out, **(options | {"seed": 1}))  # type: ignore[arg-type]
    made = speq.train_head(model, texts, out=out, **options)  # type: ignore[arg-type]
    assert (out / "head.safetensors").read_bytes() == wanted
    # Windows that were on the disk were not made again, nor steps that were saved taken again.
    assert calls == {"features": 6 + 2 + 1, "steps": 6 + 2}
    ours = {name: made.report[name] for name in ("windows", "steps", "acceptance")}
    assert ours == {name: whole.report[name] for name in ours}
    assert [each["taken"] for each in made.report["losses"]] == [*range(1, 7)]


def test_minutes_choose_windows_and_steps(
    model: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that goes on by a second with each look."""
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    monkeypatch.setattr("speq.training.train_head.monotonic", clock)
    made = speq.train_head(
        model, texts, minutes=1.2, width=8, sequence_length=16, memory_budget="64MiB"
    )
    # A quarter of 72 looks goes to features, one look each, and one look to a step.
    assert made.report["windows"] == pytest.approx(18, abs=3)
    assert made.report["steps"] == pytest.approx(0.95 * 72 - 18, abs=6)
    assert made.report["seconds"] == pytest.approx(72, rel=0.2)


def test_two_trainings_do_not_share_a_folder(model: Path, texts: Path, tmp_path: Path) -> None:
    work, refused = tmp_path / "out" / "training", "another process trains a head in"
    work.mkdir(parents=True)
    with lock_folder(work, "never said"), pytest.raises(SpeqError, match=refused):
        speq.train_head(model, texts, out=tmp_path / "out")
    with lock_folder(work, "never said"):
        assert [*work.iterdir()] == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"sequence_length": 512}, "the model's limit is 511"),
        ({"sequence_length": 500, "texts": "short"}, "fewer than 500 tokens"),
        ({"branches": 1, "contrast": "on"}, "of one branch has no contrast"),
        ({"memory_budget": "1KiB"}, "memory budget 1 KiB is too small"),
    ],
)
def test_what_cannot_be_trained(
    options: dict[str, Any], sentence: str, model: Path, texts: Path, tmp_path: Path
) -> None:
    short = tmp_path / "short"
    short.mkdir()
    (short / "a.txt").write_text("a few words")
    folder = short if options.pop("texts", None) else texts
    given = {"width": 8, "windows": 2, "steps": 1, "sequence_length": 32} | options
    with pytest.raises(SpeqError, match=sentence):
        speq.train_head(model, folder, out=tmp_path / "out", **given)
