"""The MTP layer (multi-token prediction) of a family's checkpoints, as data.

Position i of such a layer takes the exact model's last hidden state of token i and the embedding of
token i + 1. All families norm both and put the embedding first. They differ in names, in the first
position of a sequence, and in what replaces the next hidden state in a chain of drafts.
"""

from typing import NamedTuple


class PartNames(NamedTuple):
    """Names of the parts on disk, without the names of their tensors. `{last}` stands for the
    number after that of the model's last layer.

    decoder    a decoder layer of the family; the last component is its number
    enorm, hnorm, eh_proj  norms of embeddings and of hidden states, and the projection of both
    last_norm  norm after the decoder layer; it may be the model's
    embedding, head  its own, where it may have these; empty: the model's
    """

    decoder: str
    enorm: str
    hnorm: str
    eh_proj: str
    last_norm: str
    embedding: str = ""
    head: str = ""

    def for_layers(self, num_layers: int) -> "PartNames":
        """Names in a checkpoint of `num_layers` layers."""
        return PartNames(*(name.format(last=num_layers) for name in self))

    def tensor(self, name: str) -> str:
        """Name on disk of a tensor of these parts, such as `enorm.weight`."""
        part, _, rest = name.partition(".")
        return f"{getattr(self, part)}.{rest}"

    @property
    def place(self) -> tuple[str, int]:
        """Prefix of `layers` on disk, and the decoder layer's number there."""
        parent, _, number = self.decoder.rpartition(".layers.")
        return parent, int(number)


class MtpLayerKind(NamedTuple):
    """The MTP layer of one family. transformers has no class for the whole.

    layer, norm, rotary  classes of the family's module for the decoder layer, the norms and the
                         rotary embedding
    names           names on disk
    kinds           names of the config's lists of kinds by layer, each with the decoder layer's
                    usual kind and others that `mtp_` and that name may give
    zeroes_first    whether the embedding at a sequence's first position is 0
    passes_normed   whether the next hidden state is replaced by the output of the last norm
    """

    layer: str
    norm: str
    rotary: str
    names: PartNames
    kinds: tuple[tuple[str, ...], ...] = ()
    zeroes_first: bool = False
    passes_normed: bool = False


FULL_ATTENTION = (("layer_types", "full_attention"),)
# Prefixes of MTP tensors that are not among the model's own layers.
APART = ("mtp.", "model.mtp_", "model.mtp.")


def deepseek_layer(classes: str, kinds: tuple[tuple[str, ...], ...] = ()) -> MtpLayerKind:
    """DeepSeek-V3's kind, computed as vLLM does (deepseek_mtp.py).

    classes  prefix of the family's class names
    """
    at = "model.layers.{last}"
    return MtpLayerKind(
        f"{classes}DecoderLayer",
        f"{classes}RMSNorm",
        f"{classes}RotaryEmbedding",
        PartNames(
            decoder=at,
            enorm=f"{at}.enorm",
            hnorm=f"{at}.hnorm",
            eh_proj=f"{at}.eh_proj",
            last_norm=f"{at}.shared_head.norm",
            embedding=f"{at}.embed_tokens",
            head=f"{at}.shared_head.head",
        ),
        kinds,
        zeroes_first=True,
    )


def qwen3_next_layer(
    classes: str, rotary: str, kinds: tuple[tuple[str, ...], ...] = FULL_ATTENTION
) -> MtpLayerKind:
    """Qwen3-Next's kind, a layer with attention, computed as in vLLM (qwen3_next_mtp.py); of
    Mellum as in transformers' MtpModel.
    """
    return MtpLayerKind(
        f"{classes}DecoderLayer",
        f"{classes}RMSNorm",
        rotary,
        PartNames(
            decoder="mtp.layers.0",
            enorm="mtp.pre_fc_norm_embedding",
            hnorm="mtp.pre_fc_norm_hidden",
            eh_proj="mtp.fc",
            last_norm="mtp.norm",
        ),
        kinds=kinds,
        passes_normed=True,
    )


# Hy3's, computed as its authors' code in vLLM does (hy_v3_mtp.py).
HY_V3 = MtpLayerKind(
    "HYV3DecoderLayer",
    "HYV3RMSNorm",
    "HYV3RotaryEmbedding",
    PartNames(
        decoder="model.layers.{last}",
        enorm="model.layers.{last}.enorm",
        hnorm="model.layers.{last}.hnorm",
        eh_proj="model.layers.{last}.eh_proj",
        last_norm="model.layers.{last}.final_layernorm",
    ),
    kinds=(("mlp_layer_types", "sparse"),),
    zeroes_first=True,
    passes_normed=True,
)


# Computed as its authors' FastDeploy does (ernie4_5_mtp.py): the layer is dense, and its output
# goes through the model's last norm. vLLM has no norm there and zeroes the first embedding.
ERNIE = MtpLayerKind(
    "Ernie4_5_MoeDecoderLayer",
    "Ernie4_5_MoeRMSNorm",
    "Ernie4_5_MoeRotaryEmbedding",
    PartNames(
        decoder="model.mtp_block.0",
        enorm="model.mtp_emb_norm.0",
        hnorm="model.mtp_hidden_norm.0",
        eh_proj="model.mtp_linear_proj.0",
        last_norm="model.norm",
    ),
    passes_normed=True,
)
