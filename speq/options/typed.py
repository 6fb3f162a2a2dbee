"""Options as keyword arguments, for type checkers and editors.

Written by `python -m tools.options` from the dataclasses that declare them; a test compares.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict


class _RunPlanTune(TypedDict, total=False):
    host_budget: str | int | None
    """On a GPU: host memory for exact experts, such as 32GiB; those beyond it stay on disk.
    Default: 80% of what is free.
    """
    context_length: int | None
    """Tokens that the KV cache holds. Default: what each request needs."""
    max_batch: int
    """Sequences that run as one batch, at most. Each has a KV cache of the whole context."""
    dtype: str
    """Compute dtype; auto is the checkpoint's."""
    dense: str
    """Form of weights outside the experts: raw (uncompressed), lossless (about 11 bits a bfloat16
    weight), residual (about 9 bits, read over a draft's codes of them), or auto: lossless if it
    was measured to be no slower, or is expected to gain more by the memory that it saves.
    """
    peer_budget: str | Sequence[str | int] | None
    """On a GPU: memory of further GPUs of its kind for exact experts, of each in turn, such as
    8GiB,8GiB. They compute those that they hold. Tokens are the same. Default: none.
    """


class _RunTune(TypedDict, total=False):
    prefix_reuse: str
    """What a sequence reuses of the KV cache of an earlier one with the same beginning: chunks
    (whole chunks of its prompt, bit for bit what running them anew gives), tokens (all tokens,
    the answer's too; in 16 bits the last bits may differ, since other passes computed them) or
    none.
    """
    prefix_cache: str | Path
    """Where prompts' chunks are kept that no KV cache holds any more, to be read in place of
    running them again: none, auto (files in ~/.cache/speq that end with the run), or a folder,
    for later runs as well.
    """
    prefix_cache_limit: str | int
    """Most bytes of prefix_cache; what was used longest ago goes."""
    sums: str
    """Order in which exact products are added up: canonical (one order, that of GPUs, so that an
    expert has the same bits wherever it runs), fast (pairs of BF16 first, where the processor
    multiplies such), or auto: canonical on a GPU, whose processor may compute experts for it,
    and fast on the CPU.
    """
    graphs: str
    """Passes that are recorded and run as a whole, as graphs of a GPU and as lists of ops on the
    CPU: auto (all but those of prompts) or none.
    """
    codec: str
    """Form of exact experts in slots. auto is the codec of a packed model, or else what the budget
    asks for.
    """
    packed_copy: str
    """A packed copy of published experts in ~/.cache/speq/experts: auto or none. auto writes one
    during a run with codec auto whose experts are in bfloat16, take 1 GiB or more and are not
    all in slots, or are encoded. That run reads what is written so far, and later ones the
    complete copy. `speq cache` lists and removes copies.
    """
    verify_reads: bool
    """Compare experts with the checksums of a pack or a packed copy at every read, not only at the
    first.
    """
    cache_policy: str
    """Which expert leaves when its slot is needed."""
    prefetch: str
    """Which experts come before they are needed."""
    reader_threads: int | str | None
    """Experts read from disk at a time: a number, or auto: the fewest that are enough, by a survey
    of the disk in a second or two, which is kept.
    """
    host_compute: str
    """On a GPU, whether the processor computes missing experts out of host memory while others are
    copied: auto (as many as measured rates say) or none. Tokens are the same.
    """
    expert_budget: int | str | None
    """NOT EXACT: the most experts of a layer that a verification of a draft may ask for, or such a
    share of them (50%). Experts in slots are free besides.
    """
    expert_floor: float | None
    """NOT EXACT: a verification of a draft may ask for an expert only if it holds at least this
    share of the layer's routing weight. Experts in slots are free.
    """
    expert_policy: str
    """Under an expert budget, what tokens do without the experts outside it: substitute (choose
    again among those inside) or truncate (do with the rest).
    """
    expert_ranking: str
    """Under an expert budget, what ranks experts: router (what the tokens want) or static
    (expert_counts).
    """
    expert_counts: str | Path | None
    """Counts for the static ranking, which `python -m bench.lab.hit_rate --counts` writes."""
    expert_rows: str
    """Under an expert budget, how drafted tokens count: reach (by the chance that they are
    accepted) or equal.
    """
    expert_residents: str
    """Under an expert budget, how experts in slots count: free, or ranked as all others."""
    expert_audit: float
    """Under an expert budget, the share of verifications that run exactly as well, to measure what
    it costs. Their exact tokens are kept.
    """
    draft_dense: str
    """Layers of the draft beside the experts that use INT4 codes as well: none, shared (shared
    experts and dense MLPs), attention (these and attention) or all (and the head, in eight
    bits). auto is all.
    """
    draft_nodes: int | None
    """Let int4, cached or head draft trees of at most so many tokens, with as many passes as tokens
    are drafted per step. With draft length auto the governor chooses between trees and chains.
    Default: chains.
    """
    prune_rows: str
    """Give up drafted tokens during a verification if their experts cost more than they are worth:
    on, off, or auto (for trees). The output does not change.
    """
    tokenizer: str | Path | None
    """Folder with the tokenizer to use in place of the model's own."""
    chat_template: str | Path | None
    """Jinja template of chats to use in place of the model's own."""
    tool_syntax: str
    """Form in which the model calls tools; auto is the one that its chat template shows."""


class _RunTrainHeadPlanTune(TypedDict, total=False):
    device: str
    """Where to compute."""


class _RunPlan(TypedDict, total=False):
    profile: str | Path
    """The profile of `speq tune` to plan by: auto (the one kept for this model, device and budget),
    none, or a file.
    """
    draft_experts: int | str | None
    """Let the INT4 copy hold only so many experts of each layer, or such a share (50%): those used
    most, by draft_counts. Drafts choose among these. auto: all, half or a quarter, by what is
    expected. Default: all.
    """
    draft_counts: str | Path | None
    """With draft_experts: counts of how often each expert is used, which `python -m
    bench.lab.hit_rate --counts` writes. Default: what `speq tune` kept of the model.
    """
    head: str | Path
    """The head of drafter head: auto (.speq/head in the model's folder), mtp (the MTP layer of the
    model's own checkpoint), or a folder: what `speq train-head` wrote elsewhere, or a published
    EAGLE-3 head in safetensors.
    """


class _RunPackTune(TypedDict, total=False):
    draft: str | Path
    """Source of the INT4 copy of the experts: auto, none, or the folder or hub id of a GPTQ
    checkpoint, or of a checkpoint to round.
    """


class RunOptions(
    _RunPlanTune, _RunTune, _RunTrainHeadPlanTune, _RunPlan, _RunPackTune, total=False
):
    drafter: str
    """What proposes tokens. auto is the INT4 copy or a head beside the model, by what is expected,
    and ngram where a sequence repeats itself and that pays.
    """
    draft_length: int | str | None
    """Tokens drafted per step: a number, or auto: chosen by measurement, step by step."""
    tpot_slo_ms: float | None
    """With draft length auto: time per token, at most, in milliseconds."""
    latency_slo_ms: float | None
    """With draft length auto: time until the first tokens after the prompt's, and between bursts of
    tokens, at most, in milliseconds.
    """


class SamplingOptions(TypedDict, total=False):
    max_new_tokens: int
    """Tokens to generate at most."""
    temperature: float
    """How freely tokens are drawn; 0 is greedy."""
    top_p: float
    """Draw from the likeliest tokens up to this mass."""
    top_k: int
    """Draw from this many likeliest tokens; 0: all."""
    min_p: float
    """Draw from tokens at least this likely, as a share of the likeliest; 0: all."""
    repetition_penalty: float
    """Divides positive logits of all earlier tokens, the prompt's too, and multiplies negative ones
    (arXiv:1909.05858); 1: off.
    """
    presence_penalty: float
    """Taken off the logit of each token that was generated before; 0: off."""
    frequency_penalty: float
    """Taken off for each time that a token was generated before; 0: off."""
    seed: int | None
    """Makes draws repeatable; default: another one each time."""
    stop: str | Sequence[str] | None
    """End before this text."""
    ignore_eos: bool
    """Go on past an end of text."""


class PackOptions(_RunPackTune, total=False):
    codec: str
    """How experts are written: raw, their own words; lossless: smaller, bit for bit the same;
    residual: smaller still, over a draft's codes and with that draft; auto is raw.
    """
    mirror: str | Path | None
    """Folder on another disk that gets the experts too; runs read from both."""
    stripe: str | Path | None
    """Folder on another disk that gets a part of the experts, by how fast both disks read; runs
    need both.
    """


class QuantizeOptions(TypedDict, total=False):
    bits: int
    """Bits of a code: 4, and no other."""
    group_size: int
    """Inputs that share a scale; -1: all of them."""
    method: str
    """gptq, or rtn: rounding to nearest, as the draft auto does."""
    column_order: str
    """In which order columns are quantised: static (the most active first, in groups of
    neighbours), activation (groups follow the order too, desc_act, which loaders must undo) or
    given.
    """
    codes: str
    """free, or decodable: only those that tell all of the exact bfloat16 word but its low byte;
    auto: decodable for a model in bfloat16, free for others.
    """
    dense: bool
    """Quantise attention, shared experts and dense MLPs as well, for drafts that run them on codes.
    """
    damp: float
    """Added to a Hessian's diagonal, as a share of its mean."""
    samples: int
    """Windows of text to calibrate on, at most."""
    sequence_length: int
    """Tokens of each window."""
    seed: int
    """Chooses windows of the text."""
    out: str | Path | None
    """Folder to write: a GPTQ checkpoint; default: .speq/gptq in the model's own, where the draft
    auto finds it.
    """
    calibration: str | Path | None
    """JSON Lines with a `prompt` or `text` in each row, or a text file; default: our own prompts,
    which are few.
    """
    memory_budget: str | int | None
    """Memory for all of it, such as 8GiB; default: 3/4 of what is free."""


class TrainHeadOptions(_RunTrainHeadPlanTune, total=False):
    width: int | None
    """Width of each branch's MLP; default: the model's hidden size."""
    branches: int
    """MLPs side by side."""
    contrast: str
    """Whether the branches' contrast drafts the token after the next, without a pass of its own: on
    or off; auto: on with two branches.
    """
    sequence_length: int
    """Tokens of a window of text, and how far the head looks back."""
    batch_size: int
    """Windows in a step."""
    token_share: float
    """Share of a window's positions whose tokens are trained on, other ones in each step. Features
    are at all positions. Tokens cost most of a step.
    """
    routes: str
    """Whether the head names experts too, in layers where it finds more of them than the layer's
    own router does a layer early: on or off.
    """
    learning_rate: float
    """The highest, of a cosine schedule."""
    seed: int
    """Of the first weights, the texts' order and the noise."""
    minutes: float
    """Time for all of it, about: features take a quarter, and steps what is left."""
    windows: int | None
    """Windows of text to train on; default: as many as the minutes allow."""
    steps: int | None
    """Steps to train; default: as many as the minutes allow."""
    out: str | Path | None
    """Folder to write; default: .speq/head in the model's own, where drafter head finds it."""
    memory_budget: str | int | None
    """Memory for the model while features are made, such as 8GiB; default: half of what is free."""


class PlanOptions(_RunPlanTune, _RunTrainHeadPlanTune, _RunPlan, total=False):
    preset: str | None
    """A card or machine by name; `?` lists them."""
    link: str | float | None
    """Bandwidth to load experts (PCIe or a disk), such as 25GB/s."""
    memory_bandwidth: str | float | None
    """Bandwidth of the memory that holds weights, such as 900GB/s."""
    host_bandwidth: str | float | None
    """Bandwidth of the host's memory beside a card, such as 70GB/s. The processor then computes
    missing experts while others are copied. Default: all are copied.
    """
    routes: str | Path | None
    """Recorded routes (`python -m bench.lab.hit_rate --routes`) to count experts by."""
    locality: str | None
    """Routes to count experts by; default: those of --routes or of the profile, or else of a known
    model with about as many experts.
    """
    acceptance: float | None
    """Share of drafted tokens that are accepted; default: measured, or 0.9."""


class TuneOptions(_RunPlanTune, _RunTune, _RunTrainHeadPlanTune, _RunPackTune, total=False):
    prompts: str | Path | None
    """JSON Lines with a `prompt` in each row; default: our own."""
    num_prompts: int
    """How many of the prompts."""
    max_new_tokens: int
    """Tokens to generate for each prompt."""
    out: str | Path | None
    """File for the profile; default: kept in the user's cache folder."""
