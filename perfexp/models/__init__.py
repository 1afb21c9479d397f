"""Models and the sessions in which they live on a device; torch is only imported by the modules beside this one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from perfexp.devices import Device
from perfexp.errors import UserError
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.number_formats import Formats
from perfexp.records.record import Metric
from perfexp.work import Work


class Stem(StrEnum):
    """First layers of a ResNet: 7 × 7 with stride 2 and pooling, or 3 × 3 with stride 1 for images of 32 × 32."""

    imagenet = "imagenet"
    cifar = "cifar"


class ClipSize(StrEnum):
    """Size of a CLIP gesture classifier: 0.5, 1.5, 4, 11, 20 or 35 million parameters."""

    tiny = "tiny"
    small = "small"
    medium = "medium"
    large = "large"
    xlarge = "xlarge"
    xxlarge = "xxlarge"


class Backbone(StrEnum):
    """Inputs of a CLIP gesture classifier: columns of a skeleton's joints, or images of a video."""

    skeleton = "skeleton"
    image = "image"


@dataclass(kw_only=True)
class Precision:
    """The number formats in which a model computes."""

    name: str
    storage: str = "float32"
    autocast: str | None = None
    tf32: bool | None = False


@dataclass(kw_only=True)
class Ddp:
    """Settings of torch's DistributedDataParallel, by their names there; None is torch's default."""

    broadcast_buffers: bool | None = None
    bucket_cap_mb: float | None = None
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False


@dataclass(kw_only=True)
class Execution:
    """How torch runs the model."""

    compile: str | None = None
    channels_last: bool = False
    cuda_graph: bool = False
    cudnn_benchmark: bool = False
    deterministic: bool = False
    threads: int | None = None
    interop_threads: int | None = None
    ddp: Ddp = field(default_factory=Ddp)


@dataclass(kw_only=True)
class Batch:
    """Inputs and targets of one call, in the model's format.

    Inputs are a tensor (batch, channels, height, width) or (batch, channels, frames, height, width), or the model's own
    type; targets are class indices (batch,) or (batch, height, width), or None.
    """

    inputs: Any
    targets: Any


class Schedule(StrEnum):
    """How the learning rate changes over a training."""

    constant = "constant"
    cosine = "cosine"
    step = "step"
    one_cycle = "one_cycle"


class Trainer(Protocol):
    """The state of a training: weights, optimizer, schedule, moving average and random numbers."""

    @property
    def saved(self) -> dict[str, Any]:
        """The facts in the checkpoint that the training resumes from (`epoch`, …); empty for a new one."""

    def begin(self, factor: Callable[[int], float], step: int, seed: int) -> None:
        """Restore the state before the first step, or that of the checkpoint.

        Args:
            factor: learning rate of a step, relative to the optimizer's.
            step: number of the step that comes next, from 0.
            seed: seed of torch's random numbers, where no checkpoint has their state.
        """

    def advance(self) -> None:
        """Set the learning rate of the next step."""

    def average(self) -> None:
        """Add the weights to their moving average."""

    def averaged(self) -> AbstractContextManager[None]:
        """While entered, the model has its averaged weights, if there are any."""

    def prepare_saving(self) -> None:
        """Allocate the host's memory for files that are written later."""

    def save(self, path: Path, facts: dict[str, Any], *, later: bool = False) -> None:
        """Write a checkpoint of the present state with these facts (texts and numbers), atomically.

        Args:
            later: whether a thread may write it while the training goes on, until the next `save` or `finish`.
        """

    def save_weights(self, path: Path, *, later: bool = False) -> None:
        """Write the weights as a plain state dict, averaged if there is an average, atomically; `later`: see `save`."""

    def finish(self) -> None:
        """Wait until every file is written."""


class Session(Protocol):
    """A loaded model on a device: the operations that the modes combine; the defaults are for one without state.

    Attributes:
        changes_inputs: whether the model changes its inputs in place, so that each call works on a copy of them.
    """

    device: Device
    num_classes: int | None
    precision: Precision
    changes_inputs: bool = False

    @property
    def formats(self) -> Formats:
        """The number formats of contractions on the device."""
        return Formats.of(
            self.precision.autocast or self.precision.storage, self.precision.tf32, None
        )

    def random_batch(self, input_size: tuple[int, int], batch_size: int, seed: int) -> Batch:
        """Random inputs (never zeros) of height and width in pixels, and targets of the model's kind, on the device."""

    def random_targets(self, input_size: tuple[int, int], batch_size: int, seed: int) -> Any:
        """Random targets of the model's kind, on the device; see `random_batch`."""
        return None

    def place(self, batch: Batch) -> Batch:
        """Copy a batch of a data loader to the device, in the session's data type and memory format."""
        return batch

    def inferring(self) -> AbstractContextManager[None]:
        """A context for all calls of an inference: evaluation mode, no autograd."""
        return nullcontext()

    def keep_differentiable(self) -> None:
        """Have inference leave only such tensors behind as training can use: `no_grad` in place of inference mode."""
        return None

    def changed_settings(self) -> str:
        """The settings of the process that the model has changed since it was loaded, or asked last; empty for none."""
        return ""

    def evaluating(self) -> AbstractContextManager[None]:
        """A context for a pass whose time does not count: as `inferring`, and without a compiler."""
        return self.inferring()

    def training(self) -> AbstractContextManager[None]:
        """A context for all calls of a training: training mode."""
        return nullcontext()

    def reset(self) -> None:
        """Restore the loaded weights and buffers and clear gradients; each point starts from there."""
        return None

    def adopt(self, weights: Path) -> None:
        """Replace the weights by those of a file until the next `reset`.

        Raises `PerfexpError` if the file is missing, `UserError` if it does not fit, or the session has no weights.
        """
        raise UserError(
            "The model has no weights that could be replaced: set mode.inference.trained=false."
        )

    def forward(self, inputs: Any) -> Any:
        """The model's outputs; enqueued on an asynchronous device."""

    def learn(self, batch: Batch) -> Any:
        """The outputs for a training loss; a model may compute its own losses in the same pass."""
        return self.forward(batch.inputs)

    def first_forward(self, batch: Batch) -> Any:
        """`forward`, or in training `learn`, for the first call of a size; raises `Unsupported` if it does not fit."""
        return self.forward(batch.inputs)

    def check_call(self, outputs: Any, *, is_constant: bool = False) -> None:
        """Raise an error if a call did not compute these outputs, and if it changed inputs that are constant."""
        return None

    def loss(self, outputs: Any, targets: Any, label_smoothing: float = 0.0) -> Any:
        """The scalar to minimize; raises `UserError` where its targets cannot be smoothed."""

    def backward(self, loss: Any) -> None:
        """Compute the gradients of all parameters."""

    def optimizer(self, settings: dict[str, Any]) -> Callable[[], None]:
        """A function that applies and clears gradients, by `name` (`sgd`, `adam`, `adamw`) and torch's arguments.

        Two settings are not torch's: `clip_grad_norm`, and `is_scheduled` for a learning rate that will change.
        """

    def trainer(
        self, *, ema: float | None, batch_size: int, resume_from: str | None
    ) -> Trainer | None:
        """The state of a training by the last `optimizer`; None where it cannot be saved.

        Raises `UserError` for a checkpoint to `resume_from` that is unreadable, or of another training.
        """
        return None

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of tensors of one shape, compiled if the model is."""
        return function

    def discard_compiled(self) -> None:
        """Compile the model again at its next call: its layers are computed by other functions from now on."""
        return None

    def held(self, value: Any) -> Any:
        """A scalar on the device as it is now, for `number` later on; does not synchronize."""
        return value

    def work(self, inputs: Any, *, training: bool) -> Work | None:
        """Analytic work of a call, counted without the device; None where unknown.

        Raises `Unsupported` where the count cannot follow the model.
        """
        return None

    def capture(self, call: Callable[[], object]) -> Callable[[], object]:
        """A function that launches a call on fixed tensors as one CUDA graph; the call first runs a few times.

        Raises `Unsupported` where the call cannot be captured, or the device has no graphs.
        """

    def copy(self, batch: Batch, into: Batch | None = None) -> Batch:
        """A copy of a batch on the device, in new tensors or `into` others; tensors of both batches are not copied."""
        return batch

    def number(self, value: Any) -> float:
        """The value of a scalar on the device; synchronizes."""

    def is_finite(self, outputs: Any) -> bool:
        """Whether a call's outputs contain neither infinities nor NaN; synchronizes, with next to no memory."""
        return True

    def correct(self, outputs: Any, targets: Any) -> tuple[Any, Any]:
        """Number of correct predictions, and number of predictions (pixels, for segmentation).

        Each is an int, or a tensor of one that the device may still compute.
        """
        return 0, 0

    def compilation(self) -> list[Metric]:
        """Time and graphs of a compiler since the last `reset`; none without one."""
        return []

    def facts(self) -> dict[str, Any]:
        """Current versions, flags and thread counts, and the model's parameters, as JSON values."""

    def doubts(self) -> list[Diagnostic]:
        """Diagnostics of settings that could not be applied (a precision that the device lacks, …)."""
        return []


class Model(Protocol):
    """Interface of the object that a `model` node of the configuration builds. Building is cheap; `open` loads."""

    def open(
        self,
        *,
        device: Device,
        precision: Precision,
        execution: Execution,
        num_classes: int | None,
        seed: int,
    ) -> Session:
        """Load weights, move them to the device, and apply the plan's torch settings; raises `UserError`.

        `num_classes` is that of data with real labels; None for the model's own.
        """


@runtime_checkable
class Unwaiting(Protocol):
    """A session whose call synchronizes for side results, and can avoid it."""

    def without_waits(self) -> AbstractContextManager[str]:
        """While entered, a call gives the same result without synchronizing; yields a description of the method."""


class Sharing(StrEnum):
    """How the ranks cooperate in a burst of calls.

    Attributes:
        all: as usual.
        no_gradients: gradients stay apart; SyncBatchNorm still shares statistics.
        nothing: all ranks at the same time, each as if it were alone.
        alone: the first rank, while the others wait.
    """

    all = "all"
    no_gradients = "no_gradients"
    nothing = "nothing"
    alone = "alone"
