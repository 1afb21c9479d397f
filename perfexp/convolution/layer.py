"""Layers: replace the computation of a model's 2-D convolution by an algorithm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
        supports: backends in order of preference; none for `default`.
        refuse: called before torch computes in the algorithm's place.
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

        Args:
            supports: backends to check; None for the layer's own.
        """
        backends = self.supports if supports is None else supports
        reasons = [
            backend.rejects(self._convolution, self._module.weight.dtype) for backend in backends
        ]
        return None if None in reasons else joined(map(str, reasons))

    def install(self) -> None:
        """Let the algorithm compute from now on."""
        kind = type(self._module)
        patches = [self._module.__dict__.get(key) for key in ("forward", "_conv_forward")]
        own = (
            kind.forward is torch.nn.Conv2d.forward
            and kind._conv_forward is torch.nn.Conv2d._conv_forward
            and all(
                patch is None or isinstance(getattr(patch, "__self__", None), Layer)
                for patch in patches
            )
        )
        name, replacement = (
            ("_conv_forward", self._conv_forward) if own else ("forward", self._forward)
        )
        self._covered[name] = before = self._module.__dict__.get(name)
        outer = getattr(before, "__self__", None)
        self._own = (
            outer._own
            if isinstance(outer, Layer)
            else before or partial(kind.forward, self._module)
        )
        self._module.__dict__[name] = replacement

    def remove(self) -> None:
        """Restore the module's own computation."""
        for name, before in self._covered.items():
            del self._module.__dict__[name]
            if before is not None:
                self._module.__dict__[name] = before
        self._covered.clear()

    def forget(self) -> None:
        """Discard all decisions and counts."""
        self._decided.clear()
        self._rows.clear()
        self._is_reported = False

    def recount(self) -> None:
        """Reset the counts: calls so far prepared the model, and its next call is reported."""
        self._is_reported = False
        for row in self._rows.values():
            row.calls, row.counted = 0, None

    def prove(self, seen: Seen) -> None:
        """Add the kernels observed in a model call to the reports."""
        for row in self._rows.values():
            plans = (
                plan_of(report.which, report.selected, row.problem) for report in row.report.passes
            )
            passes = tuple(
                seen.proven(report, plan)
                for report, plan in zip(row.report.passes, plans, strict=True)
            )
            row.report = replace(row.report, passes=passes)

    def reports(self) -> list[LayerReport]:
        """Return an entry for each computed problem, or a single entry without passes.

        Calls after the first request for reports are not counted.
        """
        rows, self._is_reported = list(self._rows.values()), True
        for row in rows:
            row.counted = row.calls if row.counted is None else row.counted
        ran = [row.total() for row in rows if row.counted] or [row.total() for row in rows]
        return ran or [LayerReport(name=self.name, requested=self.requested)]

    def _conv_forward(
        self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
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
        return _computed(engines, inputs, weight, bias, self._settings)

    def _forward(self, *arguments: Any, **named: Any) -> Any:
        """Replace a forward pass that the class overrides."""
        with _Intercepted(self):
            return self._own(*arguments, **named)

    def functional(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
        stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
    ) -> torch.Tensor:  # fmt: skip
        """Replace `torch.nn.functional.conv2d`, with its arguments."""
        options = (stride, padding, dilation, groups)
        settings: Any = tuple(
            tuple(option) if isinstance(option, list) else option for option in options
        )
        return _computed(
            self._decision(input, weight, settings).engines, input, weight, bias, settings
        )

    def _decision(
        self, inputs: torch.Tensor, weight: torch.Tensor, settings: Any = None
    ) -> _Decision:
        """Return the implementation for these inputs, decided once per kind of inputs.

        A tracing compiler gets its own decision.
        """
        if inputs.dtype != weight.dtype and not torch.is_autocast_enabled(inputs.device.type):
            return _NOTHING  # torch raises the error
        recorded, dtype = torch.is_grad_enabled(), effective_dtype(inputs)
        wanted = (recorded and inputs.requires_grad, recorded and weight.requires_grad)
        key = (
            inputs.shape,
            dtype,
            inputs.stride(),
            weight.shape,
            weight.stride(),
            *wanted,
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
        constants = self._decide_before((tuple(key[0]), *key[1:3], tuple(key[3]), *key[4:]))
        if constants is None:
            constants = self._decide_now(key)
        return _Decision(Engines(*constants), None, None) if constants else _NOTHING

    @_constant_while_tracing
    def _decide_before(self, key: Any) -> tuple[str, ...] | None:
        """Decide while a compiler traces; return None if refused.

        An error raised here would be taken for the compiler's.
        """
        try:
            names: tuple[str, ...] = self._decide_now(
                (torch.Size(key[0]), *key[1:3], torch.Size(key[3]), *key[4:])
            )
            return names
        except PerfexpError:
            return None

    # torch.compiler.disable imports the compiler, which takes a second in every process
    @_disable_dynamo
    def _decide_now(self, key: Any) -> tuple[str, ...]:
        """Decide when the compiled code runs; errors are raised then."""
        engines = self._decide(key, False).engines
        return (engines.forward, engines.backward_data, engines.backward_filter) if engines else ()

    def _decide(self, key: Any, uncast: bool) -> _Decision:
        """Return the implementation for a new kind of inputs.

        Args:
            uncast: whether the inputs already have the data type of the computation.
        """
        (
            shape,
            dtype,
            strides,
            weight_shape,
            weight_strides,
            wants_data,
            wants_filter,
            settings,
            device,
        ) = key
        convolution = Convolution.of(
            weight_shape, *(self._settings if settings is None else settings)
        )
        if misfit(convolution, shape) or 0 in shape:
            return _NOTHING  # torch raises the error, or has nothing to compute
        batched, strides = (shape, strides) if len(shape) == 4 else ((1, *shape), (0, *strides))
        last = is_channels_last(batched, strides) or is_channels_last(
            convolution.weight_shape, weight_strides
        )
        wanted = {
            Pass.forward: True,
            Pass.backward_data: wants_data,
            Pass.backward_filter: wants_filter,
        }
        passes = tuple(which for which, runs in wanted.items() if runs)
        kind = {"dtype": dtype, "device": device, "channels_last": last}
        problem = Problem(convolution=convolution, shape=tuple(batched), passes=passes, **kind)
        choice, _ = first_able(self.supports, problem)
        row = self._rows.get(problem)
        if row is None:
            counted = 0 if self._is_reported else None
            row = self._rows[problem] = _InputKind(
                problem, self._report(problem, choice, shape), counted=counted
            )
        if reasons := [
            pass_choice.reason for pass_choice in choice.values() if pass_choice.reason is not None
        ]:
            self._refuse(self, problem, joined(reasons))
        decision = _Decision(row=row)
        if any(pass_choice.engine not in OF_TORCH for pass_choice in choice.values()):
            engines = Engines(
                **{str(which): pass_choice.engine for which, pass_choice in choice.items()}
            )
            # cuDNN's descriptors describe dense tensors only
            dense = all(
                stride == torch.empty(size, device="meta", memory_format=problem.layout).stride()
                for size, stride in ((shape, key[2]), (weight_shape, weight_strides))
                if len(size) == 4
            )
            called = direct(engines, problem) if uncast and dense and len(shape) == 4 else None
            decision = _Decision(engines, called, row)
        self._decided[key] = decision
        return decision

    def _report(self, problem: Problem, choice: Choice, shape: Sequence[int]) -> LayerReport:
        flops = problem.convolution.flops(problem.shape[0], *problem.shape[-2:])
        passes = tuple(pass_choice.report(which, flops) for which, pass_choice in choice.items())
        by_cudnn = any(report.selected.startswith(CUDNN) for report in passes)
        math, dtype = (
            math_of(problem.dtype).name if by_cudnn else None,
            str(problem.dtype).removeprefix("torch."),
        )
        return LayerReport(
            name=self.name,
            requested=self.requested,
            input_shape=tuple(shape),
            dtype=dtype,
            math=math,
            passes=passes,
        )


def _computed(
    engines: Engines | None,
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    settings: Any,
) -> torch.Tensor:
    if engines is not None:
        return engines.compute(Convolution.of(weight.shape, *settings), inputs, weight, bias)
    return conv2d(inputs, weight, bias, *settings)


class _Intercepted(TorchFunctionMode):
    """Lets a layer's algorithm compute calls of `torch.nn.functional.conv2d` while entered."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self._layer = layer

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is conv2d:
            return self._layer.functional(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))
