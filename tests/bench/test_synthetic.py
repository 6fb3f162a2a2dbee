"""What-if runs: drafted tokens stand as often as one says, and the output stays exact."""

from collections.abc import Callable
from pathlib import Path

import pytest

from speq import Generator
from speq.bench.runs import tpot
from speq.bench.synthetic import synthetic_acceptance
from speq.errors import SpeqError
from tests.helpers.tiny_models import greedy_tokens, load_plain

Folder = Callable[[str], Path]
TEXT, TOKENS = "A long run, to count in.", 96
FAMILY = "qwen3_moe"


@pytest.fixture(scope="session")
def wanted(tiny: Folder) -> list[int]:
    """What transformers generates."""
    generator = Generator.from_pretrained(tiny(FAMILY), "1GiB", draft="none")
    prompt_token_ids = generator.encode(TEXT)
    generator.close()
    return greedy_tokens(load_plain(tiny(FAMILY)), prompt_token_ids, TOKENS)


@pytest.mark.wide
@pytest.mark.parametrize(("acceptance", "draft_length"), [(0.0, 3), (0.5, 1), (0.8, 4), (1.0, 4)])
def test_tokens_are_exact_and_stand_as_often_as_is_said(
    acceptance: float, draft_length: int, tiny: Folder, wanted: list[int]
) -> None:
    generator = Generator.from_pretrained(tiny(FAMILY), "1GiB", draft_length=draft_length)
    own = generator.generate(TEXT, max_new_tokens=24, ignore_eos=True)
    with synthetic_acceptance(generator, [TEXT], TOKENS, acceptance):
        engine = generator.runtime.engine
        made = generator.generate(TEXT, max_new_tokens=TOKENS, ignore_eos=True)
        assert generator.runtime.engine is engine
        assert generator.last_run is not None
        steps = [step for step in generator.last_run.decode if step.draft_length]
    assert made.token_ids == wanted
    assert made.stats["draft_s"] > 0
    stood = sum(step.accepted for step in steps)
    tried = stood + sum(step.accepted < step.draft_length for step in steps)
    if acceptance in (0, 1):
        assert stood / tried == made.stats["acceptance_rate"] == acceptance
    else:  # Four deviations of the mean of so many draws.
        assert abs(stood / tried - acceptance) < 4 * (acceptance * (1 - acceptance) / tried) ** 0.5
    # Nothing is left of it: the draft is what it was.
    after = generator.generate(TEXT, max_new_tokens=24, ignore_eos=True)
    assert after.stats["acceptance_rate"] == own.stats["acceptance_rate"]
    assert after.token_ids == wanted[:24]
    generator.close()


def test_a_seed_chooses_which_tokens_stand(tiny: Folder) -> None:
    generator = Generator.from_pretrained(tiny(FAMILY), "1GiB", draft_length=1)

    def stood(seed: int) -> list[int]:
        with synthetic_acceptance(generator, [TEXT], 40, 0.5, seed):
            generator.generate(TEXT, max_new_tokens=40, ignore_eos=True)
        assert generator.last_run is not None
        return [step.accepted for step in generator.last_run.decode]

    assert stood(0) == stood(0) != stood(1)
    generator.close()


def test_what_it_is_not_for_is_refused(tiny: Folder) -> None:
    generator = Generator.from_pretrained(tiny(FAMILY), "1GiB", draft_length=2)
    own = generator.runtime.engine.drafters[0]
    with pytest.raises(SpeqError, match="synthetic_acceptance is 2; it must be from 0 to 1"):
        synthetic_acceptance(generator, [TEXT], 8, 2).__enter__()
    chooses = own.next_tokens  # type: ignore[attr-defined]
    with synthetic_acceptance(generator, [TEXT], 8, 0.5):
        with pytest.raises(SpeqError, match="for greedy texts and this one is drawn or penalised"):
            generator.generate(TEXT, max_new_tokens=8, temperature=1.0)
        with pytest.raises(SpeqError, match="this one is not among them; give its prompt before"):
            generator.generate("Another", max_new_tokens=8)
    assert generator.runtime.engine.drafters[0].next_tokens is chooses  # type: ignore[attr-defined]
    generator.close()
    ngram = Generator.from_pretrained(tiny(FAMILY), "1GiB", draft_length=2, drafter="ngram")
    with pytest.raises(
        SpeqError, match="cached and head and another one is asked for; leave draft"
    ):
        synthetic_acceptance(ngram, [TEXT], 8, 0.5).__enter__()
    ngram.close()


def test_rows_and_titles_say_so(tiny: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    settings = tpot.Settings(
        budgets=("8MiB",),
        draft_lengths=("0", "4"),
        num_prompts=1,
        max_new_tokens=12,
        rounds=1,
        synthetic_acceptance=1,
        run={"dtype": "float32", "profile": "none"},
    )
    report = tpot.run(str(tiny(FAMILY)), settings)
    assert report.settings["synthetic_acceptance"] == 1
    assert [row["synthetic_acceptance"] for row in report.rows] == [None, 1]
    assert [row["acceptance_rate"] for row in report.rows] == [None, 1]
    tpot.show(report)
    (note,) = tpot.notes(report)
    for shown in (capsys.readouterr().out, note):
        assert "WHAT-IF: acceptance set to 1" in shown
    with pytest.raises(SpeqError, match="synthetic_acceptance is 2; it must be from 0 to 1"):
        tpot.Settings(budgets=("8MiB",), synthetic_acceptance=2)
