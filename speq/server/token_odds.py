"""The odds of tokens as OpenAI's API has them, in the form of chats and in that of completions."""

from dataclasses import dataclass, field
from typing import Any

from speq.errors import present
from speq.generator import Token
from speq.text.stream import REPLACEMENT


@dataclass(slots=True)
class TokenTexts:
    """What single tokens are called: their own text, special ones' too."""

    tokenizer: Any
    _known: dict[int, str] = field(default_factory=dict)

    def text(self, token_id: int) -> str:
        if token_id not in self._known:
            self._known[token_id] = str(self.tokenizer.decode([token_id]))
        return self._known[token_id]


def chat_entry(texts: TokenTexts, token: Token) -> dict[str, Any]:
    """One of `logprobs.content`. bytes: null where the token is a part of a character."""
    odds = present(token.odds, "a token of an answer with log-probabilities has none")
    top = [_named(texts, token_id, logprob) for token_id, logprob in odds.top]
    return _named(texts, token.id, odds.logprob) | {"top_logprobs": top}


def _named(texts: TokenTexts, token_id: int, logprob: float) -> dict[str, Any]:
    text = texts.text(token_id)
    written = None if REPLACEMENT in text else list(text.encode())
    return {"token": text, "logprob": finite(logprob), "bytes": written}


def completion_lists(texts: TokenTexts, tokens: list[Token], offset: int) -> dict[str, Any]:
    """`logprobs` of a completion. offset: characters of the text before these tokens."""
    names = [texts.text(token.id) for token in tokens]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    odds = [token.odds for token in tokens if token.odds is not None]
    return {
        "tokens": names,
        "token_logprobs": [finite(each.logprob) for each in odds],
        "top_logprobs": [
            {texts.text(token_id): finite(logprob) for token_id, logprob in each.top}
            for each in odds
        ],
        "text_offset": offsets,
    }


def finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for what is as good as impossible."""
    return max(logprob, -9999.0)
