"""Small tokenizers of the kinds that models are published with."""

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;!?'\"{}[]()<>/|_-\n#"
WORDS = ("dog", "the", "run", "ning")
SPECIAL = ("<s>", "</s>", "<|end|>", "<tool_call>", "</tool_call>")
# Tokens that were added and have a text of their own.
ORDINARY = ("<think>", "é", " wide ")


def byte_level() -> Tokenizer:
    """As Qwen's and DeepSeek's: all text is bytes, and merges end within characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: at for at, character in enumerate(alphabet)}
    merges = []
    for text in ("😀", "€", "日", " dog", "é"):
        characters = shown_bytes(text)
        for at in range(1, len(characters)):
            pair = characters[:at], characters[at]
            if pair[0] + pair[1] != characters or text == " dog":
                merges.append(pair)
                vocabulary.setdefault(pair[0] + pair[1], len(vocabulary))
    # The end of one character with the beginning of another.
    first, second = shown_bytes("😀")[-1], shown_bytes("😀")[0]
    merges.append((first, second))
    vocabulary[first + second] = len(vocabulary)
    made = Tokenizer(models.BPE(vocabulary, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


def shown_bytes(text: str) -> str:
    """As a byte-level tokenizer writes them."""
    pre = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(part for part, _ in pre.pre_tokenize_str(text))


def with_bytes(pieces: Sequence[str]) -> dict[str, int]:
    vocabulary = {"<unk>": 0}
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    for piece in pieces:
        vocabulary.setdefault(piece, len(vocabulary))
    return vocabulary


def byte_fallback() -> Tokenizer:
    """As Mixtral's: pieces with a mark for spaces, and bytes where there is no piece."""
    vocabulary = with_bytes(["▁", *LETTERS, *(f"▁{word}" for word in WORDS), *WORDS, "\ufffd"])
    made = Tokenizer(
        models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return made


def gemma_like() -> Tokenizer:
    """Bytes as well, and no space is dropped where a text begins."""
    made = byte_fallback()
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return made


def unigram() -> Tokenizer:
    """As T5's and XLNet's: Metaspace, without bytes."""
    pieces = ["<unk>", "▁", *LETTERS, *(f"▁{word}" for word in WORDS), *WORDS, "😀", "日", "€"]
    made = Tokenizer(models.Unigram([(piece, -1.0 - len(piece)) for piece in pieces], unk_id=0))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    return made


def unigram_with_bytes() -> Tokenizer:
    pieces = [*with_bytes(["▁", *LETTERS, *(f"▁{word}" for word in WORDS), *WORDS])]
    made = Tokenizer(models.Unigram([(piece, -9.0) for piece in pieces], 0, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return made


def word_pieces() -> Tokenizer:
    """As BERT's: what goes on a word has a prefix."""
    pieces = ["<unk>", *WORDS, *(f"##{word}" for word in WORDS), *LETTERS, "😀", "日"]
    made = Tokenizer(models.WordPiece({p: at for at, p in enumerate(pieces)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece("##", cleanup=False)
    return made


def ended_words() -> Tokenizer:
    """As GPT-1's: what ends a word has a suffix."""
    pieces = ["<unk>", *(f"{word}</w>" for word in WORDS), *WORDS, *LETTERS]
    vocabulary = {piece: at for at, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", end_of_word_suffix="</w>"))
    made.decoder = decoders.BPEDecoder("</w>")
    return made


def bare_words() -> Tokenizer:
    """Without a decoder: tokens stand apart."""
    pieces = ["<unk>", *WORDS, "😀", "."]
    return Tokenizer(models.WordLevel({p: at for at, p in enumerate(pieces)}, unk_token="<unk>"))


KINDS = {
    made.__name__: made
    for made in (
        *(byte_level, byte_fallback, gemma_like, unigram, unigram_with_bytes),
        *(word_pieces, ended_words, bare_words),
    )
}


def tokenizer_of(kind: str, special: Sequence[str] = SPECIAL, **options: Any) -> Any:
    """A tokenizer of one of KINDS as transformers has it, with added tokens."""
    made = KINDS[kind]()
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    made.add_tokens([AddedToken(name, special=False, normalized=False) for name in ORDINARY])
    named = {"bos_token": "<s>", "eos_token": "</s>"} if "<s>" in special else {}
    return PreTrainedTokenizerFast(tokenizer_object=made, **named | options)
