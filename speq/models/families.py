"""Model families: one entry for each, with what transformers' own classes do not say."""

from typing import Any

from speq.errors import UnsupportedError
from speq.experts.expert_names import PROJECTIONS, ExpertNames, Stacked
from speq.files.text_part import TextModelPart
from speq.kernels.ops import CLAMPED, SILU_BEFORE_LIMIT
from speq.layers.gates import (
    corrected_gate,
    deepseek_v2_gate,
    deepseek_v3_gate,
    deepseek_v4_gate,
    ernie_gate,
    gemma4_gate,
    laguna_gate,
    lfm2_gate,
    minimax_gate,
    mistral4_gate,
    normalized_gate,
    sparse_mixer,
)
from speq.layers.offloaded_experts import log_of_first
from speq.models.attention import (
    BESIDE_SINKS,
    cached_latents,
    gated_heads,
    gated_heads_by_tokens,
    heads_by_blocks,
    heads_by_layer,
    heads_of_layers,
    heads_of_some_layers,
    heads_of_windows,
    heads_with_sinks,
    indexed_latents,
    pooled_latents,
)
from speq.models.block_selection import BlockIndexer
from speq.models.compressed_attention import CompressedAttention, compressed_heads
from speq.models.delta_net import delta_states
from speq.models.family import BuiltAs, Family, swiglu_limit, swiglu_limits
from speq.models.family_checks import (
    check_blocks,
    check_clamped,
    check_deepseek_v2,
    check_deepseek_v4,
    check_gemma4,
    check_indexers,
    check_mistral4,
    check_nemotron,
    check_pairs,
    check_pools,
    check_step,
)
from speq.models.kimi_delta import kimi_states
from speq.models.mamba import check_mamba, mamba_states, nemotron_states
from speq.models.mtp_layer import ERNIE, HY_V3, deepseek_layer, qwen3_next_layer
from speq.models.ngram_layer import (
    TABLE_CLASS,
    NGramFeatures,
    ngram_states,
    with_table_on_disk,
)
from speq.models.pooled_attention import pooled_attention
from speq.models.short_conv import check_short_conv, conv_states
from speq.models.text_conversions import list_for_text
from speq.models.token_selection import TokenIndexer

# Names as published; transformers has the usual names for them.
MIXTRAL_NAMES = ExpertNames(
    blocks=("mlp", "block_sparse_moe"), projections=(PROJECTIONS, ("w1", "w3", "w2"))
)
PHIMOE_NAMES = ExpertNames(
    MIXTRAL_NAMES.blocks, routers=("router", "gate"), projections=MIXTRAL_NAMES.projections
)
HUNYUAN_NAMES = ExpertNames(routers=("gate", "gate.wg"))
AFMOE_NAMES = ExpertNames(routers=("router", "router.gate"))
GPT_OSS_NAMES = ExpertNames(routers=("router",))
# Names as published and as transformers saves them.
LFM2_NAMES = ExpertNames(
    blocks=("feed_forward",),
    projections=(MIXTRAL_NAMES.projections[1], PROJECTIONS),
    mlp="feed_forward",
)
GEMMA4_NAMES = ExpertNames(blocks=("",), routers=("router", "router.proj"))
HY_V3_RENAMED = (
    (".mlp.router.gate.", ".mlp.gate."),
    (".mlp.expert_bias", ".mlp.e_score_correction_bias"),
    (".mlp.shared_mlp.", ".mlp.shared_experts."),
)
CORRECTION = "e_score_correction_bias"
EXAONE_RENAMED = ((f".mlp.{CORRECTION}", f".mlp.gate.{CORRECTION}"),)
LAGUNA_RENAMED = (
    (f".mlp.experts.{CORRECTION}", f".mlp.gate.{CORRECTION}"),
    (".mlp.shared_expert.", ".mlp.shared_experts."),
)
MIMO_RENAMED = ((".self_attn.attention_sink_bias", ".self_attn.sinks"),)
GRANITE_NAMES = ExpertNames(
    blocks=("block_sparse_moe",), routers=("router",), mlp="block_sparse_moe"
)
STEP_NAMES = ExpertNames(blocks=("mlp", "moe"), apart="moe")
NEMOTRON_NAMES = ExpertNames(blocks=("mixer",), mlp="mixer")
GRANITE_RENAMED = (
    (".block_sparse_moe.input_linear.weight", ".block_sparse_moe.experts.gate_up_proj"),
    (".block_sparse_moe.output_linear.weight", ".block_sparse_moe.experts.down_proj"),
    (".block_sparse_moe.router.layer.", ".block_sparse_moe.router."),
)
STEP_RENAMED = (
    (".moe.router_bias", f".mlp.gate.{CORRECTION}"),
    (".moe.gate.", ".mlp.gate."),
    (".share_expert.", ".mlp.shared_experts."),
)
# Parts of a block that share its name on disk; dense layers are called as in the model.
MINIMAX_M3_BLOCK = ("experts", "gate", "shared_experts")
KIMI_RENAMED = (
    (".block_sparse_moe.", ".mlp."),
    *(
        (f".self_attn.{each}", f".self_attn.forget_gate.{each}")
        for each in ("f_a_proj.", "f_b_proj.", "dt_bias", "A_log")
    ),
)
# Names of parts of GLM-5.3's hyper-connections and gates.
GLM5_RENAMED = (
    *(
        (f".hc_{part}_{each}", f".{part}_hc.{each}")
        for part in ("attn", "ffn")
        for each in ("fn", "base", "scale")
    ),
    *KIMI_RENAMED[1:],
)
BAILING_RENAMED = (
    (".word_embeddings.", ".embed_tokens."),
    (".attention.dense.", ".self_attn.o_proj."),
    *(
        (f".attention.{each}", f".self_attn.forget_gate.{each}")
        for each in ("f_proj.", "dt_bias", "A_log")
    ),
    (".attention.", ".self_attn."),
    (".mlp.gate.expert_bias", f".mlp.gate.{CORRECTION}"),
)
SARVAM_RENAMED = (
    (".word_embeddings.", ".embed_tokens."),
    (".attention.dense.", ".self_attn.o_proj."),
    (".attention.query_layernorm.", ".self_attn.q_norm."),
    (".attention.key_layernorm.", ".self_attn.k_norm."),
    (".attention.", ".self_attn."),
    (".mlp.gate.expert_bias", f".mlp.gate.{CORRECTION}"),
)
MINIMAX_M3_RENAMED = (
    ("language_model.lm_head.", "lm_head."),
    (f".block_sparse_moe.{CORRECTION}", f".mlp.gate.{CORRECTION}"),
    *((f".block_sparse_moe.{each}.", f".mlp.{each}.") for each in MINIMAX_M3_BLOCK),
    *(
        (f".self_attn.index_{each}.", f".self_attn.indexer.{each}.")
        for each in ("q_proj", "k_proj", "q_norm", "k_norm")
    ),
)
DEEPSEEK_V4_NAMES = ExpertNames(projections=MIXTRAL_NAMES.projections)
DEEPSEEK_V4_RENAMED = (
    *(
        (f".attn.{on_disk}{each}", f".self_attn.compressor.{own}{renamed}")
        for on_disk, own in (("indexer.compressor.", "indexer."), ("compressor.", ""))
        for each, renamed in (
            *(("norm.", "kv_norm."), ("ape", "position_bias")),
            *(("wkv.", "kv_proj."), ("wgate.", "gate_proj.")),
        )
    ),
    (".attn.indexer.weights_proj.", ".self_attn.compressor.indexer.scorer.weights_proj."),
    (".attn.indexer.wq_b.", ".self_attn.compressor.indexer.q_b_proj."),
    *(
        (f".attn.{each}", f".self_attn.{renamed}")
        for each, renamed in (
            *(("norm.", "kv_norm."), ("q_norm.", "q_a_norm."), ("attn_sink", "sinks")),
            *(("wq_a.", "q_a_proj."), ("wq_b.", "q_b_proj."), ("wkv.", "kv_proj.")),
            *(("wo_a.", "o_a_proj."), ("wo_b.", "o_b_proj."), ("", "")),
        )
    ),
    (".ffn.gate.bias", f".mlp.gate.{CORRECTION}"),
    *(
        (f".ffn.shared_experts.{each}.", f".mlp.shared_experts.{own}.")
        for own, each in zip(*MIXTRAL_NAMES.projections, strict=True)
    ),
    *((".ffn.", ".mlp."), (".hc_attn_", ".attn_hc."), (".hc_ffn_", ".ffn_hc.")),
    *((".attn_norm.", ".input_layernorm."), (".ffn_norm.", ".post_attention_layernorm.")),
)
DEEPSEEK_V4_BARE = (
    *(("layers.", "model.layers."), ("embed.", "model.embed_tokens.")),
    *(("norm.", "model.norm."), ("hc_head_", "model.hc_head.hc_")),
)
# Types of configurations whose text_config says which family they are of.
WRAPPERS = ("mistral3",)
# Parts for images and audio.
MINIMAX_M3_BESIDE = ("vision_tower.", "multi_modal_projector.", "patch_merge_mlp.")
GEMMA4_BESIDE = tuple(
    f"model.{name}." for name in ("vision_tower", "audio_tower", "embed_vision", "embed_audio")
)

list_for_text("minimax_m3_vl", "minimax_m3_vl_text")
list_for_text("step3p7", "step3p5")

FAMILIES = {
    family.model_type: family
    for family in (
        Family("qwen2_moe", "Qwen2MoeExperts", typed_masks=True),
        Family("qwen3_moe", "Qwen3MoeExperts", window=True),
        Family(
            "qwen3_vl_moe",
            "Qwen3MoeExperts",
            stacked=Stacked.COLUMNS,
            text_part=TextModelPart(
                "qwen3_vl_moe_text", "model.language_model.", ("model.visual.",)
            ),
            # Its router divides by the sum whatever norm_topk_prob says.
            built_as=BuiltAs("qwen3_moe", {"norm_topk_prob": True}),
        ),
        Family(
            "qwen3_next",
            "Qwen3NextExperts",
            typed_masks=True,
            attention=gated_heads,
            states=delta_states,
            on_the_host="states of family qwen3_next are cut back by the host",
            predictor=qwen3_next_layer("Qwen3Next", "Qwen3NextRotaryEmbedding"),
        ),
        Family(
            "qwen3_5_moe",
            "Qwen3_5MoeExperts",
            gate=normalized_gate,
            typed_masks=True,
            attention=gated_heads,
            states=delta_states,
            on_the_host="states of family qwen3_5_moe are cut back by the host",
            predictor=qwen3_next_layer("Qwen3_5Moe", "Qwen3_5MoeTextRotaryEmbedding"),
            text_part=TextModelPart(
                "qwen3_5_moe_text", "model.language_model.", ("model.visual.",)
            ),
        ),
        Family(
            "qwen4_exp",
            "Qwen4ExpTextExperts",
            since="5.23",
            attention=gated_heads_by_tokens,
            attention_by=BESIDE_SINKS,
            stand_ins={"indexer": TokenIndexer, "ple": NGramFeatures},
            on_disk=(TABLE_CLASS, with_table_on_disk),
            streams="hc_count",
            states=ngram_states,
            last_norm="hyper_connection_mixer",
            on_the_host="tokens that layers of family qwen4_exp see are counted by the host",
            text_part=TextModelPart(
                "qwen4_exp_text",
                "model.language_model.",
                ("model.visual.",),
                integers=tuple(
                    f".ple_embedding.{each}"
                    for each in (
                        "layer_multipliers",
                        "ngram_heads_vocab_sizes",
                        "ngram_heads_offsets",
                    )
                ),
            ),
        ),
        Family("olmoe", "OlmoeExperts", expert_width="intermediate_size"),
        Family("flex_olmo", "FlexOlmoExperts", expert_width="intermediate_size", normed=True),
        Family(
            "mixtral",
            "MixtralExperts",
            names=MIXTRAL_NAMES,
            gate=normalized_gate,
            num_experts="num_local_experts",
            expert_width="intermediate_size",
            window=True,
        ),
        Family(
            "phimoe",
            "PhimoeExperts",
            names=PHIMOE_NAMES,
            gate=sparse_mixer,
            num_experts="num_local_experts",
            expert_width="intermediate_size",
            window=True,
            on_the_host="rotary embeddings of family phimoe make their frequencies on the host",
        ),
        Family(
            "deepseek_v2",
            "DeepseekV2Experts",
            gate=deepseek_v2_gate,
            num_experts="n_routed_experts",
            attention=cached_latents,
            check=check_deepseek_v2,
        ),
        Family(
            "glm4_moe",
            "Glm4MoeExperts",
            gate=deepseek_v3_gate,
            num_experts="n_routed_experts",
            check=check_pairs,
            predictor=deepseek_layer("Glm4Moe"),
        ),
        Family(
            "glm4v_moe",
            "Glm4MoeExperts",
            gate=deepseek_v3_gate,
            num_experts="n_routed_experts",
            check=check_pairs,
            text_part=TextModelPart("glm4v_moe_text", "model.language_model.", ("model.visual.",)),
            built_as=BuiltAs("glm4_moe", {"use_qk_norm": False}),
        ),
        Family(
            "glm4_moe_lite",
            "Glm4MoeLiteExperts",
            gate=deepseek_v3_gate,
            num_experts="n_routed_experts",
            attention=cached_latents,
            check=check_pairs,
            predictor=deepseek_layer("Glm4MoeLite", (("mlp_layer_types", "sparse"),)),
        ),
        Family(
            "deepseek_v3",
            "DeepseekV3Experts",
            gate=deepseek_v3_gate,
            num_experts="n_routed_experts",
            attention=cached_latents,
            check=check_pairs,
            predictor=deepseek_layer("DeepseekV3"),
        ),
        Family(
            "deepseek_v32",
            "DeepseekV32Experts",
            gate=deepseek_v3_gate,
            num_experts="n_routed_experts",
            since="5.23",
            typed_masks=True,
            attention=indexed_latents,
            check=check_indexers,
        ),
        Family(
            "deepseek_v4",
            "DeepseekV4Experts",
            names=DEEPSEEK_V4_NAMES,
            gate=deepseek_v4_gate,
            token_table="tid2eid",
            num_experts="n_routed_experts",
            streams="hc_mult",
            since="5.23",
            attention=compressed_heads,
            attention_by=BESIDE_SINKS,
            stand_ins={"self_attn": CompressedAttention},
            limit=swiglu_limit,
            check=check_deepseek_v4,
            halves=False,
            on_the_host="tokens that layers of family deepseek_v4 see are counted by the host",
            text_part=TextModelPart(
                "deepseek_v4",
                head="head.",
                renamed=DEEPSEEK_V4_RENAMED,
                bare=DEEPSEEK_V4_BARE,
                ids=(".tid2eid",),
            ),
        ),
        Family(
            "glm_moe_dsa",
            "GlmMoeDsaExperts",
            gate=deepseek_v3_gate,
            num_experts="n_routed_experts",
            since="5.23",
            typed_masks=True,
            attention=indexed_latents,
            check=check_indexers,
        ),
        Family(
            "glm5_next",
            "Glm5NextTextExperts",
            gate=deepseek_v3_gate,
            num_experts="n_routed_experts",
            since="5.23",
            typed_masks=True,
            attention=pooled_latents,
            attention_by=BESIDE_SINKS,
            stand_ins={"self_attn": pooled_attention},
            streams="hc_mult",
            limit=swiglu_limit,
            check=check_pools,
            states=kimi_states,
            on_the_host="tokens that layers of family glm5_next see are counted by the host",
            text_part=TextModelPart(
                "glm5_next_text",
                "model.language_model.",
                ("model.visual.",),
                renamed=GLM5_RENAMED,
            ),
            causal="Glm5NextTextModel",
        ),
        Family(
            "kimi_k25",
            "DeepseekV3Experts",
            gate=deepseek_v3_gate,
            num_experts="n_routed_experts",
            attention=cached_latents,
            check=check_pairs,
            text_part=TextModelPart(
                "kimi_k2",
                "language_model.model.",
                ("vision_tower.", "mm_projector.", "model.mm_projector."),
                "language_model.lm_head.",
            ),
            built_as=BuiltAs("deepseek_v3", {}),
        ),
        Family(
            "sarvam_mla",
            "DeepseekV3Experts",
            gate=deepseek_v3_gate,
            num_experts="n_routed_experts",
            since="5.24",
            attention=cached_latents,
            check=check_pairs,
            classes="deepseek_v3",
        ),
        Family(
            "sarvam_moe",
            "Glm4MoeExperts",
            gate=deepseek_v3_gate,
            num_experts="n_routed_experts",
            since="5.24",
            check=check_pairs,
            text_part=TextModelPart("sarvam_moe", renamed=SARVAM_RENAMED),
            classes="glm4_moe",
        ),
        Family(
            "dots1",
            "Dots1Experts",
            gate=deepseek_v3_gate,
            num_experts="n_routed_experts",
            typed_masks=True,
            check=check_pairs,
        ),
        Family(
            "solar_open",
            "SolarOpenExperts",
            gate=deepseek_v3_gate,
            num_experts="n_routed_experts",
            check=check_pairs,
        ),
        Family(
            "minimax_m2",
            "MiniMaxM2Experts",
            names=MIXTRAL_NAMES,
            router_inputs=("e_score_correction_bias",),
            gate=minimax_gate,
            num_experts="num_local_experts",
            expert_width="intermediate_size",
        ),
        Family(
            "minimax_m3_vl",
            "MiniMaxM3VLExperts",
            names=MIXTRAL_NAMES,
            gate=laguna_gate,
            num_experts="num_local_experts",
            expert_width="intermediate_size",
            scaled_by="routed_scaling_factor",
            since="5.23",
            attention=heads_by_blocks,
            attention_by=BESIDE_SINKS,
            stand_ins={"indexer": BlockIndexer},
            activation=CLAMPED,
            limit=swiglu_limit,
            check=check_blocks,
            on_the_host="tokens that layers of family minimax_m3_vl see are counted by the host",
            text_part=TextModelPart(
                "minimax_m3_vl_text",
                "language_model.model.",
                MINIMAX_M3_BESIDE,
                renamed=MINIMAX_M3_RENAMED,
            ),
        ),
        Family(
            "step3p7",
            "Step3p7Experts",
            names=STEP_NAMES,
            gate=laguna_gate,
            num_experts="n_routed_experts",
            scaled_by="moe_router_scaling_factor",
            since="5.23",
            typed_masks=True,
            attention=heads_by_layer,
            activation=SILU_BEFORE_LIMIT,
            limit=swiglu_limits,
            check=check_step,
            text_part=TextModelPart(
                "step3p5",
                beside=("vision_model.", "vit_large_projector."),
                renamed=STEP_RENAMED,
            ),
            causal="Step3p7TextModel",
        ),
        Family(
            "ernie4_5_moe",
            "Ernie4_5_MoeExperts",
            gate=ernie_gate,
            num_experts="moe_num_experts",
            predictor=ERNIE,
        ),
        Family(
            "hunyuan_v1_moe",
            "HunYuanMoEV1Experts",
            gate=normalized_gate,
            names=HUNYUAN_NAMES,
            expert_width="intermediate_size",
        ),
        Family(
            "mellum",
            "MellumExperts",
            typed_masks=True,
            predictor=qwen3_next_layer(
                "Mellum",
                "MellumRotaryEmbedding",
                (
                    ("layer_types", "sliding_attention", "full_attention"),
                    ("mlp_layer_types", "sparse", "dense"),
                ),
            ),
        ),
        Family(
            "hy_v3",
            "HYV3Experts",
            router_inputs=("e_score_correction_bias",),
            gate=corrected_gate("router_scaling_factor"),
            predictor=HY_V3,
            text_part=TextModelPart("hy_v3", renamed=HY_V3_RENAMED),
        ),
        Family(
            "afmoe",
            "AfmoeExperts",
            names=AFMOE_NAMES,
            router_inputs=("expert_bias",),
            router_of_sequence=True,
            gate=corrected_gate("route_scale"),
            typed_masks=True,
            normed=True,
            scaled_embedding="mup_enabled",
        ),
        Family(
            "exaone_moe",
            "ExaoneMoeExperts",
            gate=deepseek_v3_gate,
            typed_masks=True,
            check=check_pairs,
            text_part=TextModelPart("exaone_moe", renamed=EXAONE_RENAMED),
        ),
        Family(
            "laguna",
            "LagunaExperts",
            gate=laguna_gate,
            typed_masks=True,
            attention=heads_of_layers,
            scaled_by="moe_routed_scaling_factor",
            text_part=TextModelPart("laguna", renamed=LAGUNA_RENAMED),
        ),
        Family(
            "granitemoe",
            "GraniteMoeExperts",
            names=GRANITE_NAMES,
            gate=normalized_gate,
            num_experts="num_local_experts",
            expert_width="intermediate_size",
            scaled_by="residual_multiplier",
            since="5.23",
            text_part=TextModelPart("granitemoe", renamed=GRANITE_RENAMED),
        ),
        Family(
            "granitemoehybrid",
            "GraniteMoeHybridExperts",
            names=GRANITE_NAMES,
            gate=normalized_gate,
            num_experts="num_local_experts",
            expert_width="intermediate_size",
            scaled_by="residual_multiplier",
            since="5.23",
            typed_masks=True,
            check=check_mamba,
            on_the_host="states of family granitemoehybrid are cut back by the host",
            states=mamba_states,
            text_part=TextModelPart("granitemoehybrid", renamed=GRANITE_RENAMED),
        ),
        Family(
            "nemotron_h",
            "NemotronHExperts",
            names=NEMOTRON_NAMES,
            gate=deepseek_v3_gate,
            num_experts="n_routed_experts",
            hidden_act=None,
            latent_size="moe_latent_size",
            since="5.23",
            typed_masks=True,
            attention=heads_of_some_layers,
            activation="relu2",
            check=check_nemotron,
            on_the_host="states of family nemotron_h are cut back by the host",
            states=nemotron_states,
            last_norm="norm_f",
            text_part=TextModelPart("nemotron_h", prefix="backbone."),
        ),
        Family(
            "kimi_linear",
            "KimiLinearExperts",
            names=MIXTRAL_NAMES,
            gate=deepseek_v3_gate,
            typed_masks=True,
            attention=cached_latents,
            check=check_pairs,
            on_the_host="states of family kimi_linear are cut back by the host",
            states=kimi_states,
            text_part=TextModelPart("kimi_linear", renamed=KIMI_RENAMED),
        ),
        Family(
            "bailing_hybrid",
            "BailingHybridExperts",
            gate=deepseek_v3_gate,
            since="5.23",
            typed_masks=True,
            attention=cached_latents,
            check=check_pairs,
            on_the_host="states of family bailing_hybrid are cut back by the host",
            states=kimi_states,
            text_part=TextModelPart("bailing_hybrid", renamed=BAILING_RENAMED),
        ),
        Family(
            "mistral4",
            "Mistral4Experts",
            gate=mistral4_gate,
            num_experts="n_routed_experts",
            since="5.23",
            attention=cached_latents,
            check=check_mistral4,
            text_part=TextModelPart(
                "mistral4",
                "language_model.model.",
                ("vision_tower.", "multi_modal_projector."),
                "language_model.lm_head.",
            ),
            causal="Mistral4ForCausalLM",
        ),
        Family(
            "gpt_oss",
            "GptOssExperts",
            names=GPT_OSS_NAMES,
            gate=normalized_gate,
            num_experts="num_local_experts",
            expert_width="intermediate_size",
            typed_masks=True,
            attention=heads_with_sinks,
            attention_by=BESIDE_SINKS,
            biased=True,
            stacked=Stacked.INTERLEAVED,
            activation=CLAMPED,
            limit=swiglu_limit,
            check=check_clamped,
        ),
        Family(
            "mimo_v2_flash",
            "MiMoV2FlashExperts",
            gate=deepseek_v3_gate,
            num_experts="n_routed_experts",
            typed_masks=True,
            attention=heads_of_windows,
            attention_by=BESIDE_SINKS,
            check=check_pairs,
            text_part=TextModelPart("mimo_v2_flash", renamed=MIMO_RENAMED),
        ),
        Family(
            "lfm2_moe",
            "Lfm2MoeExperts",
            names=LFM2_NAMES,
            router_inputs=("expert_bias",),
            gate=lfm2_gate,
            hidden_act=None,
            typed_masks=True,
            check=check_short_conv,
            on_the_host="inputs of convolutions of family lfm2_moe are cut back by the host",
            states=conv_states,
            last_norm="embedding_norm",
            rotary="pos_emb",
        ),
        Family(
            "gemma4",
            "Gemma4TextExperts",
            names=GEMMA4_NAMES,
            gate=gemma4_gate,
            logits_of=log_of_first,
            top_k="top_k_experts",
            hidden_act="hidden_activation",
            typed_masks=True,
            attention=heads_by_layer,
            normed=True,
            check=check_gemma4,
            text_part=TextModelPart("gemma4_text", "model.language_model.", GEMMA4_BESIDE),
        ),
    )
}


def family_of(config: dict[str, Any], where: object) -> Family:
    """Find the family of a config.json. Raises SpeqError that lists the supported ones."""
    model_type, text = config.get("model_type"), config.get("text_config")
    if model_type in WRAPPERS and isinstance(text, dict):
        model_type = text.get("model_type", model_type)
    family = next((each for each in FAMILIES.values() if model_type in each.model_types), None)
    if family is None:
        raise UnsupportedError(
            f"{where} is of family {model_type!r}, which is not supported; supported are "
            f"{', '.join(sorted(FAMILIES))}"
        )
    family.check_installed(where)
    return family
