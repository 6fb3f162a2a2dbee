"""Tokenizers of the kinds that models are published with, trained on a few lines."""

from collections.abc import Callable
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

LINES = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps.",
    "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n",
    "naïve café, 12 € and a half; Straße, Übermut “quoted” …",
    "日本語のテキストと한국어, русский текст",
    "One, two, three: the numbers are 1, 22 and 333.",
]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
TEMPLATE = (
    "{% for m in messages %}{{ OPEN + m.role + '\n' + m.content + CLOSE + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ OPEN + 'assistant\n' }}{% endif %}"
)


def with_marks(tokenizer: Tokenizer, end: str, marks: tuple[str, str], **special: Any) -> Any:
    """The tokenizer with an end of text, and marks around the turns of its chats."""
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in (end, *marks)])
    template = TEMPLATE.replace("OPEN", repr(marks[0])).replace("CLOSE", repr(marks[1]))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, chat_template=template, **special
    )


def byte_level() -> Any:
    """As GPT-2's and Qwen's: merges of bytes, of which a token may hold a part of a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(LINES, trainer)
    return with_marks(tokenizer, "<|endoftext|>", ("<|im_start|>", "<|im_end|>"))


def byte_fallback() -> Any:
    """As Llama 2's and Mixtral's: a space before each word, bytes for what there is no token of,
    and a mark that begins each text.
    """
    spaced = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    learnt = Tokenizer(models.BPE())
    learnt.normalizer = spaced
    trainer = trainers.BpeTrainer(vocab_size=160, limit_alphabet=50, show_progress=False)
    learnt.train_from_iterator(LINES, trainer)
    tokens = sorted(learnt.get_vocab(), key=learnt.get_vocab().__getitem__)
    vocab = {token: at for at, token in enumerate(["<unk>", "<s>", "</s>", *BYTES, *tokens])}
    merges = [
        (token[:at], token[at:])
        for token in tokens
        for at in range(1, len(token))
        if token[:at] in vocab and token[at:] in vocab
    ]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = spaced
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", vocab["<s>"])]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>"])
    return with_marks(tokenizer, "</s>", ("[INST]", "[/INST]"), bos_token="<s>", unk_token="<unk>")


def unigram() -> Any:
    """As SentencePiece's unigrams: likeliest pieces, spaces as marks, and special marks within."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=260,
        special_tokens=["<unk>", "<s>", "</s>"],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return with_marks(tokenizer, "</s>", ("<start>", "<end>"), bos_token="<s>", unk_token="<unk>")


KINDS: dict[str, Callable[[], Any]] = {
    "byte-level": byte_level,
    "byte-fallback": byte_fallback,
    "unigram": unigram,
}
