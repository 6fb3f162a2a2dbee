"""Checks of configurations: what a family's models may not have, or must have together."""

from typing import Any

from speq.errors import CheckpointError, UnsupportedError
from speq.kernels.ops import CLAMP_ALPHA
from speq.models.family import CLAMP_LIMIT


def check_groups(config: Any, num_experts: int, where: object) -> None:
    """Raise SpeqError unless a token's experts can be chosen within some of equal groups."""
    groups, kept = getattr(config, "n_group", None) or 0, getattr(config, "topk_group", None) or 0
    if not (1 <= kept <= groups and num_experts % groups == 0):
        raise CheckpointError(
            f"{where} has n_group {groups} and topk_group {kept}; n_group must divide the "
            f"{num_experts} experts of a layer, and topk_group must be from 1 to n_group"
        )


def check_deepseek_v2(config: Any, num_experts: int, where: object) -> None:
    """Raise SpeqError for a topk_method that is unknown, or lacks its groups."""
    method = getattr(config, "topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise CheckpointError(
            f"{where} has topk_method {method!r}; it must be greedy or group_limited_greedy"
        )
    if method != "greedy":
        check_groups(config, num_experts, where)


def check_clamped(config: Any, num_experts: int, where: object) -> None:
    """Raise SpeqError for a clamped activation of other numbers than the family has."""
    for name, wanted in (("swiglu_limit", CLAMP_LIMIT), ("swiglu_alpha", CLAMP_ALPHA)):
        given = getattr(config, name, wanted)
        if given != wanted:
            raise CheckpointError(
                f"{where} has {name} {given!r}; its family's experts run with {wanted}: give a "
                "model that was published with it"
            )


def check_blocks(config: Any, num_experts: int, where: object) -> None:
    """Raise SpeqError as `check_clamped` does, and for an indexer whose heads do not each select
    for as many heads of keys.
    """
    check_clamped(config, num_experts, where)
    for name in ("index_block_size", "index_topk_blocks"):
        if getattr(config, name) < 1:
            raise CheckpointError(
                f"{where} has {name} {getattr(config, name)}; it must be at least 1: download "
                "config.json again, or correct that value"
            )
    heads, selections = config.num_key_value_heads, config.index_n_heads
    if selections < 1 or heads % selections:
        raise CheckpointError(
            f"{where} has index_n_heads {selections}; it must divide the {heads} heads of keys: "
            "download config.json again, or correct that value"
        )


def check_nemotron(config: Any, num_experts: int, where: object) -> None:
    """Raise SpeqError for groups as `check_pairs` does, and for what no published model of the
    family has.
    """
    check_pairs(config, num_experts, where)
    for name, wanted in (
        *(("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")),
        *(("mlp_bias", False), ("use_bias", False), ("attention_bias", False)),
    ):
        given = getattr(config, name)
        if given != wanted:
            raise UnsupportedError(
                f"{where} has {name} {given!r}; speq knows models of family nemotron_h with "
                f"{wanted!r}: give one that was published so"
            )


def check_indexers(config: Any, num_experts: int, where: object) -> None:
    """Raise SpeqError for groups as `check_pairs` does, for sizes of indexers, and for a first
    layer that is to use the choice of one before it.
    """
    check_pairs(config, num_experts, where)
    for name, least in (
        *(("index_topk", 1), ("index_n_heads", 1)),
        ("index_head_dim", config.qk_rope_head_dim),
    ):
        given = getattr(config, name)
        if given < least:
            raise CheckpointError(
                f"{where} has {name} {given}; it must be at least {least}: download config.json "
                "again, or correct that value"
            )
    types = getattr(config, "indexer_types", None) or ["full"]
    if types[0] != "full" or len({*types} - {"full", "shared"}):
        raise CheckpointError(
            f"{where} has indexer_types {types[:8]}; each must be full or shared, and the first "
            "full; download config.json again, or correct that value"
        )


def check_pools(config: Any, num_experts: int, where: object) -> None:
    """Raise SpeqError for groups as `check_pairs` does, for rows that may see nothing, and for a
    layer that is to use a selection where the layer before has none.
    """
    check_pairs(config, num_experts, where)
    if not config.index_kpool_always_select_tail:
        raise UnsupportedError(
            f"{where} has index_kpool_always_select_tail false, with which the first tokens see "
            "nothing; give a model that was published with true"
        )
    if config.index_topk < config.index_kpool or config.index_n_heads < 1:
        raise CheckpointError(
            f"{where} has index_topk {config.index_topk}, index_kpool {config.index_kpool} and "
            f"index_n_heads {config.index_n_heads}; a token must see at least one pool, by at "
            "least one head: download config.json again, or correct that value"
        )
    indexed, before = "indexed_attention", ("", "")
    for at, layer in enumerate(zip(config.layer_types, config.indexer_types, strict=False)):
        if layer == (indexed, "shared") and before != (indexed, "full"):
            raise CheckpointError(
                f"{where} has indexer_types {config.indexer_types[:8]}, and layer {at} is to use "
                "the selection of the layer before, which has no indexer; download config.json "
                "again, or correct that value"
            )
        before = layer


def check_deepseek_v4(config: Any, num_experts: int, where: object) -> None:
    """Raise SpeqError for sizes of windows and indexers, and for another rule of the routers."""
    rates, kinds = config.compress_rates, {*config.layer_types} - {"sliding_attention"}
    sizes = {f"compress_rates of {kind}": rates.get(kind) for kind in sorted(kinds)}
    for name in ("index_topk", "index_n_heads", "index_head_dim", "sliding_window", "hc_mult"):
        sizes[name] = getattr(config, name)
    for name, given in sizes.items():
        if not isinstance(given, int) or given < 1:
            raise CheckpointError(
                f"{where} has {name} {given!r}; it must be at least 1: download config.json "
                "again, or correct that value"
            )
    if not config.swiglu_limit > 0:
        raise CheckpointError(
            f"{where} has swiglu_limit {config.swiglu_limit}; it must be above 0: download "
            "config.json again, or correct that value"
        )
    for name, wanted in (("scoring_func", "sqrtsoftplus"), ("attention_bias", False)):
        given = getattr(config, name)
        if given != wanted:
            raise UnsupportedError(
                f"{where} has {name} {given!r}; speq knows models of family deepseek_v4 with "
                f"{wanted!r}: give one that was published so"
            )
    for label, rope in config.rope_parameters.items():
        kind = rope.get("rope_type") if isinstance(rope, dict) else "default"
        if kind not in ("default", "yarn", "linear"):
            raise UnsupportedError(
                f"{where} has rotary embeddings of type {kind!r} ({label}), and speq knows models "
                "of family deepseek_v4 with default, yarn or linear: give one that was published so"
            )


def check_step(config: Any, num_experts: int, where: object) -> None:
    """Raise SpeqError for gates of channels, and for tokens that see later ones."""
    for name, known in (
        ("gating", (True, "per-head")),
        ("use_bidirectional_attention", (False, None)),
    ):
        given = getattr(config, name)
        if given not in known:
            raise UnsupportedError(
                f"{where} has {name} {given!r}; speq knows models of family step3p7 with "
                f"{known[0]!r}: give one that was published so"
            )


def check_gemma4(config: Any, num_experts: int, where: object) -> None:
    """Raise SpeqError for parts that other models of the family have, and speq does not run."""
    for name, what in (
        ("num_kv_shared_layers", "layers that share the keys and values of others"),
        ("hidden_size_per_layer_input", "embeddings of tokens for each layer"),
    ):
        given = getattr(config, name)
        if given:
            raise UnsupportedError(
                f"{where} has {name} {given!r}, {what}, which speq does not run; give a model "
                "without them, such as Gemma-4-26B-A4B"
            )
    if config.use_bidirectional_attention == "all":
        raise CheckpointError(
            f"{where} has use_bidirectional_attention 'all', with which tokens see later ones; "
            "give a model that generates text"
        )


def check_pairs(config: Any, num_experts: int, where: object) -> None:
    """Raise SpeqError for groups that are too small: two experts rank a group, and top-k chooses
    among those of the selected groups.
    """
    check_groups(config, num_experts, where)
    size, top_k = num_experts // config.n_group, config.num_experts_per_tok
    if size < 2 or config.topk_group * size < top_k:
        raise CheckpointError(
            f"{where} has n_group {config.n_group} and topk_group {config.topk_group}, which "
            f"leave {config.topk_group} groups of {size} experts to choose from; a group must "
            f"have at least 2, and those chosen from at least num_experts_per_tok, {top_k}"
        )


def check_mistral4(config: Any, num_experts: int, where: object) -> None:
    """Raise SpeqError for groups as `check_pairs` does, and without what queries grow by."""
    check_pairs(config, num_experts, where)
    for name in ("llama_4_scaling_beta", "original_max_position_embeddings"):
        given = config.rope_parameters.get(name)
        if not isinstance(given, int | float):
            raise CheckpointError(
                f"{where} has {name} {given!r} in rope_parameters; it must be a number: download "
                "it again"
            )
