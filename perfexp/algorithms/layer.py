"""Layer: one 2-D convolution of a model, which is computed by an algorithm while it is replaced."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import conv2d, pad
from torch.overrides import TorchFunctionMode

from perfexp.algorithms.convolution import Convolution
from perfexp.algorithms.portable import ALGORITHMS, Portable, effective_dtype, misfit
from perfexp.algorithms.report import LayerReport, LayerStatus
from perfexp.errors import PerfexpError

#: What a layer does that no algorithm is for.
DEFAULT = "default"


class Layer:
    """Computes the convolutions of a module by an algorithm where that can, and by torch otherwise.

    Only two attributes of the instance are covered: `_conv_forward`, or `forward` where the module's class has a
    forward pass of its own; then the calls of `torch.nn.functional.conv2d` in it are computed by the algorithm.
    Weights, hooks, names and the class stay.

    Args:
        name: as the model calls it.
        module: the convolution.
        requested: name of an algorithm, or `default`.
        refuse: called with the layer and the reason when the algorithm can't compute a shape, before torch does.
    """

    def __init__(
        self, name: str, module: torch.nn.Conv2d, requested: str, refuse: Callable[[Layer, str], None]
    ) -> None:
        self.name, self.requested = name, requested
        self._module, self._refuse = module, refuse
        self._algorithm = None if requested == DEFAULT else ALGORITHMS[requested]
        self._pads_first = module.padding_mode != "zeros"
        self._settings: Any = (module.stride, 0 if self._pads_first else module.padding, module.dilation, module.groups)
        shape = (module.out_channels, module.in_channels // module.groups, *module.kernel_size)
        self._convolution = Convolution.of(shape, *self._settings)
        self._covered: dict[str, Any] = {}
        self._own: Callable[..., Any] = module.forward
        self._decided: dict[Any, bool] = {}
        self._seen: dict[Any, LayerReport] = {}

    def why_not(self, algorithm: Portable) -> str | None:
        """Why an algorithm can't compute the layer, as far as that can be said before it has inputs.

        Args:
            algorithm: any.
        """
        return algorithm.supports(self._convolution, self._module.weight.dtype)

    def install(self) -> None:
        """From now on the algorithm computes."""
        kind = type(self._module)
        own = kind.forward is torch.nn.Conv2d.forward and kind._conv_forward is torch.nn.Conv2d._conv_forward
        name, replacement = ("_conv_forward", self._conv_forward) if own else ("forward", self._forward)
        self._covered[name] = before = self._module.__dict__.get(name)
        outer = getattr(before, "__self__", None)
        self._own = outer._own if isinstance(outer, Layer) else before or partial(kind.forward, self._module)
        self._module.__dict__[name] = replacement

    def remove(self) -> None:
        """From now on the module computes as it did."""
        for name, before in self._covered.items():
            del self._module.__dict__[name]
            if before is not None:
                self._module.__dict__[name] = before
        self._covered.clear()

    def forget(self) -> None:
        """What was seen so far is no longer reported."""
        self._decided.clear()
        self._seen.clear()

    def reports(self) -> list[LayerReport]:
        """An entry for each shape of inputs, or the one that says that there were none."""
        if self._seen:
            return list(self._seen.values())
        reason = "it computed no convolution"
        return [
            LayerReport(name=self.name, requested=self.requested, used=None, status=LayerStatus.unseen, reason=reason)
        ]

    def _conv_forward(self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """In place of `torch.nn.Conv2d._conv_forward`."""
        if self._pads_first:
            inputs = pad(inputs, self._module._reversed_padding_repeated_twice, mode=self._module.padding_mode)
        if self._fits(inputs, weight) and self._algorithm:
            return self._algorithm.run(self._convolution, inputs, weight, bias)
        return conv2d(inputs, weight, bias, *self._settings)

    def _forward(self, *arguments: Any, **named: Any) -> Any:
        """In place of a forward pass of the class's own."""
        with _Intercepted(self):
            return self._own(*arguments, **named)

    def functional(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> torch.Tensor:
        """In place of `torch.nn.functional.conv2d`, with its arguments."""
        settings = [tuple(each) if isinstance(each, list) else each for each in (stride, padding, dilation, groups)]
        arguments: Any = (tuple(weight.shape), *settings)
        if self._fits(input, weight, arguments) and self._algorithm:
            return self._algorithm.run(Convolution.of(*arguments), input, weight, bias)
        return conv2d(input, weight, bias, stride, padding, dilation, groups)

    def _fits(self, inputs: torch.Tensor, weight: torch.Tensor, arguments: Any = None) -> bool:
        """Whether the algorithm computes these inputs; decided once for each shape, by a compiler while it traces.

        Args:
            inputs: of the convolution.
            weight: likewise.
            arguments: of `Convolution.of`; None for what the module's attributes say.
        """
        if inputs.dtype != weight.dtype and not torch.is_autocast_enabled(inputs.device.type):
            return False  # torch says what is wrong
        key = (inputs.shape, effective_dtype(inputs), arguments)
        if torch.compiler.is_compiling():
            found = self._decide_before(tuple(key[0]), *key[1:])
            return self._decide_now(*key) if found is None else bool(found)
        found = self._decided.get(key)
        return self._decide(*key) if found is None else found

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _decide_before(self, shape: tuple[int, ...], dtype: torch.dtype, arguments: Any) -> bool | None:
        """While a compiler traces; None if it is refused, since an error would be taken for the compiler's."""
        try:
            return self._decide(torch.Size(shape), dtype, arguments)
        except PerfexpError:
            return None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _decide_now(self, shape: torch.Size, dtype: torch.dtype, arguments: Any) -> bool:
        """When what was compiled runs, which ends with the error."""
        return self._decide(shape, dtype, arguments)

    def _decide(self, shape: torch.Size, dtype: torch.dtype, arguments: Any) -> bool:
        """Whether the algorithm computes inputs of a shape that comes for the first time."""
        key = (shape, dtype, arguments)
        convolution = self._convolution if arguments is None else Convolution.of(*arguments)
        if misfit(convolution, shape):
            return False  # torch says what is wrong
        reason = self._algorithm.supports(convolution, dtype) if self._algorithm else None
        if reason is not None:
            self._refuse(self, reason)
        self._decided[key] = forced = self._algorithm is not None and reason is None
        self._seen[key] = LayerReport(
            name=self.name,
            requested=self.requested,
            used=self.requested if reason is None else DEFAULT,
            status=LayerStatus.ok if reason is None else LayerStatus.fallback,
            reason=reason,
            input_shape=tuple(shape),
            flops=convolution.flops(shape[0] if len(shape) == 4 else 1, *shape[-2:]),
        )
        return forced


class _Intercepted(TorchFunctionMode):
    """While entered, a layer's algorithm computes the calls of `torch.nn.functional.conv2d`."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self._layer = layer

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `TorchFunctionMode`; within it the mode is off."""
        if function is conv2d:
            return self._layer.functional(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))
