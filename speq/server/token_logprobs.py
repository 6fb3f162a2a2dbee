"""Log-probabilities of tokens as OpenAI's API has them, for chats and for completions."""

from typing import Any

from speq.engine.logprobs import TokenLogprobs
from speq.errors import present
from speq.generator import Token
from speq.text.vocabulary import Vocabulary


def chat_entry(vocabulary: Vocabulary, token: Token) -> dict[str, Any]:
    """One of `logprobs.content`."""
    logprobs = _logprobs_of(token)
    top = [_token_entry(vocabulary, token_id, logprob) for token_id, logprob in logprobs.top]
    return _token_entry(vocabulary, token.id, logprobs.logprob) | {"top_logprobs": top}


def _logprobs_of(token: Token) -> TokenLogprobs:
    return present(token.logprobs, "a token of an answer with log-probabilities has none")


def _token_entry(vocabulary: Vocabulary, token_id: int, logprob: float) -> dict[str, Any]:
    data = [*vocabulary.data(token_id)]
    return {"token": vocabulary.name(token_id), "logprob": finite(logprob), "bytes": data}


def completion_lists(vocabulary: Vocabulary, tokens: list[Token], offset: int) -> dict[str, Any]:
    """`logprobs` of a completion. offset: characters of the text before these tokens."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [vocabulary.name(token.id) for token in tokens],
        "token_logprobs": [_logprob(token) for token in tokens],
        "top_logprobs": [token.logprobs and _table(vocabulary, token) for token in tokens],
        "text_offset": offsets,
    }


def _logprob(token: Token) -> float | None:
    """None for the first token of a prompt, which nothing goes before."""
    return None if token.logprobs is None else finite(_logprobs_of(token).logprob)


def _table(vocabulary: Vocabulary, token: Token) -> dict[str, float]:
    """The likeliest tokens, and the one that was drawn, which is called as in `tokens`. Of others
    that are called alike, all but the likeliest go by their ids.
    """
    logprobs, own = _logprobs_of(token), vocabulary.name(token.id)
    table: dict[str, float] = {}
    for token_id, logprob in logprobs.top:
        name = vocabulary.name(token_id)
        if token_id != token.id and (name == own or name in table):
            name = f"token_id:{token_id}"
        table[name] = finite(logprob)
    table.setdefault(own, finite(logprobs.logprob))
    return table


def finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for what is as good as impossible."""
    return max(logprob, -9999.0)
