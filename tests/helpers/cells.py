"""Cells of the products that exactness is tested over, and the models they run."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speq import Generator
from speq.experts.expert_store import SafetensorsExpertStore
from speq.experts.pack import pack
from speq.heads.head_file import head_path
from speq.models.opened import open_model
from speq.quantizing.models import packing_of
from speq.stats import StepStats
from tests.helpers.eagle_files import write_random_eagle
from tests.helpers.gptq_files import Packing, write_gptq
from tests.helpers.heads import write_random_head
from tests.helpers.mtp_files import write_mtp
from tests.helpers.random_rows import RandomRows
from tests.helpers.smallest import two_slot_budget
from tests.helpers.tiny_models import BIASED, write_perturbed

Folder = Callable[[str], Path]


@dataclass(frozen=True, slots=True)
class Cell:
    """draft_length: None is auto."""

    draft_length: int | None
    budget: str
    draft: str
    store: str = "plain"
    readers: int = 2
    cache_policy: str = "lru"
    prefetch: str = "none"
    codec: str = "raw"
    drafter: str = "auto"
    graphs: str = "auto"
    dense: str = "raw"
    trees: str = "none"
    head: str = "auto"
    draft_experts: int | float | None = None

    @property
    def draft_nodes(self) -> int | None:
        return {"none": None, "small": 6, "large": 24, "pruned": 24}[self.trees]


@dataclass(frozen=True, slots=True)
class Folders:
    """Where small models lie, and their drafts and packs once a cell asks for them.

    Compact codecs are of bfloat16; all others run in float32, as the models are stored.
    """

    root: Path
    float32: Folder
    bfloat16: Folder

    def published(self, family: str, cell: Cell) -> Path:
        return (self.float32 if cell.codec == "raw" else self.bfloat16)(family)

    def draft(self, family: str, cell: Cell) -> str:
        """The draft option; where a pack has its draft in it, what it is packed with."""
        if cell.draft == "own":
            return "auto"
        model = self.published(family, cell)
        path = self.root / f"{family}-{model.parent.name}-{cell.draft}"
        if not path.exists() and cell.draft == "poor":
            write_perturbed(path, model, noise=0.5)
        elif not path.exists():
            desc_act = family not in BIASED
            write_gptq(path, model, Packing(2, desc_act=desc_act, group_size=16))
        return str(path)

    def of(self, family: str, cell: Cell) -> tuple[Path, str]:
        """The model a cell runs, and its draft option; with a head beside it, or a layer of its own
        that predicts tokens ahead, which know nothing, where the cell drafts with one.
        """
        model, draft = self.published(family, cell), self.draft(family, cell)
        if cell.head == "mtp":
            path = self.root / f"{family}-mtp"
            return path if path.exists() else write_mtp(path, model), draft
        if cell.drafter == "head" and cell.head == "auto" and not head_path(model).exists():
            write_random_head(model, names=True)
        if cell.store == "plain":
            return model, draft
        tied = cell.codec == "residual"
        path = self.root / f"{family}-packed-{cell.codec}{f'-{cell.draft}' if tied else ''}"
        if not path.exists():
            opened = open_model(model)
            assert isinstance(opened.store, SafetensorsExpertStore)
            packing = packing_of(opened, cell.codec, draft if tied else "auto")
            pack(opened.checkpoint, opened.store, path, packing)
            if packing.draft is not None:
                packing.draft.close()
            opened.close()
        return path, "auto" if tied else draft


def head_of(model: Path, cell: Cell) -> str:
    """The head option: a published head that knows nothing, where the cell drafts with one."""
    if cell.head != "eagle":
        return cell.head
    path = model / ".speq" / "eagle"
    if not path.exists():
        opened = open_model(model)
        shape = opened.shape
        opened.close()
        write_random_eagle(path, shape.hidden_size, shape.vocab_size, shape.vocab_size // 2)
    return str(path)


def outcomes(steps: list[StepStats]) -> set[str]:
    """Which of fully accepted, partly accepted and wholly rejected drafts occurred."""
    seen = set()
    for step in steps:
        if step.draft_length:
            full = step.accepted == step.draft_length
            seen.add("full" if full else "partial" if step.accepted else "rejected")
    return seen


def loaded(
    cell: Cell,
    model: Path,
    draft: str,
    dtype: str,
    context: int,
    device: str = "cpu",
    **options: Any,
) -> tuple[Generator, int]:
    """The generator of a cell, in the budget that its slots take; and the experts of its model.

    options  of the run, beside those of the cell
    """
    head = head_of(model, cell)
    budget = 1 << 30
    if cell.budget != "all":
        budget, demand = two_slot_budget(
            model,
            context,
            dtype,
            cell.draft_length,
            cell.readers,
            draft,
            cell.codec,
            cell.drafter,
            device=device,
            graphs=cell.graphs,
            dense=cell.dense,
            draft_nodes=cell.draft_nodes,
            max_batch=options.get("max_batch", 1),
            head=head,
            draft_experts=cell.draft_experts,
        )
        if cell.budget == "half":
            budget += (demand.num_experts // 2 - 2) * demand.slot_bytes
    generator = Generator.from_pretrained(
        model,
        budget,
        device=device,
        dtype=dtype,
        context_length=context,
        draft=draft,
        draft_length=cell.draft_length,
        reader_threads=cell.readers,
        cache_policy=cell.cache_policy,
        prefetch=cell.prefetch,
        codec=cell.codec,
        drafter=cell.drafter,
        graphs=cell.graphs,
        dense=cell.dense,
        draft_nodes=cell.draft_nodes,
        head=head,
        draft_experts=cell.draft_experts,
        **options,
    )
    if cell.trees == "pruned":
        generator.runtime.engine.offload.rows.policy = RandomRows(seed=5)
    return generator, generator.runtime.demand.num_experts
