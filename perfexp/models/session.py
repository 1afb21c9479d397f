"""Sessions for any torch module, on any torch device, in one process or several ranks."""

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
from perfexp.errors import Unsupported, UserError, did_you_mean
from perfexp.models import (
    Batch,
    Ddp,
    Execution,
    Precision,
    Session,
    Sharing,
    Tokens,
    compilation,
    modules,
    torch_settings,
)
from perfexp.models.cuda_graphs import captured
from perfexp.models.kinds import Kind, correct
from perfexp.models.trainer import TorchTrainer
from perfexp.models.weights import load_trained
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.number_formats import Formats
from perfexp.records.record import Metric

_Builder = Callable[..., torch.optim.Optimizer]
_OPTIMIZERS: dict[str, _Builder] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


def _is_stand_in(module: torch.nn.Module) -> bool:
    """Return whether the parameters have no memory, so there are no values to save.

    This is the case when memory use is traced.
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
        self._doubts = [
            *doubts,
            *unavailable,
            *torch_settings.apply_settings(execution, self.precision),
        ]
        self._execution, self._autocast = (
            execution,
            partial(torch_settings.autocast, self.precision, device),
        )
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
        self._untrained: IO[bytes] | None = None
        self._extra_states: dict[torch.nn.Module, Any] = {}
        self._settings = torch_settings.torch_facts()
        self._differentiates = False
        self._outside: Callable[[], AbstractContextManager[object]] = nullcontext
        self._ranks: DistributedDataParallel | None = None
        self._first_inputs: tuple[Any, list[int | None]] = None, []

    @property
    def formats(self) -> Formats:
        return torch_settings.formats(self.precision, self.device)

    def random_batch(self, input_size: tuple[int, int], batch_size: int, seed: int) -> Batch:
        """See `Session`; `Kind` describes the inputs."""
        generator = torch.Generator().manual_seed(seed)
        inputs = self._kind.random_inputs(input_size, batch_size, generator)
        return self.place(
            Batch(
                inputs=inputs, targets=self._kind.random_targets(input_size, batch_size, generator)
            )
        )

    def random_targets(
        self, input_size: tuple[int, int], batch_size: int, seed: int
    ) -> torch.Tensor | None:
        generator = torch.Generator().manual_seed(seed)
        targets = self._kind.random_targets(input_size, batch_size, generator)
        return None if targets is None else targets.to(self.device.identifier)

    def place(self, batch: Batch) -> Batch:
        """See `Session`; raises `UserError` if the data does not fit the kind of model."""
        inputs, targets = batch.inputs, batch.targets
        self._check_fit(inputs, targets)
        # Only CUDA orders an asynchronous copy before the model's kernels.
        overlapped = self.device.kind == "cuda"

        def placed(tensor: torch.Tensor) -> torch.Tensor:
            data_type, layout = (
                self._data_type if tensor.is_floating_point() else None,
                torch.preserve_format,
            )
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
        """See `Session`. Training cannot use tensors that a module keeps from inference mode."""
        with (
            self._mode(training=False),
            torch.no_grad() if self._differentiates else torch.inference_mode(),
        ):
            yield

    def keep_differentiable(self) -> None:
        self._differentiates = True

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        with self.inferring(), patch.object(self, "_run", self.module):
            yield

    @contextmanager
    def training(self) -> Iterator[None]:
        """See `Session`. The weights before the first training are saved to a file."""
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
        if self._untrained is None and not _is_stand_in(self.module):
            self._untrained = tempfile.TemporaryFile()  # noqa: SIM115 - lives with the session
            weakref.finalize(self, self._untrained.close)
            torch.save(modules.tensors_of(self.module), self._untrained)
            parts = [one for one in self.module.modules() if modules.has_extra_state(one)]
            self._extra_states = {part: deepcopy(part.get_extra_state()) for part in parts}

    def adopt(self, weights: Path) -> None:
        self._save_loaded_weights()
        load_trained(self.module, weights)

    def share(self, settings: Ddp) -> dict[str, Any]:
        """See `measuring.ranks.Shareable`; raises `UserError` if ranks cannot train the module."""
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
        if self._execution.compile:
            compilation.reset()
        self._restore_weights()

    def _restore_weights(self) -> None:
        if self._untrained is not None:
            self._untrained.seek(0)
            state = torch.load(
                self._untrained, map_location=self.device.identifier, weights_only=True
            )
            modules.restore(self.module, state)
            for part, extra in self._extra_states.items():
                part.set_extra_state(deepcopy(extra))
        for parameter in modules.parameters_of(self.module):
            parameter.grad = None

    def forward(self, inputs: Any) -> Any:
        with self._autocast(), self._outside():
            return modules.called(self._run, self._given(inputs))

    def eager(self, inputs: Any) -> Any:
        """Return the model's outputs without the compiler."""
        with self._autocast(), self._outside():
            return modules.called(self.module, self._given(inputs))

    def _given(self, inputs: Any) -> Any:
        return tree_map_only(torch.Tensor, torch.clone, inputs) if self.changes_inputs else inputs

    @contextmanager
    def _left(self) -> Iterator[None]:
        """Leave inference mode for a model that computes gradients in its call."""
        with torch.inference_mode(False), torch.no_grad():
            yield

    def first_forward(self, batch: Batch) -> Any:
        """See `Session`; raises `Unsupported` for a model that defers its computation.

        If the model changes its inputs, later calls get a copy.
        """
        call = (
            partial(self.learn, batch)
            if self.module.training
            else partial(self.forward, batch.inputs)
        )
        restore = modules.restoring(batch.inputs)
        try:
            outputs = call()
        except (TypeError, *MODULE_ERRORS) as error:
            if not self.device.is_out_of_memory(error):
                self._check_inputs(batch.inputs, error)
            if not (torch.is_inference_mode_enabled() and _NEEDS_GRADIENTS.search(str(error))):
                raise
            self._outside = self._left
            outputs = call()
            self._differentiates = True
        self.check_call(outputs)
        self.changes_inputs = restore() or self.changes_inputs
        self._kind.observe(batch.inputs, outputs)
        self._first_inputs = batch.inputs, modules.version_of(batch.inputs)
        return outputs

    def check_call(self, outputs: Any, *, is_constant: bool = False) -> None:
        if unfinished := modules.unfinished(outputs):
            raise Unsupported(
                f"{self._name} returns a {unfinished}, and computes when that is used: return "
                "tensors."
            )
        tensors = (modules.parameters_of(self.module), self.module.buffers(), tensors_in(outputs))
        if not _is_stand_in(self.module) and any(map(is_stand_in, chain(*tensors))):
            raise RuntimeError(
                "the call computed with tensors without memory (meta or fake), so its time is wrong"
            )
        inputs, version = self._first_inputs
        if is_constant and modules.version_of(inputs) != version:
            raise RuntimeError(
                "the model changes its inputs, but not in its first call: clone them in forward"
            )

    def loss(self, outputs: Any, targets: Any, label_smoothing: float = 0.0) -> Any:
        with self._autocast():
            return self._kind.loss(outputs, targets, label_smoothing)

    def backward(self, loss: Any) -> None:
        """See `Session`. With fp16 autocast the loss is scaled so that small gradients survive."""
        self._scaler.scale(loss).backward()

    def _updates(
        self,
        optimizer: torch.optim.Optimizer,
        clip: Callable[[], object] | None = None,
        schedules: Sequence[Any] = (),
    ) -> Callable[[], None]:
        self._optimizer, self._scaler = optimizer, self._new_scaler()
        scaler = self._scaler

        def update() -> None:
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
        try:
            with self._mode(training=training), self._autocast(), self.sharing(Sharing.alone):
                named = self._call_of(inputs, training=training)
                given = (
                    inputs
                    if isinstance(inputs, tuple)
                    else ()
                    if isinstance(inputs, dict)
                    else (inputs,)
                )
                named |= inputs if isinstance(inputs, dict) else {}
                return count(self.module, *given, keywords=named, backward=training)
        except Inconclusive as error:
            raise Unsupported(
                f"the model can't be followed without its numbers: {error}"
            ) from error

    def tokens(self, inputs: Any) -> Tokens | None:
        count = self._kind.tokens(inputs)
        return Tokens(count=count) if count else None

    def capture(self, call: Callable[[], object]) -> Callable[[], object]:
        if self.device.kind != "cuda":
            raise Unsupported(f"{self.device.name} has no CUDA graphs")
        # restores the stream after a failed capture
        with torch.cuda.stream(torch.cuda.current_stream()):
            return captured(call, self.device, self.module, self._optimizer)

    def copy(self, batch: Batch, into: Batch | None = None) -> Batch:
        if into is None:
            inputs, targets = tree_map_only(
                torch.Tensor, torch.clone, (batch.inputs, batch.targets)
            )
            return Batch(inputs=inputs, targets=targets)
        tensors = (tree_leaves((one.inputs, one.targets)) for one in (into, batch))
        for old, new in zip(*tensors, strict=True):
            if old is not new and isinstance(old, torch.Tensor):
                old.copy_(new, non_blocking=True)
        return into

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, dynamic=False) if self._execution.compile else function

    def discard_compiled(self) -> None:
        if self._execution.compile:
            torch.compiler.reset()

    def held(self, value: Any) -> Any:
        return value.detach().clone()

    def number(self, value: Any) -> float:
        return float(value.detach())

    def is_finite(self, outputs: Any) -> bool:
        """See `Session`; a minimum or maximum is NaN if any element is."""
        leaves = (
            leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.numel()
        )
        tensors = (
            leaf.coalesce().values() if leaf.layout is torch.sparse_coo else leaf for leaf in leaves
        )
        extremes = (
            torch.stack(torch.aminmax(one.detach())) for one in tensors if one.is_floating_point()
        )
        return all(bool(torch.isfinite(pair).all()) for pair in extremes)

    def correct(self, outputs: Any, targets: Any) -> tuple[Any, Any]:
        return correct(outputs, targets)

    def compilation(self) -> list[Metric]:
        return compilation.metrics() if self._execution.compile else []

    def facts(self) -> dict[str, Any]:
        lazy = torch.nn.parameter.is_lazy
        parameters = [one for one in modules.parameters_of(self.module) if not lazy(one)]
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
        return list(self._doubts)

    def changed_settings(self) -> str:
        now = torch_settings.torch_facts()
        before, self._settings = self._settings, now
        return ", ".join(
            f"{name} {before[name]} → {now[name]}"
            for name in _OF_PROCESS
            if before[name] != now[name]
        )

    def _compiled(self, module: torch.nn.Module) -> Callable[..., Any]:
        if self._execution.compile is None:
            return module
        # One graph per shape: a dynamic graph is slower and depends on the order of shapes.
        compiled: Callable[..., Any] = torch.compile(
            module, mode=self._execution.compile, dynamic=False
        )
        return compiled

    def _call_of(self, inputs: Any, *, training: bool) -> dict[str, Any]:
        return {}

    def _fuses(self, settings: Mapping[str, Any]) -> bool:
        """Return whether to use a fused optimizer.

        It is the fastest choice in a graph. With a gradient scaler, any other optimizer
        synchronizes in each step.
        """
        gains = self._execution.cuda_graph or (
            self._scaler.is_enabled() and self.device.kind == "cuda"
        )
        return gains and "foreach" not in settings and not settings.get("dampening")

    @contextmanager
    def _mode(self, *, training: bool) -> Iterator[None]:
        before = self._trains
        self._set_mode(training)
        try:
            yield
        finally:
            self._set_mode(before)

    def _set_mode(self, training: bool) -> None:
        if (self._trains, bool(self.module.training)) != (training, training):
            modules.set_mode(self.module, training)
            self._trains = training

    def _check_inputs(self, inputs: Any, error: Exception) -> None:
        """Raise `Unsupported` if a call failed because the module does not accept these inputs."""
        reason = modules.missing_inputs(self.module, inputs)
        if not isinstance(inputs, torch.Tensor):
            reason = reason or str(error).splitlines()[0]
            raise Unsupported(
                f"{self._name} can't take its inputs: {reason}.{self._kind.inputs_help}"
            )
        with self.sharing(Sharing.alone):
            reason = reason or why_refused(self.module, inputs)
        if reason is not None:
            shape = " × ".join(map(str, inputs.shape))
            raise Unsupported(f"{self._name} can't take {shape}: {reason}.{self._kind.inputs_help}")

    def _check_fit(self, inputs: Any, targets: torch.Tensor | None) -> None:
        dims = (
            []
            if self._kind.input_dims is None
            else [("inputs", self._kind.input_dims, inputs.ndim)]
        )
        if targets is not None and self._kind.target_dims is not None:
            dims.append(("targets", self._kind.target_dims, targets.ndim))
        for what, wanted, dimensions in dims:
            if dimensions != wanted:
                raise UserError(
                    f"{self._name} ({self._kind.name}) takes {what} of {wanted} dimensions, the "
                    "data gives "
                    f"{dimensions}. Choose data of the model's kind; data=synthetic fits every "
                    "model."
                )

    def _new_scaler(self) -> torch.amp.GradScaler:
        kind = torch.device(str(self.device.identifier)).type
        return torch.amp.GradScaler(kind, enabled=self.precision.autocast == "float16")

    def optimizer(self, settings: dict[str, Any]) -> Callable[[], None]:
        settings = dict(settings)
        name = settings.pop("name", "sgd")
        if name not in _OPTIMIZERS:
            raise UserError(f"There is no optimizer {name!r}. {did_you_mean(name, _OPTIMIZERS)}")
        # an author's `parameters` may return groups
        parameters = list(self.module.parameters())
        if all(isinstance(one, torch.Tensor) for one in parameters):
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
        largest_norm, is_scheduled = (
            settings.pop("clip_grad_norm", None),
            settings.pop("is_scheduled", False),
        )
        # a graph would replay the rate from its capture
        if is_scheduled and self._execution.cuda_graph:
            settings |= {
                "lr": torch.tensor(float(settings["lr"]), device=self.device.identifier),
                "fused": True,
            }
        elif self._fuses(settings):
            settings = {"fused": True, **settings}
        try:
            optimizer = _OPTIMIZERS[name](parameters, **settings)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(
                f"The optimizer {name} does not take these settings: {error}. Take one out with "
                "~mode.train.optimizer.NAME."
            ) from error
        if (
            name == "sgd"
            and settings.get("fused")
            and settings.get("momentum")
            and not settings.get("dampening")
        ):
            begin_momentum(
                optimizer, [one for group in optimizer.param_groups for one in group["params"]]
            )
        own = [one for group in optimizer.param_groups for one in group["params"]]
        clip = (
            None
            if largest_norm is None
            else partial(torch.nn.utils.clip_grad_norm_, own, largest_norm)
        )
        return self._updates(optimizer, clip)

    def trainer(
        self, *, ema: float | None, batch_size: int, resume_from: str | None
    ) -> TorchTrainer | None:
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


def begin_momentum(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]) -> None:
    """Initialize the momentum of SGD without dampening to zero, as before the first gradient.

    Otherwise the fused form in torch 2.11 allocates it in the first step. If an overflow skips that
    step, the memory stays uninitialized and the loss is NaN from then on (seen on an H200;
    LibreYOLO pull request 771).
    """
    for parameter in parameters:
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
