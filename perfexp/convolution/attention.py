"""Attention backends: which of torch's implementations computes scaled_dot_product_attention.

`execution.attention` names a backend (`flash`, `efficient`, `cudnn`, `math`), or `fastest` for the
winner of a race per shape. With `auto`, torch chooses and only the report is made.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes

from perfexp.convolution import T
from perfexp.convolution.backends import PassChoice, joined
from perfexp.convolution.coverage import LayerReport, LayerStatus, Pass
from perfexp.convolution.proof import (
    AttentionReport,
    AttentionSeen,
    mark,
    mark_backward,
    watch_attention,
)
from perfexp.convolution.race import MAX_ERROR, Races, Threads, Winners, context_of
from perfexp.errors import Unsupported, UserError
from perfexp.host.cache import JsonCache, cache_folder
from perfexp.models import Attention, Execution, Session, tf32
from perfexp.records.record import Metric

_OPERATOR = torch.ops.aten.scaled_dot_product_attention.default
_KEYS = ("CPU", "CUDA", "AutogradCPU", "AutogradCUDA")
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
_NAMES = {int(backend): name for name, backend in BACKENDS.items()}  # type: ignore[call-overload]
#: Backends that a CPU does not have.
_ON_GPUS = ("efficient", "cudnn")
#: Name of the whole-model baseline: the backends that torch chooses.
AUTO = "auto"
#: How torch's warnings begin that head the reasons against a backend.
_HEADINGS = {"flash": "flash", "efficient": "memory efficient", "cudnn": "cudnn"}


class Operand(NamedTuple):
    """Shape, strides, data type and gradient of a tensor that attention reads.

    Attributes:
        strides: in elements.
        wants_gradient: whether autograd needs its gradient.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    wants_gradient: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Operand:
        """Return a tensor's operand."""
        wants_gradient = torch.is_grad_enabled() and tensor.requires_grad
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, wants_gradient)

    @property
    def first(self) -> Operand:
        """Return one sample and head of it."""
        return self._replace(shape=(1,) * (len(self.shape) - 2) + self.shape[-2:])

    def draw(self, device: torch.device) -> torch.Tensor:
        """Return a random tensor with this memory layout; a Boolean tensor is all true.

        Races run on such tensors. An expanded tensor (stride 0) is drawn as a contiguous one.
        """
        strides = self.strides
        if 0 in strides:
            strides = torch.empty(self.shape, device="meta").stride()
        tensor = torch.empty_strided(self.shape, strides, dtype=self.dtype, device=device)
        return tensor.normal_() if self.dtype.is_floating_point else tensor.fill_(1)


class AttentionProblem(NamedTuple):
    """A call of attention with everything that affects which backend computes it how fast.

    It is made in each call, so it is a tuple, which is cheap.

    Attributes:
        query: (batch, heads, tokens, width).
        key: (batch, heads, key tokens, width).
        value: (batch, heads, key tokens, value width).
        mask: None without a mask.
        dropout: probability.
        causal: whether a token attends only to itself and earlier tokens.
        scale: factor of the scores; None for torch's default.
        grouped: whether several query heads share a key head.
    """

    query: Operand
    key: Operand
    value: Operand
    mask: Operand | None
    dropout: float
    causal: bool
    scale: float | None
    grouped: bool
    device: torch.device

    @classmethod
    def of(
        cls, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
        is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> AttentionProblem:  # fmt: skip
        """Return the problem of a call with the arguments of torch's operator."""
        mask = None if attn_mask is None else Operand.of(attn_mask)
        return cls(
            Operand.of(query), Operand.of(key), Operand.of(value), mask,
            dropout_p, is_causal, scale, enable_gqa, query.device,
        )  # fmt: skip

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Return query, key and value."""
        return self[:3]

    @property
    def passes(self) -> tuple[Pass, ...]:
        """Return the passes that run: with gradients, also the backward pass."""
        wants_gradient = any(operand.wants_gradient for operand in self.operands)
        return (Pass.forward, Pass.backward) if wants_gradient else (Pass.forward,)

    @property
    def settings(self) -> dict[str, Any]:
        """Return the keyword arguments of the operator."""
        return {"scale": self.scale, "enable_gqa": self.grouped}

    @property
    def label(self) -> str:
        """Return the shape in words, for example `64×12×197×64 causal`.

        It names the row in the record's report and in plans.
        """
        parts = ["×".join(map(str, self.query.shape))]
        if self.key.shape[:-1] != self.query.shape[:-1]:
            parts.append(f"key-value {'×'.join(map(str, self.key.shape[-3:-1]))}")
        parts += ["causal"] * self.causal + ["mask"] * (self.mask is not None)
        return " ".join(parts + [f"dropout {self.dropout:g}"] * (self.dropout > 0))

    @property
    def dtype(self) -> str:
        """Return the name of the data type."""
        return str(self.query.dtype).removeprefix("torch.")

    @property
    def flops(self) -> dict[Pass, int]:
        """Return the FLOPs of each pass in one call, without a saving for causal attention.

        The backward pass counts as 2.5 forward passes, with five matrix products instead of two.
        """
        *_, keys, width = self.value.shape
        count = 2 * math.prod(self.query.shape[:-1]) * keys * (self.query.shape[-1] + width)
        return {Pass.forward: count, Pass.backward: count * 5 // 2}

    def draw(self) -> list[torch.Tensor]:
        """Return random query, key and value, also while a compiler traces."""
        with _disable_current_modes():
            return [operand.draw(self.device) for operand in self.operands]

    def draw_mask(self) -> torch.Tensor | None:
        """Return a mask that hides nothing that matters for the time; None without a mask."""
        with _disable_current_modes():
            return None if self.mask is None else self.mask.draw(self.device)


def chosen_by_torch(problem: AttentionProblem, existing: Sequence[Any] = ()) -> str:
    """Return the backend that torch chooses now for a problem.

    It is the default of races, and the fallback if the requested backend is impossible.

    Args:
        existing: query, key, value and mask if they have memory; otherwise such tensors are made.

    Raises:
        RuntimeError: no backend that is on can compute it.
    """
    with _disable_current_modes(), torch.set_grad_enabled(Pass.backward in problem.passes):
        tensors = existing or [*_differentiable(problem, problem.draw()), problem.draw_mask()]
        choice: Any = torch._fused_sdp_choice
        chosen = choice(*tensors, problem.dropout, problem.causal, **problem.settings)
    if chosen not in _NAMES:
        raise RuntimeError("torch has no backend for it")
    return _NAMES[chosen]


def _differentiable(
    problem: AttentionProblem, tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return query, key and value detached, requiring gradients as the problem does."""
    pairs = zip(tensors, problem.operands, strict=True)
    return [tensor.detach().requires_grad_(operand.wants_gradient) for tensor, operand in pairs]


def why_not(name: str, problem: AttentionProblem, existing: Sequence[Any] = ()) -> str | None:
    """Return torch's reasons why a backend cannot compute a problem; None if it can.

    Args:
        existing: see `chosen_by_torch`.
    """
    if name in _ON_GPUS and problem.device.type != "cuda":
        return "it needs a GPU"
    with warnings.catch_warnings(record=True) as raised, sdpa_kernel(BACKENDS[name]):
        warnings.simplefilter("always")
        try:
            if chosen_by_torch(problem, existing) == name:
                return None
            reason = ""
        except RuntimeError as error:
            reason = str(error).splitlines()[0].rstrip(".")
    return (
        joined(_reasons(name, [str(warning.message) for warning in raised]))
        or reason
        or "torch refuses"
    )


def _reasons(name: str, texts: Iterable[str]) -> Iterator[str]:
    """Yield torch's reasons against a backend, without the place in torch's source.

    torch warns in order: a heading per backend, then the reasons against it.

    Args:
        texts: messages of torch's warnings.
    """
    is_own = False
    for text in texts:
        words = text.partition(" (Triggered internally")[0].strip().rstrip(".")
        if words.endswith("not used because:"):
            is_own = words.lower().startswith(_HEADINGS.get(name, name))
        elif is_own and "runtime disabled" not in words:
            yield " ".join(words.split())


def compute(name: str, arguments: Sequence[Any], settings: Mapping[str, Any]) -> Any:
    """Return attention's result by a backend; its backward pass uses the same backend.

    Args:
        arguments: positional arguments of `scaled_dot_product_attention`.
        settings: its keyword arguments.
    """
    with sdpa_kernel(BACKENDS[name]):
        return _OPERATOR.decompose(*arguments, **settings)


@contextmanager
def _without_fast_path() -> Iterator[None]:
    """Turn off MultiheadAttention's fast path, which multiplies by itself, while entered."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def recorded() -> Iterator[dict[AttentionProblem, None]]:
    """Record the problems of attention calls while entered, also on tensors without memory.

    `layer_support` lists the backends that can compute them.
    """
    problems: dict[AttentionProblem, None] = {}
    attend = functional.scaled_dot_product_attention

    def record(*arguments: Any, **settings: Any) -> Any:
        """Compute attention as before; autocast changes the data type only then."""
        problem = AttentionProblem.of(*arguments, **settings)
        kind = problem.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            for name in ("query", "key", "value", "mask"):
                operand = getattr(problem, name)
                if operand is not None and operand.dtype.is_floating_point:
                    problem = problem._replace(**{name: operand._replace(dtype=dtype)})
        problems[problem] = None
        return attend(*arguments, **settings)

    with _without_fast_path(), patch.object(functional, attend.__name__, record):
        yield problems


def _preferred(name: str, kind: str) -> AbstractContextManager[None]:
    """Return a context in which a backend computes what it can, and torch chooses for the rest.

    It serves if one backend is for all shapes, and costs nothing per call.

    Args:
        kind: kind of the device, for example `cuda`.
    """
    others = [SDPBackend.MATH]
    if kind == "cuda":  # the order has no meaning on a CPU
        others = [SDPBackend(number) for number in torch._C._get_sdp_priority_order()]
    usable = [backend for backend in others if backend in BACKENDS.values()]
    return sdpa_kernel([*dict.fromkeys([BACKENDS[name], *usable])], set_priority=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class FastestBackend(Races):
    """Races all backends that can compute a problem, forward and backward together."""

    def choose(self, problem: AttentionProblem) -> Winners:
        """Return the fastest backend of a problem, for all its passes, from the cache or a race."""
        # the index of a GPU does not matter, but whether products round
        device_type = torch.device(problem.device.type)
        key = f"TF32 {tf32.allowed()[0]} {problem._replace(device=device_type)}"
        hold = partial(self._race, problem)
        return self.remembered(key, problem.passes, hold, partial(_check, problem))

    def _race(self, problem: AttentionProblem) -> Winners:
        """Return the winner of a race between all backends that can compute a problem.

        Without enough memory for a race, it is torch's own choice.
        """
        default = chosen_by_torch(problem)
        names = [name for name in BACKENDS if why_not(name, problem) is None]
        runner = partial(_runner, problem)
        try:
            with torch.random.fork_rng(_cuda_devices(problem.device)):
                tensors = problem.draw()
                able = [
                    candidate
                    for candidate in names
                    if candidate == default or _is_runnable(runner(candidate, tensors))
                ]
                del tensors
                limit = MAX_ERROR[problem.query.dtype]
                exactly = partial(_exact_runner, problem)
                winner, facts = self.winner(
                    able, runner, problem.draw, limit,
                    default=default, reference="math", exactly=exactly,
                )  # fmt: skip
        except torch.OutOfMemoryError:  # a race needs more memory than the model
            winner, facts = default, {}
        finally:
            if problem.device.type == "cuda":
                torch.cuda.empty_cache()  # the losers' workspaces
        first, *others = problem.passes
        # the times cover all passes, so the others get none
        other_passes = {pass_type: PassChoice(engine=winner) for pass_type in others}
        return {first: PassChoice(engine=winner, **facts), **other_passes}


def _exact_runner(
    problem: AttentionProblem, name: str, tensors: Sequence[torch.Tensor]
) -> Callable[[], list[torch.Tensor]]:
    """Return a function like `_runner`'s for the first sample and head only, without dropout.

    The race measures errors with it, against a reference in float64, in which the scores of all
    samples and heads may not fit into memory. Dropout would be random.
    """
    query, key, value = (operand.first for operand in problem.operands)
    mask = problem.mask and problem.mask.first
    small = problem._replace(query=query, key=key, value=value, mask=mask, dropout=0.0)
    return _runner(small, name, [tensor[(slice(1),) * (tensor.ndim - 2)] for tensor in tensors])


def _check(problem: AttentionProblem, pass_type: Pass, engine: str) -> None:
    """Raise `ValueError` if a cached winner cannot compute the problem any more."""
    if engine not in BACKENDS or why_not(engine, problem):
        raise ValueError(engine)


def _cuda_devices(device: torch.device) -> list[int]:
    """Return the devices that have random generators to restore after a race."""
    return [torch.cuda.current_device()] if device.type == "cuda" else []


def _is_runnable(run: Callable[[], Any]) -> bool:
    """Return whether a backend's call runs without an error.

    A backend that can compute the outputs may still lack a deterministic backward pass.
    """
    try:
        run()
    except RuntimeError:
        return False
    return True


def _runner(
    problem: AttentionProblem, name: str, tensors: Sequence[torch.Tensor]
) -> Callable[[], list[torch.Tensor]]:
    """Return a function that computes attention and, with gradients, the backward pass.

    It returns the outputs and the gradients that the problem wants.

    Args:
        name: backend.
        tensors: query, key and value.
    """
    mask = problem.draw_mask()
    if mask is not None and mask.is_floating_point():
        mask = mask.to(tensors[0].dtype)
    arguments = (mask, problem.dropout, problem.causal)
    if Pass.backward not in problem.passes:
        return lambda: [compute(name, (*tensors, *arguments), problem.settings)]
    operands = _differentiable(problem, tensors)
    leaves = [tensor for tensor in operands if tensor.requires_grad]
    shape = (*problem.query.shape[:-1], problem.value.shape[-1])
    gradient = torch.ones(shape, dtype=tensors[0].dtype, device=problem.device)

    def run() -> list[torch.Tensor]:
        """Compute attention forward and backward; return the outputs and the gradients."""
        with torch.enable_grad():
            outputs = compute(name, (*operands, *arguments), problem.settings)
            return [outputs.detach(), *torch.autograd.grad(outputs, leaves, gradient)]

    return run


@dataclass(kw_only=True)
class _Row:
    """A problem with its backend; calls are counted until the report."""

    choices: Winners
    calls: int = 0
    seen: AttentionSeen = field(default_factory=AttentionSeen)


class AttentionBackends:
    """Computes attention by a backend, or records what torch chooses; see `AppliedAlgorithm`.

    It replaces torch's operator `scaled_dot_product_attention` in the process, so that eager calls,
    recomputation and a tracing compiler all meet it, wherever the model imports its function from.

    Args:
        requested: backend, `auto` or `fastest`.
        compiled: whether torch.compile compiles the model.
        verify: whether to prove the backend by the kernels of a profiled call.
        stored: backends by label, data type and whether there is a backward pass; other shapes are
            left to torch.
    """

    group = "attention"

    def __init__(
        self,
        requested: Attention,
        device: Any,
        *,
        compiled: bool = False,
        verify: bool = False,
        stored: Mapping[tuple[str, str, bool], str] | None = None,
    ) -> None:
        self.requested, self._device, self._compiled = requested, device, compiled
        self.name = f"attention_{requested}"
        self._verify, self._stored = verify, stored
        self._rows: dict[AttentionProblem, _Row] = {}
        self._active: ExitStack | None = None
        names = set((stored or {}).values())
        self._sole: str | None = names.pop() if len(names) == 1 else None
        self._marks: list[tuple[AttentionProblem, Pass]] | None = None
        self._threads = Threads()
        self._races: FastestBackend | None = None
        self._is_reported = self._leaves_to_torch = False

    @property
    def is_forced(self) -> bool:
        """Return whether attention is changed, not only recorded."""
        return self.requested is not Attention.auto

    @contextmanager
    def applied(self) -> Iterator[AttentionBackends]:
        """Apply the backend while entered; yield itself.

        The measuring procedure uses it beside the algorithm for convolutions.
        """
        with ExitStack() as stack:
            stack.callback(self._threads.end)
            stack.callback(self._remove)
            if self.is_forced and self._compiled:
                from torch._functorch import config  # imports the compiler

                # its cache does not know the backend
                stack.enter_context(config.patch(enable_autograd_cache=False))
            self._install()
            yield self

    def begin_point(self) -> None:
        """Discard the shapes of earlier points."""
        self._rows.clear()
        self._is_reported = self._leaves_to_torch = False
        # the last point may have installed a single backend for all shapes
        self._reinstall(None)

    def begin_call(self) -> None:
        """Reset the counts; the next call is reported."""
        for row in self._rows.values():
            row.calls = 0

    def report(self) -> AttentionReport:
        """Return a row per shape.

        Raises:
            UserError: the model has no attention, but a backend is forced.
            Unsupported: the backend could compute no shape.
        """
        self._is_reported = True
        self._remove()
        self._leaves_to_torch = self._chose_as_torch()
        # one backend for all shapes needs no replaced operator
        if self.is_forced and not self._leaves_to_torch:
            names = {row.choices[Pass.forward].engine for row in self._rows.values()}
            self._reinstall(names.pop() if len(names) == 1 else None)
        layers = tuple(self._layer_report(problem, row) for problem, row in self._rows.items())
        report = AttentionReport(name=str(self.requested), layers=layers)
        if not self.is_forced:
            return report
        if not layers:
            raise UserError(
                f"execution.attention={self.requested}: the model calls no "
                "scaled_dot_product_attention; "
                "choose execution.attention=auto."
            )
        if all(layer.status is LayerStatus.fallback for layer in layers):
            more = f" and {len(layers) - 1} more shapes" if len(layers) > 1 else ""
            raise Unsupported(
                f"execution.attention={self.requested} can't compute this model's attention "
                f"({layers[0].name} {layers[0].dtype}: {layers[0].reason}{more}); "
                "choose auto or fastest"
            )
        return report

    def _chose_as_torch(self) -> bool:
        """Return whether `fastest` changes nothing, so that torch may take its own fast paths.

        `report` checks it after the first calls.
        """
        if self.requested is not Attention.fastest or self._compiled:
            return False
        chosen = {problem: row.choices[Pass.forward].engine for problem, row in self._rows.items()}
        return chosen == {problem: chosen_by_torch(problem) for problem in chosen}

    def baselines(self) -> tuple[str, ...]:
        """Return `auto` if backends are raced, otherwise nothing.

        Compiled code keeps its backends, so it has no baseline.
        """
        is_raced = self.requested is Attention.fastest and not self._compiled
        return (AUTO,) if is_raced else ()

    def run_baseline(self, baseline: str, work: Callable[[], T]) -> T:
        """Run work with the backends that torch chooses."""
        self._remove()
        try:
            return work()
        finally:
            self._install()

    def run_eager(self, work: Callable[[], T]) -> T:
        """Run work as it is."""
        return work()

    def discard_choices(self) -> None:
        """Forget cached backends."""
        if self._races is not None:
            self._races.discard_choices()

    def launched_share(self) -> Metric | None:
        """Return None: torch launches all passes."""
        return None

    def output_error(self, inputs: Any) -> Metric | None:
        """Return None: each race has checked its backends."""
        return None

    def prove(self, call: Callable[[], Any]) -> bool:
        """Profile one uncaptured call and add its kernels to the shapes.

        Return whether a proof was requested.
        """
        if not self._verify:
            return False
        leaves_to_torch, self._leaves_to_torch = self._leaves_to_torch, False
        self._reinstall(None)
        marks: list[tuple[AttentionProblem, Pass]] = []
        self._marks = marks
        try:
            between, everything = watch_attention(call, str(self._device.identifier))
        finally:
            self._marks = None
            self._leaves_to_torch = leaves_to_torch
            if leaves_to_torch:
                self._remove()
        if len(between) == len(marks):
            for (problem, pass_type), kernels in zip(marks, between, strict=True):
                self._rows[problem].seen.add(pass_type, kernels)
        for row in self._rows.values():
            row.seen.everything = everything
        return True

    def _install(self) -> None:
        """Apply the backend from now on; do nothing if it is applied or torch may choose.

        For a single backend, torch's preference is enough. Otherwise the operator is replaced.
        """
        if self._active is not None or self._leaves_to_torch:
            return
        self._active = ExitStack()
        if self.is_forced:
            self._active.enter_context(_without_fast_path())
        if self._sole is not None:
            self._active.enter_context(_preferred(self._sole, self._device.kind))
            return
        library: Any = torch.library.Library("aten", "IMPL")
        self._active.callback(library._destroy)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the replaced kernel
            for key in _KEYS:
                library.impl("scaled_dot_product_attention", self._attend, key)

    def _remove(self) -> None:
        """Restore torch's own operator and preferences."""
        if self._active is not None:
            self._active.close()
            self._active = None

    def _reinstall(self, sole: str | None) -> None:
        """Apply the backend again.

        Args:
            sole: the only backend, for all shapes; None for a decision in each call.
        """
        self._remove()
        self._sole = sole
        self._install()

    def _attend(
        self, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
        is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        """Replace torch's operator, with its arguments: compute attention by a backend.

        A new shape gets a row with its backend, and each call is counted. Tensors with nested or
        symbolic sizes are left to torch.
        """
        arguments = (query, key, value, attn_mask, dropout_p, is_causal)
        settings: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        if not all(argument is None or _is_dense(argument) for argument in arguments[:4]):
            return _OPERATOR.decompose(*arguments, **settings)
        problem = AttentionProblem.of(*arguments, **settings)
        row = self._rows.get(problem)
        if row is None:
            existing = arguments[:4] if _is_real(query) else ()
            row = self._rows[problem] = _Row(choices=self._choose(problem, existing))
        if not self._is_reported:
            row.calls += 1
        name = row.choices[Pass.forward].engine
        marks = self._marks
        if marks is not None:
            marks.append((problem, Pass.forward))
            mark(problem.device.type)
        with sdpa_kernel(BACKENDS[name]) if self.is_forced else nullcontext():
            outputs = _OPERATOR.decompose(*arguments, **settings)
        if marks is not None:
            mark(problem.device.type)
            mark_backward(outputs, partial(marks.append, (problem, Pass.backward)))
        return outputs

    def _choose(self, problem: AttentionProblem, existing: Sequence[Any]) -> Winners:
        """Return the backend for each pass of a new problem.

        A choice has a reason if it is not as requested.

        Args:
            existing: query, key, value and mask if they have memory, otherwise nothing.
        """
        try:
            engine = chosen_by_torch(problem, existing)
        except RuntimeError:
            engine = "math"
        choice = PassChoice(engine=engine)
        if self._stored is not None:
            name = self._stored.get((problem.label, problem.dtype, Pass.backward in problem.passes))
            if name is not None and why_not(name, problem, existing) is None:
                choice = PassChoice(engine=name)
        elif self.requested is Attention.fastest:
            if self._races is None:
                self._races = _races(self._device, self._threads)
            return self._races.choose(problem)
        elif self.requested is not Attention.auto:
            reason = why_not(str(self.requested), problem, existing)
            choice = PassChoice(engine=engine, reason=reason)
            if reason is None:
                choice = PassChoice(engine=str(self.requested))
        return dict.fromkeys(problem.passes, choice)

    def _layer_report(self, problem: AttentionProblem, row: _Row) -> LayerReport:
        """Return the report on a shape, with the FLOPs of all counted calls.

        A backend that was chosen but not proven has the status `requested`.
        """
        calls = max(1, row.calls)
        passes = []
        for pass_type, choice in row.choices.items():
            report = choice.report(pass_type, calls * problem.flops[pass_type])
            if report.status is LayerStatus.ok:
                report = replace(report, status=LayerStatus.requested)
            passes.append(row.seen.proven(report))
        return LayerReport(
            name=problem.label,
            requested=str(self.requested),
            input_shape=problem.query.shape,
            calls=calls,
            dtype=problem.dtype,
            passes=tuple(passes),
        )


def _is_real(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has memory: a compiler traces with subclasses that have none."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has plain sizes; otherwise torch decides."""
    return not tensor.is_nested and all(type(size) is int for size in tensor.shape)


def _races(device: Any, threads: Threads) -> FastestBackend:
    """Return the races for `fastest`, with a cache of winners for other processes."""
    folder = cache_folder("algorithms")
    choices = JsonCache(folder, {**context_of(device), "race": "of attention"})
    return FastestBackend(device=device, threads=threads, choices=choices)


def applied(session: Session, execution: Execution) -> AbstractContextManager[Any]:
    """Return a context that applies a plan's attention backend to a session.

    Raises:
        UserError: the model is not a torch model, or the device has no such backend.
    """
    requested, device = execution.attention, getattr(session, "device", None)
    if not isinstance(getattr(session, "module", None), torch.nn.Module) or device is None:
        if requested is Attention.auto:
            return nullcontext()
        raise UserError(
            f"execution.attention={requested} is for torch models; leave it out for this one."
        )
    if requested in _ON_GPUS and device.kind != "cuda":
        raise UserError(
            f"execution.attention={requested} needs a GPU, and this is {device.name}: "
            "choose auto, flash, math or fastest."
        )
    is_compiled, verify = execution.compile is not None, execution.attention_verify
    return AttentionBackends(requested, device, compiled=is_compiled, verify=verify).applied()
