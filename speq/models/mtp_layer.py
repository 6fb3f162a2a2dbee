"""The layer of a family's checkpoints that predicts tokens ahead (MTP), as data.

Entry i of such a layer takes the exact model's last hidden state of token i, and the embedding of
token i + 1. All families norm both and put the embedding in front. They differ in names, in a
text's first entry, and in what takes the place of the next hidden state.
"""

from typing import NamedTuple


class PartNames(NamedTuple):
    """What the parts are called on disk, but for what the parts call their own tensors. `{last}`
    stands for the number behind that of the model's last layer.

    decoder    a decoder layer of the family; the last word is its number
    enorm, hnorm, eh_proj  norms of embeddings and of hidden states, and what both go into
    last_norm  behind the decoder layer; it may be the model's
    embedding, head  of its own, where it may have these; empty: the model's serve
    """

    decoder: str
    enorm: str
    hnorm: str
    eh_proj: str
    last_norm: str
    embedding: str = ""
    head: str = ""

    def behind(self, num_layers: int) -> "PartNames":
        """Those in a checkpoint of so many layers."""
        return PartNames(*(name.format(last=num_layers) for name in self))

    def tensor(self, name: str) -> str:
        """A tensor on disk by its name below these parts: `enorm.weight`."""
        part, _, rest = name.partition(".")
        return f"{getattr(self, part)}.{rest}"

    @property
    def place(self) -> tuple[str, int]:
        """What `layers` lies below on disk, and the decoder layer's number there."""
        parent, _, number = self.decoder.rpartition(".layers.")
        return parent, int(number)


class Predictor(NamedTuple):
    """Of one family. transformers has no class for the whole.

    layer, norm, rotary  classes of the family's module for the decoder layer, the norms, and what
                    turns positions
    names           on disk
    kinds           what the decoder layer is in lists of the config that have a kind for each layer
    zeroes_first    whether the embedding of a text's first entry is 0
    passes_normed   whether what takes the place of the next hidden state went through the last norm
    """

    layer: str
    norm: str
    rotary: str
    names: PartNames
    kinds: tuple[tuple[str, str], ...] = ()
    zeroes_first: bool = False
    passes_normed: bool = False


# What names of such layers' tensors begin with, where they do not lie among the model's own layers.
APART = ("mtp.", "model.mtp_")


def behind_the_last(classes: str, kinds: tuple[tuple[str, str], ...] = ()) -> Predictor:
    """As DeepSeek-V3 has it, computed as vLLM does (deepseek_mtp.py).

    classes  what names of the family's classes begin with
    """
    at = "model.layers.{last}"
    return Predictor(
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


def apart(classes: str, rotary: str) -> Predictor:
    """As Qwen3-Next has it, whose layer has attention, computed as in vLLM (qwen3_next_mtp.py)."""
    return Predictor(
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
        kinds=(("layer_types", "full_attention"),),
        passes_normed=True,
    )


# As its authors' FastDeploy computes it (ernie4_5_mtp.py): the layer is dense, and its output goes
# through the model's own last norm. vLLM has no norm there, and zeroes the first embedding.
ERNIE = Predictor(
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
