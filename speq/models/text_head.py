"""A causal model of text, where transformers has only one of pictures and text."""

from functools import cache
from typing import Any

from torch import nn
from transformers import GenerationMixin


@cache
def with_head(body: Any) -> Any:
    """A class of causal models of transformers' class `body` of text models; one that has a head is
    returned itself.
    """
    if issubclass(body, GenerationMixin):
        return body

    def init(self: Any, config: Any) -> None:
        body.__base__.__init__(self, config)
        self.model = body(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    made = type(
        body.__name__.replace("TextModel", "TextForCausalLM"),
        (body.__base__,),
        {
            "__init__": init,
            "__module__": body.__module__,
            "config_class": body.config_class,
            "_tied_weights_keys": {"lm_head.weight": "model.embed_tokens.weight"},
        },
    )
    return made
