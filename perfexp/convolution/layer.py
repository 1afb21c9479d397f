"""Layers: replace the computation of a model's 2-D convolution by an algorithm.

A `Layer` intercepts a module's calls. For each new kind of inputs (shape, data type, layout) it
asks its backends for engines once, and counts calls for the report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._compile import _disable_dynamo
from torch.nn.functional import conv2d, pad
from torch.overrides import TorchFunctionMode

from perfexp.convolution.backends import Choice, Support, first_able, joined
from perfexp.convolution.coverage import LayerReport, Pass
from perfexp.convolution.cudnn import math_of
from perfexp.convolution.engines import OF_TORCH, Direct, Engines, direct, plan_of
from perfexp.convolution.operators import CUDNN
from perfexp.convolution.portable.algorithms import effective_dtype, is_channels_last, misfit
from perfexp.convolution.portable.geometry import Convolution
from perfexp.convolution.problem import Problem
from perfexp.convolution.proof import Seen
from perfexp.errors import PerfexpError

#: Called with a layer, a problem and the reason before torch computes in the algorithm's place.
Refuse = Callable[["Layer", Problem, str], None]


def _constant_while_tracing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function as `torch.compiler.assume_constant_result` does.

    Unlike torch's function, this does not import the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@dataclass
class _InputKind:
    """A kind of inputs that a layer computed, and how often.

    Attributes:
        problem: the convolution with these inputs.
        report: report on a single call.
        calls: all calls so far.
        counted: calls within the reported model call; None before the report.
    """

    problem: Problem
    report: LayerReport
    calls: int = 0
    counted: int | None = None

    def total(self) -> LayerReport:
        """Return the report on all counted calls.

        Compiled calls are not seen individually and count as a single call.
        """
        calls = max(1, self.calls if self.counted is None else self.counted)
        passes = tuple(replace(report, flops=calls * report.flops) for report in self.report.passes)
        return replace(self.report, calls=calls, passes=passes)


class _Decision(NamedTuple):
    """Implementation for a kind of inputs.

    Attributes:
        engines: None for torch itself.
        direct: cuDNN without torch's dispatcher, if possible.
        row: where calls are counted; None if they are not.
    """

    engines: Engines | None = None
    direct: Direct | None = None
    row: _InputKind | None = None


#: Torch computes.
_NOTHING = _Decision()


class Layer:
    """Computes a module's convolutions by an algorithm if possible, otherwise by torch.

    It replaces a single instance attribute of the module: normally `_conv_forward`. If the module
    overrides the forward pass, it replaces `forward` and intercepts the calls of
    `torch.nn.functional.conv2d` there. Weights, hooks, names and the class stay unchanged.

    Args:
        name: name of the module in the model, for example `layer1.0.conv1`.
        requested: algorithm for the layer, for the report.
        supports: backends in order of preference; none for `default`.
        refuse: called before torch computes in the algorithm's place; it may raise an error.
    """

    def __init__(
        self,
        name: str,
        module: torch.nn.Conv2d,
        requested: str,
        supports: Sequence[Support],
        refuse: Refuse,
    ) -> None:
        self.name, self.requested, self.supports = name, requested, supports
        self._module, self._refuse = module, refuse
        self._pads_first = module.padding_mode != "zeros"
        self._settings: Any = (
            module.stride,
            0 if self._pads_first else module.padding,
            module.dilation,
            module.groups,
        )
        shape = (module.out_channels, module.in_channels // module.groups, *module.kernel_size)
        self._convolution = Convolution.of(shape, *self._settings)
        self._covered: dict[str, Any] = {}
        self._own: Callable[..., Any] = module.forward
        self._decided: dict[Any, _Decision] = {}
        self._rows: dict[Problem, _InputKind] = {}
        self._is_reported = False

    def __deepcopy__(self, memo: Any) -> Layer:
        """Return itself: a copied model uses the same plans, with its own weights."""
        return self

    def why_not(self, supports: Sequence[Support] | None = None) -> str | None:
        """Return why backends cannot compute the layer for any inputs; None if they may.

        The check before a run uses it. Other limits depend on the input size.

        Args:
            supports: backends to check; None for the layer's own.
        """
        backends = self.supports if supports is None else supports
        reasons = [
            backend.rejects(self._convolution, self._module.weight.dtype) for backend in backends
        ]
        return None if None in reasons else joined(map(str, reasons))

    def install(self) -> None:
        """Replace the module's method, so that the algorithm computes from now on."""
        kind, attributes = type(self._module), self._module.__dict__
        name, replacement = "forward", self._forward
        if self._has_torch_forward():
            name, replacement = "_conv_forward", self._conv_forward
        self._covered[name] = before = attributes.get(name)
        earlier_layer = getattr(before, "__self__", None)
        if isinstance(earlier_layer, Layer):
            self._own = earlier_layer._own
        else:
            self._own = before or partial(kind.forward, self._module)
        attributes[name] = replacement

    def _has_torch_forward(self) -> bool:
        """Return whether the forward pass is torch's own, except for other layers' patches."""
        kind = type(self._module)
        if kind.forward is not torch.nn.Conv2d.forward:
            return False
        if kind._conv_forward is not torch.nn.Conv2d._conv_forward:
            return False
        patches = [self._module.__dict__.get(name) for name in ("forward", "_conv_forward")]
        return all(
            patch is None or isinstance(getattr(patch, "__self__", None), Layer)
            for patch in patches
        )

    def remove(self) -> None:
        """Restore the module's own computation."""
        for name, before in self._covered.items():
            del self._module.__dict__[name]
            if before is not None:
                self._module.__dict__[name] = before
        self._covered.clear()

    def forget(self) -> None:
        """Discard all decisions and counts, before a point with other inputs."""
        self._decided.clear()
        self._rows.clear()
        self._is_reported = False

    def recount(self) -> None:
        """Reset the counts: calls so far prepared the model, and its next call is reported."""
        self._is_reported = False
        for row in self._rows.values():
            row.calls, row.counted = 0, None

    def prove(self, seen: Seen) -> None:
        """Add the kernels observed in a profiled model call to the reports."""
        for row in self._rows.values():
            passes = []
            for report in row.report.passes:
                plan = plan_of(report.which, report.selected, row.problem)
                passes.append(seen.proven(report, plan))
            row.report = replace(row.report, passes=tuple(passes))

    def reports(self) -> list[LayerReport]:
        """Return an entry for each computed problem, or a single entry without passes.

        Calls after the first request for reports are not counted. `Forced.report` collects them.
        """
        rows, self._is_reported = list(self._rows.values()), True
        for row in rows:
            row.counted = row.calls if row.counted is None else row.counted
        ran = [row.total() for row in rows if row.counted] or [row.total() for row in rows]
        return ran or [LayerReport(name=self.name, requested=self.requested)]

    def _conv_forward(
        self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Replace `torch.nn.Conv2d._conv_forward`: return the outputs, computed by the engines."""
        if self._pads_first:
            inputs = pad(
                inputs,
                self._module._reversed_padding_repeated_twice,
                mode=self._module.padding_mode,
            )
        engines, called, _ = self._decision(inputs, weight)
        # cuDNN needs only addresses, unless a subclass, dispatch mode or autocast is active
        if (
            called is not None
            and type(inputs) is torch.Tensor
            and not torch._C._len_torch_dispatch_stack()
            and not torch.is_autocast_enabled("cuda")
        ):
            outputs = called(inputs, weight)
            return outputs if bias is None else outputs.add_(bias[:, None, None])
        return _compute(engines, inputs, weight, bias, self._settings)

    def _forward(self, *arguments: Any, **named: Any) -> Any:
        """Replace a forward pass that the class overrides, and intercept its convolutions."""
        with _Intercepted(self):
            return self._own(*arguments, **named)

    def functional(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
        stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
    ) -> torch.Tensor:  # fmt: skip
        """Replace `torch.nn.functional.conv2d`, with its arguments.

        Inputs are (N, C, H, W) or (C, H, W).
        """
        settings: Any = tuple(
            tuple(setting) if isinstance(setting, list) else setting
            for setting in (stride, padding, dilation, groups)
        )
        engines = self._decision(input, weight, settings).engines
        return _compute(engines, input, weight, bias, settings)

    def _decision(
        self, inputs: torch.Tensor, weight: torch.Tensor, settings: Any = None
    ) -> _Decision:
        """Count the call, and return the implementation for these inputs.

        It is decided once per kind of inputs. While a compiler traces, the engines become constants
        in the compiled code.

        Args:
            settings: stride, padding, dilation and groups; None for the module's own.
        """
        if inputs.dtype != weight.dtype and not torch.is_autocast_enabled(inputs.device.type):
            return _NOTHING  # torch raises the error
        has_gradients = torch.is_grad_enabled()
        key = (
            inputs.shape,
            effective_dtype(inputs),
            inputs.stride(),
            weight.shape,
            weight.stride(),
            has_gradients and inputs.requires_grad,
            has_gradients and weight.requires_grad,
            settings,
            inputs.device,
        )
        if not torch.compiler.is_compiling():
            decision = self._decided.get(key)
            if decision is None:
                decision = self._decide(key, inputs.dtype == weight.dtype == key[1])
            if decision.row is not None:
                decision.row.calls += 1
            return decision
        # a constant's arguments must be plain tuples
        names = self._decide_while_tracing((tuple(key[0]), *key[1:3], tuple(key[3]), *key[4:]))
        if names is None:
            names = self._decide_when_run(key)
        return _Decision(Engines(*names), None, None) if names else _NOTHING

    @_constant_while_tracing
    def _decide_while_tracing(self, key: Any) -> tuple[str, ...] | None:
        """Return engine names, which the compiler takes for constants; None if refused.

        The names are empty if torch computes. An error raised here would be taken for the
        compiler's.
        """
        try:
            key = (torch.Size(key[0]), *key[1:3], torch.Size(key[3]), *key[4:])
            names: tuple[str, ...] = self._decide_when_run(key)
            return names
        except PerfexpError:
            return None

    # torch.compiler.disable imports the compiler, which takes a second in every process
    @_disable_dynamo
    def _decide_when_run(self, key: Any) -> tuple[str, ...]:
        """Return engine names when the compiled code runs; errors are raised then."""
        engines = self._decide(key, False).engines
        return astuple(engines) if engines else ()

    def _decide(self, key: Any, uncast: bool) -> _Decision:
        """Decide on the implementation for a new kind of inputs, and remember it.

        Args:
            key: as made by `_decision`.
            uncast: whether the inputs already have the data type of the computation.
        """
        shape, dtype, strides, weight_shape, weight_strides, *gradients, settings, device = key
        settings = self._settings if settings is None else settings
        convolution = Convolution.of(weight_shape, *settings)
        if misfit(convolution, shape) or 0 in shape:
            return _NOTHING  # torch raises the error, or has nothing to compute
        is_batched = len(shape) == 4
        if not is_batched:
            shape, strides = (1, *shape), (0, *strides)
        last = is_channels_last(shape, strides) or is_channels_last(weight_shape, weight_strides)
        optional = (Pass.backward_data, Pass.backward_filter)
        passes = [
            pass_type for pass_type, is_needed in zip(optional, gradients, strict=True) if is_needed
        ]
        problem = Problem(
            convolution=convolution,
            shape=tuple(shape),
            dtype=dtype,
            device=device,
            channels_last=last,
            passes=(Pass.forward, *passes),
        )
        choice, _ = first_able(self.supports, problem)
        row = self._row(problem, choice, key[0])
        if reasons := [
            pass_choice.reason for pass_choice in choice.values() if pass_choice.reason is not None
        ]:
            self._refuse(self, problem, joined(reasons))
        decision = _Decision(row=row)
        if any(pass_choice.engine not in OF_TORCH for pass_choice in choice.values()):
            engines = Engines(
                **{pass_type.value: pass_choice.engine for pass_type, pass_choice in choice.items()}
            )
            # cuDNN's descriptors describe dense tensors only
            is_dense = is_batched and all(
                stride == torch.empty(size, device="meta", memory_format=problem.layout).stride()
                for size, stride in ((shape, strides), (weight_shape, weight_strides))
            )
            called = direct(engines, problem) if uncast and is_dense else None
            decision = _Decision(engines, called, row)
        self._decided[key] = decision
        return decision

    def _row(self, problem: Problem, choice: Choice, shape: Sequence[int]) -> _InputKind:
        """Return the entry that counts a problem's calls, new if necessary.

        Args:
            shape: input shape for the report, perhaps without a batch.
        """
        row = self._rows.get(problem)
        if row is None:
            counted = 0 if self._is_reported else None
            report = self._report(problem, choice, shape)
            row = self._rows[problem] = _InputKind(problem, report, counted=counted)
        return row

    def _report(self, problem: Problem, choice: Choice, shape: Sequence[int]) -> LayerReport:
        """Return the report on a single call, which `_InputKind.total` multiplies by the calls.

        Args:
            shape: input shape, perhaps without a batch.
        """
        flops = problem.convolution.flops(problem.shape[0], *problem.shape[-2:])
        passes = tuple(
            pass_choice.report(pass_type, flops) for pass_type, pass_choice in choice.items()
        )
        by_cudnn = any(report.selected.startswith(CUDNN) for report in passes)
        return LayerReport(
            name=self.name,
            requested=self.requested,
            input_shape=tuple(shape),
            dtype=str(problem.dtype).removeprefix("torch."),
            math=math_of(problem.dtype).name if by_cudnn else None,
            passes=passes,
        )


def _compute(
    engines: Engines | None,
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    settings: Any,
) -> torch.Tensor:
    """Return the outputs by the engines; by torch if `engines` is None."""
    if engines is not None:
        return engines.compute(Convolution.of(weight.shape, *settings), inputs, weight, bias)
    return conv2d(inputs, weight, bias, *settings)


@contextmanager
def all_installed(layers: Sequence[Layer]) -> Iterator[None]:
    """Install layers while entered; remove them in the reverse order.

    Only this order restores a module that is covered twice.
    """
    for layer in layers:
        layer.install()
    try:
        yield
    finally:
        for layer in reversed(layers):
            layer.remove()


class _Intercepted(TorchFunctionMode):
    """Lets a layer's algorithm compute calls of `torch.nn.functional.conv2d` while entered."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self._layer = layer

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a torch function, or the layer for a convolution."""
        if function is conv2d:
            return self._layer.functional(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))
