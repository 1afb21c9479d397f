"""Layer support: what can compute a model's convolutions and attention, without running it.

`perfexp list algorithms model=NAME` shows the result as a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch

from perfexp.convolution import Backend, attention
from perfexp.convolution.backends import (
    GUESS,
    Choice,
    Cudnn,
    Kernels,
    PassChoice,
    Support,
    Switches,
    first_able,
    supports_of,
)
from perfexp.convolution.coverage import Pass
from perfexp.convolution.cudnn import CODES
from perfexp.convolution.layer import Layer, all_installed
from perfexp.convolution.operators import BENCHMARK, DEFAULT
from perfexp.convolution.portable.algorithms import ALGORITHMS, canonical
from perfexp.convolution.problem import Problem
from perfexp.cost import Inconclusive
from perfexp.cost.trial import MODULE_ERRORS, isolated, trial_outputs, why_refused
from perfexp.errors import UserError
from perfexp.models import Batch, modules
from perfexp.records.record import Key

#: Problems of each convolution by layer name, none for one that computes nothing; and of attention.
_Problems = tuple[dict[str, list[Problem]], list[attention.AttentionProblem]]


def survey(
    session: Any,
    key: Key,
    *,
    backend: str | None = None,
    workspace_bytes: int | None = None,
    backward: Mapping[str, str] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Check all algorithms on a device for each distinct convolution and attention of a model.

    The worker calls it for `perfexp list algorithms model=NAME`.

    Args:
        session: the opened model.
        key: the point that sets phase, input size and batch size.
        backend: the only backend to check; None for all.
        workspace_bytes: limit of cuDNN's workspace; None for no limit.
        backward: cuDNN algorithms by backward pass; they replace the defaults of a forward
            algorithm.
        progress: called with the name of the next layer.

    Returns:
        JSON values. `algorithms`: the names. `unused`: layers that compute nothing. `layers`: an
            entry per distinct problem with `names`, `convolution`, `input_shape`, `dtype`,
            `channels_last`, and `algorithms`. This has an entry by algorithm and pass: `backend`
            and `engine`, or the `reason` for their absence; `workspace_bytes` if known;
            `passed_over`, the reasons of earlier backends. `attention`: an entry per problem with
            `shape`, `dtype`, `auto`, the backend that torch chooses, and `backends`, the reason
            against each; None if it can compute the problem.

    Raises:
        UserError: the model is not a torch model, has neither 2-D convolution nor attention, or
            rejects the inputs.
    """
    module = getattr(session, "module", None)
    if not isinstance(module, torch.nn.Module):
        raise UserError(
            "This model is not a torch model and has no known layers; choose another model."
        )
    problems, attended = _problems_of(session, module, key)
    layers: dict[Problem, list[str]] = {}
    # equal layers have equal support: check each distinct problem once
    for name, requests in problems.items():
        for problem in requests:
            layers.setdefault(problem, []).append(name)
    every: list[Any] = [*layers, *attended]
    if not every:
        raise UserError(
            "The model computes no 2-D convolution and calls no scaled_dot_product_attention; "
            "choose another model."
        )
    device = every[0].device
    named = {
        Pass(pass_type): canonical(name, list(CODES[Pass(pass_type)]))
        for pass_type, name in (backward or {}).items()
    }
    names = _names(device)
    chosen = Backend(backend or Backend.auto)
    supports = {name: _supports(name, chosen, device, workspace_bytes, named) for name in names}
    entries = []
    for problem, sharing in layers.items():
        progress(sharing[0])
        choices = {name: _choices_of(name, supports[name], problem) for name in names}
        entries.append({"names": sharing, **_described(problem), "algorithms": choices})
    unused = [name for name, requests in problems.items() if not requests]
    return {
        "algorithms": names,
        "layers": entries,
        "unused": unused,
        "attention": list(map(_attention_support, attended)),
    }


def _attention_support(problem: attention.AttentionProblem) -> dict[str, Any]:
    """Return the entry for a problem of attention, as `survey` describes it."""
    return {
        "shape": problem.label,
        "dtype": problem.dtype,
        "auto": attention.chosen_by_torch(problem),
        "backends": {name: attention.why_not(name, problem) for name in attention.BACKENDS},
    }


def _described(problem: Problem) -> dict[str, Any]:
    """Return a problem's fields as JSON values, without its passes and device."""
    return {
        "convolution": asdict(problem.convolution),
        "input_shape": problem.shape,
        "dtype": str(problem.dtype).removeprefix("torch."),
        "channels_last": problem.channels_last,
    }


class _Recorder(Support):
    """Records a layer's problems and leaves all computation to torch."""

    def __init__(self) -> None:
        self.problems: dict[Problem, None] = {}

    def choose(self, problem: Problem) -> Choice:
        self.problems[problem] = None
        return super().choose(problem)


class _PlacedModel(torch.nn.Module):
    """A session's model that places its inputs as a run does, with the session's autocast."""

    def __init__(self, session: Any, module: torch.nn.Module) -> None:
        super().__init__()
        self.module, self._session = module, session

    def forward(self, inputs: torch.Tensor) -> Any:
        return self._session.eager(self._session.place(Batch(inputs=inputs, targets=None)).inputs)


def _problems_of(session: Any, module: torch.nn.Module, key: Key) -> _Problems:
    """Return the problems of a model's convolutions and attention.

    Raises `UserError` if the model rejects the inputs.
    """
    training = key.phase == "train"
    modules.train(module, training)
    inputs = session.random_batch(key.input_size, key.batch_size, 0).inputs
    try:
        try:  # the trial needs no time and memory
            return isolated(_record_problems)(session, module, inputs, training=training)
        except Inconclusive:
            return _record_problems(session, module, inputs, training=training, is_trial=False)
    except MODULE_ERRORS as error:
        message = str(error).strip() or type(error).__name__
        reason = why_refused(module, inputs) or message.splitlines()[0]
        shape = " × ".join(map(str, inputs.shape))
        raise UserError(f"The model can't take {shape}: {reason.rstrip('.')}.") from error


def _record_problems(
    session: Any,
    module: torch.nn.Module,
    inputs: torch.Tensor,
    *,
    training: bool,
    is_trial: bool = True,
) -> _Problems:
    """Return the problems of a forward pass; a trial uses tensors without memory."""
    with _recording(module) as recorders, attention.recorded() as attended:
        if is_trial:
            placed = _PlacedModel(session, module).train(training)
            trial_outputs(
                placed, tuple(inputs.shape), inputs.dtype, inputs.device, gradients=training
            )
        else:
            with torch.set_grad_enabled(training):
                session.eager(inputs)
    return {name: list(recorder.problems) for name, recorder in recorders.items()}, list(attended)


@contextmanager
def _recording(module: torch.nn.Module) -> Iterator[dict[str, _Recorder]]:
    """Record the problems of all 2-D convolutions while entered; yield the recorders by layer.

    Torch itself computes the convolutions.
    """
    recorders: dict[str, _Recorder] = {}
    layers = []
    for name, child in module.named_modules():
        if isinstance(child, torch.nn.Conv2d):
            recorders[name] = recorder = _Recorder()
            layers.append(Layer(name, child, DEFAULT, [recorder], lambda *_: None))
    with all_installed(layers):
        yield recorders


def _names(device: torch.device) -> list[str]:
    """Return the algorithms to check on a device."""
    names = list(ALGORITHMS)
    if not isinstance(_supports(GUESS, Backend.auto, device, None, {}), str):
        names += [GUESS, BENCHMARK]
    if device.type == "cpu":
        names += ["onednn"] if torch.backends.mkldnn.is_available() else []
        names.append("native")
    return names


def _supports(
    name: str,
    backend: Backend,
    device: torch.device,
    workspace_bytes: int | None,
    backward: Mapping[Pass, str],
) -> list[Support] | str:
    """Return an algorithm's backends on a device, or the reason for having none.

    The reason is the message of `supports_of` without its beginning.
    """
    try:
        return supports_of(name, backend, device, workspace_bytes, backward)
    except UserError as error:
        return str(error).partition(": ")[2].rstrip(".")


def _choices_of(name: str, supports: Sequence[Support] | str, problem: Problem) -> dict[str, Any]:
    """Return each pass's entry for an algorithm, as `survey` describes it.

    The backend is the first that can compute the outputs.
    """
    if isinstance(supports, str):
        refused = PassChoice(reason=supports)
        return {pass_type.value: _pass_entry(None, refused, {}) for pass_type in problem.passes}
    with Switches.now().of(name).set():
        choice, reasons = first_able(supports, problem)
    # the default covers torch's own implementations, such as oneDNN
    kinds = {Cudnn: Backend.cudnn, Kernels: Backend.triton}
    backends = [
        (Backend.cudnn if name == BENCHMARK else kinds.get(type(support), Backend.torch)).value
        for support in supports
    ]
    chosen = backends[len(reasons)] if len(reasons) < len(backends) else None
    passed_over = dict(zip(backends, reasons, strict=False)) if chosen else {}
    return {
        pass_type.value: _pass_entry(chosen, pass_choice, passed_over)
        for pass_type, pass_choice in choice.items()
    }


def _pass_entry(
    backend: str | None, choice: PassChoice, passed_over: Mapping[str, str]
) -> dict[str, Any]:
    """Return the JSON entry for a pass; backend and engine are None if there is a reason."""
    able = choice.reason is None
    return {
        "backend": backend if able else None,
        "engine": choice.engine if able else None,
        "workspace_bytes": choice.workspace_bytes,
        "reason": choice.reason,
        "passed_over": dict(passed_over),
    }
