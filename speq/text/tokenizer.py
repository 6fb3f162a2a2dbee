"""Loading of a model's tokenizer from checked files, and tokenisation."""

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from tokenizers import normalizers, processors
from transformers import AutoTokenizer, LlamaTokenizer

from speq.errors import CheckpointError, OptionError
from speq.files.json_file import read_json
from speq.files.regular_file import check_folder, check_own, read_text

logger = logging.getLogger("speq")

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
TOKENIZER_CONFIG = "tokenizer_config.json"
# Several times the largest in use; a template is a page of text.
MAX_TEMPLATE_CHARACTERS = 1 << 20
MAX_BYTES = {
    "*.json": 256 << 20,
    "*.model": 256 << 20,
    "*.txt": 256 << 20,
    "*.jinja": MAX_TEMPLATE_CHARACTERS,
    "chat_template.json": MAX_TEMPLATE_CHARACTERS,
    TOKENIZER_CONFIG: 16 << 20,
    "special_tokens_map.json": 16 << 20,
    "added_tokens.json": 16 << 20,
}
TOKENIZER_AGAIN = "download its tokenizer files again, all of them"
# Vocabularies that need code to be read.
CODE_FILES = ("tokenization_*.py", "*.tiktoken", "tiktoken.model")
# Vocabularies of sentencepiece, and their first byte.
SENTENCEPIECE_FILES, SENTENCEPIECE = ("tokenizer.model", "spiece.model"), b"\n"
# Beginnings of texts, runs of spaces, and characters that not every vocabulary has.
SAMPLES = ("the sea", " the  sea\n", "def f(x):\n    return x", "Größe, 7 海 🌊")
SENTENCEPIECE_PACKAGES = {"sentencepiece": "sentencepiece", "google.protobuf": "protobuf"}
INSTALL_TOKENIZERS = "install them with `.venv/bin/pip install -e '.[tokenizers]'`"
OR_IDS = "or give prompts as token ids"
# The class of all that a tokenizer.json describes, and what transformers builds one in place of.
ANY_CLASS, LLAMA_CLASSES = "TokenizersBackend", ("LlamaTokenizer", "LlamaTokenizerFast")
# Of tokenizer_config.json, what every tokenizer keeps.
SETTINGS = ("model_max_length", "bos_token", "eos_token", "pad_token", "unk_token")
TEMPLATE_FILE, OLD_TEMPLATE_FILE = "chat_template.jinja", "chat_template.json"


class NoTokenizer(CheckpointError):
    """A folder has no usable tokenizer; the message says why."""

    code = "no_tokenizer"


class TokenIdsOnly:
    """Placeholder for the tokenizer of a model without one: token ids have no text.

    Encoding text raises NoTokenizer with the reason.
    """

    eos_token_id = bos_token_id = None

    def __init__(self, reason: str) -> None:
        self._reason = reason

        self.added_tokens_decoder: dict[int, Any] = {}

    def get_vocab(self) -> dict[str, int]:
        return {}

    def decode(self, ids: Any, **options: Any) -> str:
        return ""

    def __call__(self, text: str, **options: Any) -> NoReturn:
        raise NoTokenizer(self._reason)

    @property
    def chat_template(self) -> NoReturn:
        raise NoTokenizer(self._reason)

    def get_chat_template(self, **options: Any) -> NoReturn:
        raise NoTokenizer(self._reason)


def load_tokenizer(path: Path) -> Any:
    """Load the tokenizer in a model folder. Raises NoTokenizer if none can be used, and SpeqError
    if it is damaged.
    """
    check_folder(path, MAX_BYTES)
    sentences = check_readable(path)
    config: dict[str, Any] = {}
    if (path / TOKENIZER_CONFIG).exists():
        config = check_tokenizer_config(path / TOKENIZER_CONFIG)
    try:
        # With a tokenizer.model, AutoTokenizer may lose the space that sentencepiece puts before a
        # text's first word.
        of_llama = sentences and str(config.get("tokenizer_class")).startswith("LlamaTokenizer")
        tokenizer = load_heeding(LlamaTokenizer if of_llama else AutoTokenizer, path, config)
        if of_llama and config.get("legacy") is not False:
            # As in the tokenizer.json of Llama and Mixtral; the class drops a text's first space.
            space = normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")
            tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([*space])
            tokenizer.backend_tokenizer.pre_tokenizer = None
        put_ends(tokenizer, config.get("add_bos_token"), config.get("add_eos_token"))
        # Some damage shows only in use.
        tokenizer.decode(
            tokens_of(tokenizer, "a b"),
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
    except Exception as error:  # tokenizers raise many kinds for a bad file
        raise CheckpointError(
            f"the tokenizer in {path} cannot be loaded: {' '.join(str(error).split())[:300]}; "
            f"{TOKENIZER_AGAIN}"
        ) from error
    if sentences is not None:
        check_sentences(tokenizer, sentences)
    if not tokenizer.chat_template:
        tokenizer.chat_template = old_template(path)
    return tokenizer


def load_heeding(made_by: Any, path: Path, config: dict[str, Any]) -> Any:
    """Load a tokenizer. Where it does not show what the folder says, load it once more:
    transformers takes a file that it fails to look at for one that is not there. Raises SpeqError
    where the two differ, and neither shows it.

    config  tokenizer_config.json
    """
    earlier: tuple[Any, ...] | None = None
    for _ in range(2):
        tokenizer = made_by.from_pretrained(path, trust_remote_code=False, local_files_only=True)
        found = type(tokenizer), sorted(tokenizer.init_kwargs), tokenizer.chat_template
        if found == earlier or heeds(tokenizer, path, config):
            return tokenizer
        earlier = found
    raise CheckpointError("its files were not always found; look at what the disk reports")


def heeds(tokenizer: Any, path: Path, config: dict[str, Any]) -> bool:
    """True if a tokenizer is of the class, and has the settings and the template, that its folder
    says. transformers leaves some on purpose.
    """
    declared = str(config.get("tokenizer_class") or "")
    made, kept = type(tokenizer).__name__, set(tokenizer.init_kwargs)
    if made == ANY_CLASS:
        is_own = "vocab" not in kept  # it is of tokenizer.json
    else:
        # Of Llama's class are tokenizers that are built unlike one another, as their files say.
        named = declared not in LLAMA_CLASSES and made in (declared, declared.removesuffix("Fast"))
        is_own = named or not declared
    settings = {name for name in SETTINGS if config.get(name) is not None}
    has_template = (path / TEMPLATE_FILE).exists() or bool(config.get("chat_template"))
    templated = bool(tokenizer.chat_template) or not has_template
    reads = bool(tokens_of(tokenizer, "a b", add_special_tokens=False))  # it has a vocabulary
    return is_own and settings <= kept and templated and reads


def check_sentences(tokenizer: Any, path: Path) -> None:
    """Raise NoTokenizer if transformers tokenises a text differently from sentencepiece."""
    from sentencepiece import SentencePieceProcessor

    published = SentencePieceProcessor(model_file=str(path))
    for text in SAMPLES:
        if tokens_of(tokenizer, text, add_special_tokens=False) != published.encode(text):
            raise NoTokenizer(
                f"transformers tokenises {text!r} differently from sentencepiece with {path}; "
                f"put a tokenizer.json that was made from it beside it, {OR_IDS}"
            )


def put_ends(tokenizer: Any, bos: bool | None, eos: bool | None) -> None:
    """Make a tokenizer add BOS and EOS tokens as tokenizer_config.json says, which transformers
    ignores if there is a tokenizer.json. None: as tokenizer.json says.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # transformers applies it
        return
    plain, put = (backend.encode("a", add_special_tokens=each).ids for each in (False, True))
    at = next((at for at in range(len(put)) if put[at : at + len(plain)] == plain), None)
    if at is None or not plain:
        return
    before, behind = put[:at], put[at + len(plain) :]
    first, last = tokenizer.bos_token_id, tokenizer.eos_token_id
    if bos is not None and first is not None:
        before = [first] * bos + [*before[before[:1] == [first] :]]
    if eos is not None and last is not None:
        behind = [*behind[: len(behind) - (behind[-1:] == [last])]] + [last] * eos
    if before + plain + behind == put:
        return
    names = [[backend.id_to_token(token_id) for token_id in ids] for ids in (before, behind)]
    backend.post_processor = processors.TemplateProcessing(
        single=[*names[0], "$A", *names[1]],
        special_tokens=[*zip(names[0] + names[1], before + behind, strict=True)],
    )


def check_readable(path: Path) -> Path | None:
    """Find the sentencepiece tokenizer in a folder; None: it has another kind. Raises NoTokenizer
    for a folder without a tokenizer, or with one that cannot be read here.
    """
    found = {}
    for name in TOKENIZER_FILES:
        if (path / name).exists():
            with (path / name).open("rb") as file:
                found[name] = file.read(80)
            check_own(path / name, found[name])
    if TOKENIZER_FILES[0] in found:
        return None
    code = sorted(file.name for pattern in CODE_FILES for file in path.glob(pattern))
    if (path / TOKENIZER_CONFIG).exists():
        named = read_json(path / TOKENIZER_CONFIG).get("auto_map")
        if isinstance(named, dict) and "AutoTokenizer" in named:
            code.append(f"auto_map of {TOKENIZER_CONFIG}")
    if code:
        raise NoTokenizer(
            f"the tokenizer in {path} is code ({', '.join(code)}), which speq does not run; put a "
            f"tokenizer.json that was made from it into the folder, {OR_IDS}"
        )
    if not found:
        raise NoTokenizer(
            f"{path} has no tokenizer (none of {', '.join(TOKENIZER_FILES)}); {TOKENIZER_AGAIN}, "
            f"{OR_IDS}"
        )
    name, beginning = next(iter(found.items()))
    missing = [each for module, each in SENTENCEPIECE_PACKAGES.items() if not _has(module)]
    if name not in SENTENCEPIECE_FILES or not beginning.startswith(SENTENCEPIECE):
        return None
    if missing:
        raise NoTokenizer(
            f"the tokenizer in {path} is {name}, which is read with {' and '.join(missing)}, not "
            f"installed here; {INSTALL_TOKENIZERS}, {OR_IDS}"
        )
    return path / name


def _has(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its package is missing
        return False


def old_template(path: Path) -> str | None:
    """Read the chat template in a separate file, which transformers reads only for processors."""
    file = path / OLD_TEMPLATE_FILE
    if not file.exists():
        return None
    template = read_json(file).get("chat_template")
    if not isinstance(template, str):
        raise CheckpointError(
            f"{file} has a chat_template of no text; it must be a text: download it"
        )
    return template


def read_template(path: Path) -> str:
    """Read a chat template that a user gives."""
    return read_text(path, "give a file with a chat template in Jinja", MAX_TEMPLATE_CHARACTERS)


def check_tokenizer_config(path: Path) -> dict[str, Any]:
    """Read tokenizer_config.json. Raises SpeqError for values with which a tokenizer would fail
    later, or that mean nothing.
    """
    config = read_json(path)
    length = config.get("model_max_length")
    if isinstance(length, bool) or not (length is None or isinstance(length, int | float)):
        raise CheckpointError(
            f"{path} has model_max_length {length!r:.40}; it must be a number: download it again"
        )
    templates = config.get("chat_template") or []
    beside = path.with_name(TEMPLATE_FILE)
    if isinstance(templates, str) and beside.exists():
        own = read_text(beside, "download it again")
        if own.rstrip() != templates.rstrip():
            logger.warning(
                "%s and %s have different chat templates; the former counts, as for transformers",
                beside,
                path,
            )
    for named in templates if isinstance(templates, list) else [templates]:
        template = named.get("template") if isinstance(named, dict) else named
        if not isinstance(template, str) or len(template) > MAX_TEMPLATE_CHARACTERS:
            found = f"of {len(template)} characters" if isinstance(template, str) else "of no text"
            raise CheckpointError(
                f"{path} has a chat_template {found}; it must be a text of at most "
                f"{MAX_TEMPLATE_CHARACTERS}: download it again"
            )
    for name in ("add_bos_token", "add_eos_token"):
        if not isinstance(config.get(name), bool | None):
            raise CheckpointError(
                f"{path} has {name} {config[name]!r:.40}; it must be true or false: download it "
                "again"
            )
    return config


def tokens_of(tokenizer: Any, text: str, add_special_tokens: bool = True) -> list[int]:
    """Tokenise a text. Raises SpeqError if it is not Unicode, such as bytes that were not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise OptionError(
            f"the prompt holds {text[error.start]!r} at character {error.start}, which is not "
            "Unicode text; give text that was decoded from UTF-8"
        ) from error
    # Without its warning of texts beyond the model's context, which are refused with our own
    # message.
    encoded = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
    return list(encoded["input_ids"])
