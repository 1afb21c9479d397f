"""Sessions for any torch module, on any torch device, in one process or several ranks.

Every torch model opens a `TorchSession`; its `Kind` supplies inputs, targets and the loss. A rank
is one of several processes that train the same model, each on its own device.
"""

from __future__ import annotations

import re
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map_only

from perfexp.cost import Inconclusive, Work
from perfexp.cost.count import count
from perfexp.cost.tensors import tensors_in
from perfexp.cost.trial import MODULE_ERRORS, is_stand_in, why_refused
from perfexp.devices import Device
from perfexp.errors import Unsupported, UserError, line_of
from perfexp.models import (
    Batch,
    Ddp,
    Execution,
    Precision,
    Session,
    Sharing,
    Tokens,
    modules,
    torch_settings,
)
from perfexp.models.cuda_graphs import captured
from perfexp.models.kinds import Kind, correct
from perfexp.models.trainer import TorchTrainer, build_optimizer
from perfexp.models.weights import load_trained
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.number_formats import Formats
from perfexp.records.record import Metric


def _has_no_values(module: torch.nn.Module) -> bool:
    """Return whether the module's parameters have no memory, so there are no values to save.

    This is the case when `perfexp.cost` traces memory use with fake tensors.
    """
    return isinstance(next(modules.parameters_of(module), None), FakeTensor)


#: Errors raised in inference mode if a call computes gradients.
_NEEDS_GRADIENTS = re.compile("does not require grad|inference tensor|InferenceMode", re.IGNORECASE)
#: Process settings that a model may change while it runs.
_OF_PROCESS = (
    "threads",
    "matmul_allow_tf32",
    "cudnn_allow_tf32",
    "cudnn_benchmark",
    "deterministic",
)


def is_shared() -> bool:
    """Return whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class TorchSession(Session):
    """A module on a device; raises `UserError` if the settings do not fit the device.

    Args:
        precision: requested precision. If the device lacks it, fp32 and a diagnostic replace it.
        facts: model facts such as `weights`, recorded along with the session's own.
        doubts: model diagnostics, recorded along with the session's own.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        kind: Kind,
        name: str,
        device: Device,
        precision: Precision,
        execution: Execution,
        facts: dict[str, Any],
        doubts: Sequence[Diagnostic] = (),
    ) -> None:
        if device.identifier is None:
            raise UserError(
                f"{name} is a torch model, and torch does not know the device {device.name}."
            )
        if execution.cuda_graph and device.kind != "cuda":
            raise UserError(
                f"execution.cuda_graph needs a CUDA device, not {device.name}; set it to false."
            )
        self.num_classes = kind.num_classes
        self._kind, self._name, self.device, self._facts = kind, name, device, facts
        self.precision, unavailable = torch_settings.effective_precision(precision, device)
        failed = torch_settings.apply_settings(execution, self.precision)
        self._doubts = [*doubts, *unavailable, *failed]
        self._execution = execution
        self._autocast = partial(torch_settings.autocast, self.precision, device)
        self._data_type: torch.dtype = getattr(torch, self.precision.storage)
        self.module = module
        modules.evaluate(module)
        self._trains = False
        modules.place(module, device.identifier, self._data_type)
        if execution.channels_last:
            torch_settings.make_channels_last(self.module)
        # what runs in inference, in training, and on this rank alone
        self._run = self._trained = self._single = self._compiled(self.module)
        self._scaler = self._new_scaler()
        self._optimizer: torch.optim.Optimizer | None = None
        self._weights_file: IO[bytes] | None = None
        self._extra_states: dict[torch.nn.Module, Any] = {}
        self._settings = torch_settings.torch_facts()
        self._differentiates = False
        self._call_context: Callable[[], AbstractContextManager[object]] = nullcontext
        self._ranks: DistributedDataParallel | None = None
        self._first_inputs: tuple[Any, list[int | None]] = None, []

    @property
    def formats(self) -> Formats:
        """Return the number formats for contractions on the device, from torch's flags."""
        return torch_settings.formats(self.precision, self.device)

    def random_batch(self, input_size: tuple[int, int], batch_size: int, seed: int) -> Batch:
        """Return random inputs and targets on the device, in the session's data type.

        `Kind` describes their shapes. The same seed gives the same batch.
        """
        generator = torch.Generator().manual_seed(seed)
        inputs = self._kind.random_inputs(input_size, batch_size, generator)
        targets = self._kind.random_targets(input_size, batch_size, generator)
        return self.place(Batch(inputs=inputs, targets=targets))

    def random_targets(
        self, input_size: tuple[int, int], batch_size: int, seed: int
    ) -> torch.Tensor | None:
        """Return random targets on the device; None if the kind of model has none."""
        generator = torch.Generator().manual_seed(seed)
        targets = self._kind.random_targets(input_size, batch_size, generator)
        return None if targets is None else targets.to(self.device.identifier)

    def place(self, batch: Batch) -> Batch:
        """Copy a batch to the device, in the session's data type and layout.

        Integer tensors, such as token ids, keep their type. Raises `UserError` if the data does not
        fit the kind of model.
        """
        inputs, targets = batch.inputs, batch.targets
        self._check_fit(inputs, targets)
        # Only CUDA orders an asynchronous copy before the model's kernels.
        overlapped = self.device.kind == "cuda"

        def placed(tensor: torch.Tensor) -> torch.Tensor:
            """Return a tensor on the device, in the session's data type and layout."""
            data_type = self._data_type if tensor.is_floating_point() else None
            layout = torch.preserve_format
            if self._execution.channels_last:
                layout = torch_settings.channels_last_format(tensor)
            return tensor.to(
                self.device.identifier, data_type, non_blocking=overlapped, memory_format=layout
            )

        inputs = tree_map_only(torch.Tensor, placed, inputs)
        if targets is not None:
            targets = targets.to(self.device.identifier, non_blocking=overlapped)
        return Batch(inputs=inputs, targets=targets)

    @contextmanager
    def inferring(self) -> Iterator[None]:
        """Set evaluation mode and disable autograd for all inference calls inside the context.

        Training cannot use tensors that a module keeps from inference mode, so
        `keep_differentiable` makes this `no_grad`.
        """
        with (
            self._mode(training=False),
            torch.no_grad() if self._differentiates else torch.inference_mode(),
        ):
            yield

    def keep_differentiable(self) -> None:
        """Use `no_grad` instead of inference mode from now on."""
        self._differentiates = True

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Enter `inferring` without the compiler, for untimed passes, such as hooks on layers."""
        with self.inferring(), patch.object(self, "_run", self.module):
            yield

    @contextmanager
    def training(self) -> Iterator[None]:
        """Set training mode and enable autograd inside the context.

        Before the first training, the weights are saved to a temporary file for `reset`.
        """
        self._save_loaded_weights()
        try:
            with (
                self._mode(training=True),
                torch.enable_grad(),
                patch.object(self, "_run", self._trained),
            ):
                yield
        finally:
            # its state would count as memory of the next point
            self._optimizer = None

    def _save_loaded_weights(self) -> None:
        """Save the loaded weights to a temporary file for `reset`, before anything changes them.

        Later calls do nothing. Inference alone changes no weights, so it needs no file.
        """
        if self._weights_file is None and not _has_no_values(self.module):
            self._weights_file = tempfile.TemporaryFile()  # noqa: SIM115 - lives with the session
            weakref.finalize(self, self._weights_file.close)
            torch.save(modules.tensors_of(self.module), self._weights_file)
            parts = [
                submodule
                for submodule in self.module.modules()
                if modules.has_extra_state(submodule)
            ]
            self._extra_states = {part: deepcopy(part.get_extra_state()) for part in parts}

    def adopt(self, weights: Path) -> None:
        """Replace the weights with a file's contents until the next `reset`.

        Inference with this run's trained weights (`mode.inference.trained=true`) needs it. Raises
        `PerfexpError` if the file is missing, `UserError` if it does not fit.
        """
        self._save_loaded_weights()
        load_trained(self.module, weights)

    def share(self, settings: Ddp) -> dict[str, Any]:
        """Train with other ranks from now on, with DistributedDataParallel.

        Return facts for the record. The worker's ranks call it once, after `open`. Raises
        `UserError` if ranks cannot train the module.
        """
        options = {name: value for name, value in vars(settings).items() if value is not None}
        try:
            self._ranks = DistributedDataParallel(self.module, **options)
        except (RuntimeError, ValueError, TypeError) as error:
            raise UserError(f"The model can't be trained by several ranks: {error}") from error
        self._trained = self._compiled(self._ranks)
        norms = sum(isinstance(child, torch.nn.SyncBatchNorm) for child in self.module.modules())
        return {"ddp": options, "sync_batch_norms": norms}

    @contextmanager
    def sharing(self, what: Sharing) -> Iterator[None]:
        """Limit what ranks exchange to `what` inside the context; without ranks, change nothing.

        Comparing bursts with and without exchange shows the cost of communication.
        """
        if self._ranks is None or what is Sharing.all:
            yield
        elif what is Sharing.no_gradients:
            with self._ranks.no_sync():  # SyncBatchNorm still communicates
                yield
        else:
            # SyncBatchNorm, mmengine and heads with shared statistics all query torch.distributed
            alone = patch.object(dist, "is_initialized", lambda: False)
            with alone, patch.object(self, "_run", self._single):
                yield

    def reset(self) -> None:
        """Restore the loaded weights, clear gradients and discard compiled code.

        The procedure calls it before each point.
        """
        if self._execution.compile:
            torch_settings.reset_compiler()
        self._restore_weights()

    def _restore_weights(self) -> None:
        """Load the weights from the temporary file if there is one, and clear gradients.

        There is one if training or `adopt` may have changed the weights.
        """
        if self._weights_file is not None:
            self._weights_file.seek(0)
            state = torch.load(
                self._weights_file, map_location=self.device.identifier, weights_only=True
            )
            modules.restore(self.module, state)
            for part, extra in self._extra_states.items():
                part.set_extra_state(deepcopy(extra))
        for parameter in modules.parameters_of(self.module):
            parameter.grad = None

    def forward(self, inputs: Any) -> Any:
        """Return the model's outputs; on a GPU, only enqueue the computation."""
        with self._autocast(), self._call_context():
            return modules.called(self._run, self._fresh(inputs))

    def eager(self, inputs: Any) -> Any:
        """Return the model's outputs without the compiler."""
        with self._autocast(), self._call_context():
            return modules.called(self.module, self._fresh(inputs))

    def _fresh(self, inputs: Any) -> Any:
        """Return the inputs, or a copy if the model changes its inputs in place."""
        return tree_map_only(torch.Tensor, torch.clone, inputs) if self.changes_inputs else inputs

    @contextmanager
    def _outside_inference_mode(self) -> Iterator[None]:
        """Leave inference mode for a model that computes gradients in its call."""
        with torch.inference_mode(False), torch.no_grad():
            yield

    def first_forward(self, batch: Batch) -> Any:
        """Return the outputs of the first call at a size, and adapt to what the call does.

        If the model changes its inputs, later calls get a copy. If it computes gradients in
        inference, later calls leave inference mode. Raises `Unsupported` if the inputs do not fit
        the model, or if its outputs compute later.
        """
        call = partial(self.forward, batch.inputs)
        if self.module.training:
            call = partial(self.learn, batch)
        restore = modules.restoring(batch.inputs)
        try:
            outputs = call()
        except (TypeError, *MODULE_ERRORS) as error:
            if not self.device.is_out_of_memory(error):
                self._check_inputs(batch.inputs, error)
            if not (torch.is_inference_mode_enabled() and _NEEDS_GRADIENTS.search(str(error))):
                raise
            self._call_context = self._outside_inference_mode
            outputs = call()
            self._differentiates = True
        self.check_call(outputs)
        self.changes_inputs = restore() or self.changes_inputs
        self._kind.observe(batch.inputs, outputs)
        self._first_inputs = batch.inputs, modules.version_of(batch.inputs)
        return outputs

    def check_call(self, outputs: Any, *, is_constant: bool = False) -> None:
        """Raise an error if a call did not compute `outputs` or changed constant inputs.

        `Unsupported` means that the outputs compute when they are used, such as a generator.
        `RuntimeError` means that the measured time would be wrong.

        Args:
            is_constant: whether every call gets the inputs of the first one, so that they must not
                change.
        """
        if unfinished := modules.unfinished(outputs):
            raise Unsupported(
                f"{self._name} returns a {unfinished}, and computes when that is used: return "
                "tensors."
            )
        tensors = (modules.parameters_of(self.module), self.module.buffers(), tensors_in(outputs))
        if not _has_no_values(self.module) and any(map(is_stand_in, chain(*tensors))):
            raise RuntimeError(
                "the call computed with tensors without memory (meta or fake), so its time is wrong"
            )
        inputs, version = self._first_inputs
        if is_constant and modules.version_of(inputs) != version:
            raise RuntimeError(
                "the model changes its inputs, but not in its first call: clone them in forward"
            )

    def loss(self, outputs: Any, targets: Any, label_smoothing: float = 0.0) -> Any:
        """Return the scalar to minimize; the kind of model defines it."""
        with self._autocast():
            return self._kind.loss(outputs, targets, label_smoothing)

    def backward(self, loss: Any) -> None:
        """Compute the gradients.

        With fp16 autocast the loss is scaled so that small gradients survive.
        """
        self._scaler.scale(loss).backward()

    def _update_function(
        self,
        optimizer: torch.optim.Optimizer,
        clip: Callable[[], object] | None = None,
        schedules: Sequence[Any] = (),
    ) -> Callable[[], None]:
        """Return a function that applies the gradients once and then clears them.

        Args:
            clip: function that clips the gradients, called after they are unscaled.
            schedules: learning rate schedules to advance after each update.
        """
        self._optimizer, self._scaler = optimizer, self._new_scaler()
        scaler = self._scaler

        def update() -> None:
            """Clip and apply the gradients, clear them, and advance the schedules."""
            if clip is not None:
                scaler.unscale_(optimizer)
                clip()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            for schedule in schedules:
                schedule.step()

        return update

    def work(self, inputs: Any, *, training: bool) -> Work:
        """Return the analytic work per call, counted without the device and without other ranks.

        Raises `Unsupported` if the model's control flow depends on tensor values.
        """
        try:
            with self._mode(training=training), self._autocast(), self.sharing(Sharing.alone):
                named = self._work_arguments(inputs, training=training)
                if isinstance(inputs, dict):
                    return count(self.module, keywords=named | inputs, backward=training)
                positional = inputs if isinstance(inputs, tuple) else (inputs,)
                return count(self.module, *positional, keywords=named, backward=training)
        except Inconclusive as error:
            raise Unsupported(
                f"the model can't be followed without its numbers: {error}"
            ) from error

    def tokens(self, inputs: Any) -> Tokens | None:
        """Return the tokens among a call's inputs; None for a model of images."""
        count = self._kind.tokens(inputs)
        return Tokens(count=count) if count else None

    def capture(self, call: Callable[[], object]) -> Callable[[], object]:
        """Return a function that launches a call on fixed tensors as one CUDA graph.

        Raises `Unsupported` without CUDA, or if the call cannot be captured.
        """
        if self.device.kind != "cuda":
            raise Unsupported(f"{self.device.name} has no CUDA graphs")
        # restores the stream after a failed capture
        with torch.cuda.stream(torch.cuda.current_stream()):
            return captured(call, self.device, self.module, self._optimizer)

    def copy(self, batch: Batch, into: Batch | None = None) -> Batch:
        """Copy a batch on the device to new tensors, or `into` another batch; return the copy.

        Tensors that both batches share are not copied.
        """
        if into is None:
            inputs, targets = tree_map_only(
                torch.Tensor, torch.clone, (batch.inputs, batch.targets)
            )
            return Batch(inputs=inputs, targets=targets)
        targets = tree_leaves((into.inputs, into.targets))
        sources = tree_leaves((batch.inputs, batch.targets))
        for old, new in zip(targets, sources, strict=True):
            if old is not new and isinstance(old, torch.Tensor):
                old.copy_(new, non_blocking=True)
        return into

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, compiled with static shapes if the model is compiled."""
        return torch.compile(function, dynamic=False) if self._execution.compile else function

    def discard_compiled(self) -> None:
        """Compile the model again at its next call, because its layers use other functions now."""
        if self._execution.compile:
            torch.compiler.reset()

    def held(self, value: Any) -> Any:
        """Return a copy of a device scalar that the next call does not overwrite.

        It does not synchronize with the device.
        """
        return value.detach().clone()

    def number(self, value: Any) -> float:
        """Return the value of a device scalar as a float; synchronizes with the device."""
        return float(value.detach())

    def is_finite(self, outputs: Any) -> bool:
        """Return whether the outputs contain neither infinities nor NaN; synchronizes.

        A minimum or maximum is NaN if any element is, so two numbers per tensor are enough.
        """
        for tensor in tree_leaves(outputs):
            if not isinstance(tensor, torch.Tensor) or not tensor.numel():
                continue
            if tensor.layout is torch.sparse_coo:
                tensor = tensor.coalesce().values()
            if tensor.is_floating_point():
                extremes = torch.stack(torch.aminmax(tensor.detach()))
                if not torch.isfinite(extremes).all():
                    return False
        return True

    def correct(self, outputs: Any, targets: Any) -> tuple[Any, Any]:
        """Return two one-element device tensors: correctly predicted targets, and all targets."""
        return correct(outputs, targets)

    def compilation(self) -> list[Metric]:
        """Return compile time and graph counts since the last `reset`; empty without a compiler."""
        return torch_settings.compilation_metrics() if self._execution.compile else []

    def facts(self) -> dict[str, Any]:
        """Return the model's and torch's facts for the record, as JSON values.

        Examples are `parameters` (a count), `parameter_bytes` and `threads`. Parameters that a lazy
        module has not made yet do not count.
        """
        lazy = torch.nn.parameter.is_lazy
        parameters = [tensor for tensor in modules.parameters_of(self.module) if not lazy(tensor)]
        return {
            **torch_settings.torch_facts(),
            "precision": self.precision.name,
            "grad_mode": "no_grad" if self._differentiates else "inference_mode",
            "architecture": type(self.module).__name__,
            "kind": self._kind.name,
            "num_classes": self.num_classes,
            "parameters": sum(parameter.numel() for parameter in parameters),
            "parameter_bytes": sum(
                parameter.numel() * parameter.element_size() for parameter in parameters
            ),
            **self._facts,
        }

    def doubts(self) -> list[Diagnostic]:
        """Return diagnostics for settings that could not be applied, such as a precision."""
        return list(self._doubts)

    def changed_settings(self) -> str:
        """Return the process settings that the model changed since the last query, or "".

        For example `threads 8 → 1`. The procedure asks after each point.
        """
        now = torch_settings.torch_facts()
        before, self._settings = self._settings, now
        return ", ".join(
            f"{name} {before[name]} → {now[name]}"
            for name in _OF_PROCESS
            if before[name] != now[name]
        )

    def _compiled(self, module: torch.nn.Module) -> Callable[..., Any]:
        """Return the module, compiled if `execution.compile` names a mode.

        The compiler runs at the first call with a shape.
        """
        if self._execution.compile is None:
            return module
        # One graph per shape: a dynamic graph is slower and depends on the order of shapes.
        compiled: Callable[..., Any] = torch.compile(
            module, mode=self._execution.compile, dynamic=False
        )
        return compiled

    def _work_arguments(self, inputs: Any, *, training: bool) -> dict[str, Any]:
        """Return further named arguments for counting a call's work, such as targets.

        The base class adds none; mmsegmentation's models do in training.
        """
        return {}

    def _fuses(self, settings: Mapping[str, Any]) -> bool:
        """Return whether to use a fused optimizer, which updates all parameters in a few kernels.

        It is the fastest choice in a graph. With a gradient scaler, any other optimizer
        synchronizes in each step. torch has no fused form with `foreach` or dampening.
        """
        gains = self._execution.cuda_graph or (
            self._scaler.is_enabled() and self.device.kind == "cuda"
        )
        return gains and "foreach" not in settings and not settings.get("dampening")

    @contextmanager
    def _mode(self, *, training: bool) -> Iterator[None]:
        """Set training or evaluation mode inside the context; restore the previous mode."""
        before = self._trains
        self._set_mode(training)
        try:
            yield
        finally:
            self._set_mode(before)

    def _set_mode(self, training: bool) -> None:
        """Set the module's mode unless it is set; switching walks through all submodules."""
        if (self._trains, bool(self.module.training)) != (training, training):
            # as training scripts do, with `train()` and `eval()`
            if training:
                modules.train(self.module, True)
            else:
                modules.evaluate(self.module)
            self._trains = training

    def _check_inputs(self, inputs: Any, error: Exception) -> None:
        """Raise `Unsupported` if a call failed because the module does not accept these inputs.

        `first_forward` calls it with the call's error. For tensors, a trial without memory finds
        the reason; if it finds none, the error has another cause and nothing is raised.
        """
        reason = modules.missing_inputs(self.module, inputs)
        if not isinstance(inputs, torch.Tensor):
            reason = reason or str(error).splitlines()[0]
            raise Unsupported(
                f"{self._name} can't take its inputs: {reason}{line_of(error)}."
                f"{self._kind.inputs_help}"
            )
        with self.sharing(Sharing.alone):
            reason = reason or why_refused(self.module, inputs)
        if reason is not None:
            shape = " × ".join(map(str, inputs.shape))
            raise Unsupported(
                f"{self._name} can't take {shape}: {reason}{line_of(error)}."
                f"{self._kind.inputs_help}"
            )

    def _check_fit(self, inputs: Any, targets: torch.Tensor | None) -> None:
        """Raise `UserError` if inputs or targets lack the dimensions that the kind needs."""
        kind = self._kind
        checks = []
        if kind.input_dims is not None:
            checks.append(("inputs", kind.input_dims, inputs.ndim))
        if targets is not None and kind.target_dims is not None:
            checks.append(("targets", kind.target_dims, targets.ndim))
        for name, expected, dimensions in checks:
            if dimensions != expected:
                raise UserError(
                    f"{self._name} ({self._kind.name}) takes {name} of {expected} dimensions, the "
                    "data gives "
                    f"{dimensions}. Choose data of the model's kind; data=synthetic fits every "
                    "model."
                )

    def _new_scaler(self) -> torch.amp.GradScaler:
        """Return a gradient scaler for the device; it does nothing except with fp16 autocast."""
        kind = torch.device(str(self.device.identifier)).type
        return torch.amp.GradScaler(kind, enabled=self.precision.autocast == "float16")

    def optimizer(self, settings: dict[str, Any]) -> Callable[[], None]:
        """Return a function that applies and clears gradients; see `Session` for the settings.

        Raises `UserError` for settings that torch refuses, or without parameters to train.
        """
        settings = dict(settings)
        name = settings.pop("name", "sgd")
        largest_norm = settings.pop("clip_grad_norm", None)
        is_scheduled = settings.pop("is_scheduled", False)
        parameters = self._trainable_parameters()
        # a graph would replay the rate from its capture
        if is_scheduled and self._execution.cuda_graph:
            rate = torch.tensor(float(settings["lr"]), device=self.device.identifier)
            settings |= {"lr": rate, "fused": True}
        elif self._fuses(settings):
            settings = {"fused": True, **settings}
        optimizer = build_optimizer(name, parameters, settings)
        if largest_norm is None:
            return self._update_function(optimizer)
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        clip = partial(torch.nn.utils.clip_grad_norm_, trained, largest_norm)
        return self._update_function(optimizer, clip)

    def _trainable_parameters(self) -> list[Any]:
        """Return the parameters, or groups of parameters, that the optimizer updates.

        Raises `Unsupported` if the module makes them in its first call, `UserError` if there are
        none.
        """
        # an author's `parameters` may return groups, which torch's optimizers accept
        parameters = list(self.module.parameters())
        if all(isinstance(item, torch.Tensor) for item in parameters):
            parameters = [parameter for parameter in parameters if parameter.requires_grad]
        if any(map(torch.nn.parameter.is_lazy, modules.parameters_of(self.module))):
            raise Unsupported(
                f"{self._name} makes parameters in its first call (lazy modules): call it once "
                "to train it"
            )
        if not parameters:
            raise UserError(
                f"{self._name} has no parameters that could be trained; measure it with "
                "mode=inference."
            )
        return parameters

    def trainer(
        self, *, ema: float | None, batch_size: int, resume_from: str | None
    ) -> TorchTrainer | None:
        """Return the training state for the last `optimizer`, resumed from a checkpoint if given.

        Args:
            ema: decay of the moving average of the weights per step; None for no average.
            batch_size: samples per step, saved in checkpoints and compared on resuming.
            resume_from: path to a checkpoint. `UserError` is raised if it does not fit.
        """
        assert self._optimizer is not None
        trainer = TorchTrainer(
            self.module,
            self._optimizer,
            self._scaler,
            self._restore_weights,
            decay=ema,
            batch_size=batch_size,
        )
        if resume_from is not None:
            trainer.resume(Path(resume_from).expanduser())
        return trainer
