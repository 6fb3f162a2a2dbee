"""Dense layers of a model, run by our own product if rows are few."""

from torch import Tensor, nn

from speq.kernels import ops


class StreamedLinear(nn.Linear):
    """An nn.Linear whose weights are read at memory bandwidth, as a token at a time needs."""

    def forward(self, inputs: Tensor) -> Tensor:
        return ops.linear(inputs, self.weight, self.bias)


def stream_linears(model: nn.Module) -> None:
    """Make StreamedLinears of all plain nn.Linears of a model, in place."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = StreamedLinear
