"""Answers that follow a grammar: at each position some tokens may follow, and others may not.

Which may follow depends on the answer's own tokens alone, drafted ones included. So the exact model
chooses the same tokens under a grammar for every drafter and draft length.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speq.errors import DependencyError, OptionError, SpeqError, UnsupportedError

# Compiled grammars that are kept: agents send the same tools again and again.
MOST_GRAMMARS = 32


@dataclass(slots=True, eq=False)
class GrammarConstraint:
    """The grammar of one request's answer.

    matcher     of llguidance, at the beginning of an answer
    vocab_size  of the model's logits
    """

    matcher: Any
    vocab_size: int
    _read: int = field(default=0, init=False)

    def allowed(self, output_token_ids: list[int], ahead: list[int]) -> Tensor | None:
        """Return the tokens that may follow, [V] bool on the CPU; None if the grammar has no answer
        with these drafted tokens, so that nothing after them is accepted.

        output_token_ids  of the answer so far
        ahead             drafted tokens after these
        """
        self._consume(output_token_ids)
        consumed = self.matcher.try_consume_tokens(ahead)
        mask = None
        if consumed == len(ahead):
            bits = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)
            mask = np.unpackbits(bits, count=self.vocab_size, bitorder="little")
        if self.matcher.is_error() or (mask is not None and not mask.any()):
            raise SpeqError(f"the answer cannot follow its grammar: {self.matcher.get_error()}")
        self.matcher.rollback(consumed)
        return None if mask is None else torch.from_numpy(mask.view(bool))

    def forced(self, output_token_ids: list[int]) -> list[int]:
        """Return the tokens of the text that must follow, as the tokenizer would write it.

        Others may write the same text, so these are a draft. Empty where several texts may follow.
        """
        self._consume(output_token_ids)
        return list(self.matcher.compute_ff_tokens())

    def _consume(self, output_token_ids: list[int]) -> None:
        self.matcher.consume_tokens(output_token_ids[self._read :])
        self._read = len(output_token_ids)


class GrammarCompiler:
    """Compiles grammars in Lark's syntax, as llguidance reads them, for one tokenizer.

    vocab_size     of the model's logits
    eos_token_ids  any of which may end an answer once it is whole
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._tokens: Any = None
        self._compiled: OrderedDict[str, Any] = OrderedDict()

    def constraint(self, grammar: str) -> GrammarConstraint:
        """Make the constraint of a request. Raises SpeqError for what is no grammar."""
        matcher = self._compiled.get(grammar)
        if matcher is None:
            matcher = self._compiled[grammar] = self._compile(grammar)
            if len(self._compiled) > MOST_GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return GrammarConstraint(matcher.deep_copy(), self._vocab_size)

    def _compile(self, grammar: str) -> Any:
        try:
            from llguidance import LLMatcher
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise DependencyError(
                "grammars of answers are read by llguidance, not installed here; "
                "pip install llguidance"
            ) from error
        if not self._eos_token_ids:
            raise UnsupportedError("the model has no token that ends an answer with a grammar")
        if self._tokens is None:
            try:
                self._tokens = from_tokenizer(
                    self._tokenizer, n_vocab=self._vocab_size, eos_token=self._eos_token_ids
                )
            except (ValueError, RuntimeError) as error:
                raise UnsupportedError(
                    f"llguidance cannot read the model's tokenizer for a grammar: {error}"
                ) from error
        matcher = LLMatcher(self._tokens, LLMatcher.grammar_from_lark(grammar))
        if matcher.is_error():
            raise OptionError(f"it is no grammar that can be compiled: {matcher.get_error()}")
        return matcher
