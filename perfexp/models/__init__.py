"""Models: interfaces of models and sessions. Only the other modules here import torch.

A `model` node in the configuration builds a `Model`. The worker opens it on a device, which gives a
`Session`: the loaded model with the operations that measuring modes combine into calls. A call is a
forward pass (inference) or a training step.

May import: cost, devices, host, records. Used by: api, cli, commands, convolution, data, measuring,
plan, worker.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from perfexp.cost import Work
from perfexp.devices import Device
from perfexp.errors import UserError
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.number_formats import Formats
from perfexp.records.record import Metric


class Stem(StrEnum):
    """First layers of a ResNet.

    `imagenet` is a 7 × 7 convolution with stride 2, then pooling. `cifar` is a 3 × 3 convolution
    with stride 1 for images of 32 × 32 pixels.
    """

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
    """Inputs of a CLIP gesture classifier: skeleton joint coordinates or video frames."""

    skeleton = "skeleton"
    image = "image"


@dataclass(kw_only=True)
class Precision:
    """Number formats for a model's computations, from the `precision` node of the configuration.

    Types are names of torch's, for example `bfloat16`. `plan/key_descriptions.yaml` describes the
    fields of all such classes.
    """

    name: str
    storage: str = "float32"
    autocast: str | None = None
    tf32: bool | None = False


@dataclass(kw_only=True)
class Ddp:
    """Settings of DistributedDataParallel, under torch's names. None means torch's default."""

    broadcast_buffers: bool | None = None
    bucket_cap_mb: float | None = None
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False


class Attention(StrEnum):
    """Backend of attention: torch's choice, one of torch's, or the fastest for each shape."""

    auto = "auto"
    flash = "flash"
    efficient = "efficient"
    cudnn = "cudnn"
    math = "math"
    fastest = "fastest"


@dataclass(kw_only=True)
class Execution:
    """How torch runs the model, from the `execution` node of the configuration.

    None leaves torch's own setting. `plan/key_descriptions.yaml` describes the fields.
    """

    attention: Attention = Attention.auto
    attention_verify: bool = False
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
    """Inputs and targets for one call, in the model's format.

    Inputs are a tensor (batch, channels, height, width) or (batch, channels, frames, height,
    width), or the model's own type. Targets are class indices (batch,) or (batch, height, width),
    or None.
    """

    inputs: Any
    targets: Any


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Tokens that a call processes, for tokens/s and for the bytes that decoding has to read.

    Attributes:
        count: number of tokens in the batch.
        weight_bytes: bytes of parameters that a call of mode=decode reads; None in other modes.
        cache_bytes: bytes of cached keys and values that it reads; None in other modes.
    """

    count: int
    weight_bytes: int | None = None
    cache_bytes: int | None = None


class Schedule(StrEnum):
    """How the learning rate changes during training."""

    constant = "constant"
    cosine = "cosine"
    step = "step"
    one_cycle = "one_cycle"


class Trainer(Protocol):
    """Training state: weights, optimizer, schedule, moving average and random number generators.

    The training loop for real epochs (`mode.train.epochs`) drives it. Timed training steps do not
    need it.
    """

    @property
    def saved(self) -> dict[str, Any]:
        """Return the facts in the checkpoint to resume from, such as `epoch`; empty without one."""

    def begin(self, factor: Callable[[int], float], step: int, seed: int) -> None:
        """Restore the state before the first step, or the checkpoint's state.

        Args:
            factor: learning rate as a function of the step, relative to the optimizer's rate.
            step: index of the next step, from 0.
            seed: seed for torch's random numbers, unless a checkpoint contains their state.
        """

    def advance(self) -> None:
        """Set the learning rate for the next step."""

    def average(self) -> None:
        """Add the weights to their moving average."""

    def averaged(self) -> AbstractContextManager[None]:
        """Use the averaged weights, if there are any, inside the context."""

    def prepare_saving(self) -> None:
        """Allocate host memory for checkpoints before training, so that no step waits for it."""

    def save(self, path: Path, facts: dict[str, Any], *, later: bool = False) -> None:
        """Write a checkpoint with the current state and `facts` (text and numbers), atomically.

        Args:
            later: whether a thread may write it while training continues, until the next `save` or
                `finish`.
        """

    def save_weights(self, path: Path, *, later: bool = False) -> None:
        """Write the averaged weights, or else the weights, as a plain state dict, atomically.

        Args:
            later: see `save`.
        """

    def finish(self) -> None:
        """Wait until every file is written."""


class Session(Protocol):
    """A loaded model on a device; modes combine its operations.

    The defaults suit a model without state.

    Attributes:
        num_classes: number of classes in its outputs; None if the model has no classes.
        changes_inputs: whether the model changes its inputs in place. If so, each call gets a copy.
    """

    device: Device
    num_classes: int | None
    precision: Precision
    changes_inputs: bool = False

    @property
    def formats(self) -> Formats:
        """Return the number formats for contractions on the device."""
        return Formats.of(
            self.precision.autocast or self.precision.storage, self.precision.tf32, None
        )

    def random_batch(self, input_size: tuple[int, int], batch_size: int, seed: int) -> Batch:
        """Return random inputs (never zeros) and matching random targets on the device.

        Args:
            input_size: height and width in pixels.
        """

    def random_targets(self, input_size: tuple[int, int], batch_size: int, seed: int) -> Any:
        """Return random targets on the device; see `random_batch`."""
        return None

    def place(self, batch: Batch) -> Batch:
        """Copy a data loader's batch to the device, in the session's data type and layout."""
        return batch

    def inferring(self) -> AbstractContextManager[None]:
        """Return the context for all inference calls: evaluation mode, no autograd."""
        return nullcontext()

    def keep_differentiable(self) -> None:
        """Use `no_grad` instead of inference mode, so that training can use leftover tensors."""
        return None

    def changed_settings(self) -> str:
        """Return the process settings that the model changed since loading or the previous query.

        For example `threads 8 → 1`. Empty if nothing changed.
        """
        return ""

    def evaluating(self) -> AbstractContextManager[None]:
        """Return a context like `inferring` but without a compiler, for untimed passes."""
        return self.inferring()

    def training(self) -> AbstractContextManager[None]:
        """Return the context for all training calls: training mode."""
        return nullcontext()

    def reset(self) -> None:
        """Restore the loaded weights and buffers and clear gradients.

        Each point starts from there.
        """
        return None

    def adopt(self, weights: Path) -> None:
        """Replace the weights with the contents of a file until the next `reset`.

        Raises:
            PerfexpError: the file is missing.
            UserError: the file does not fit, or the session has no weights.
        """
        raise UserError(
            "The model has no weights that could be replaced: set mode.inference.trained=false."
        )

    def forward(self, inputs: Any) -> Any:
        """Return the model's outputs. On an asynchronous device, only enqueue the computation."""

    def learn(self, batch: Batch) -> Any:
        """Return the outputs for a training loss.

        A model may compute its losses in the same pass.
        """
        return self.forward(batch.inputs)

    def first_forward(self, batch: Batch) -> Any:
        """Run `forward`, or `learn` in training, for the first call at a size.

        Raises `Unsupported` if the size does not fit.
        """
        return self.forward(batch.inputs)

    def check_call(self, outputs: Any, *, is_constant: bool = False) -> None:
        """Raise an error if a call did not compute `outputs` or changed constant inputs.

        Args:
            is_constant: whether every call gets the same input tensors, so that they must not
                change.
        """
        return None

    def loss(self, outputs: Any, targets: Any, label_smoothing: float = 0.0) -> Any:
        """Return the scalar to minimize; raise `UserError` if label smoothing is impossible."""

    def backward(self, loss: Any) -> None:
        """Compute the gradients for all parameters from the scalar `loss`."""

    def optimizer(self, settings: dict[str, Any]) -> Callable[[], None]:
        """Return a function that applies and clears gradients.

        Args:
            settings: `name` (`sgd`, `adam`, `adamw`) and torch's arguments. Two settings are not
                torch's: `clip_grad_norm`, and `is_scheduled` if the learning rate will change.
        """

    def trainer(
        self, *, ema: float | None, batch_size: int, resume_from: str | None
    ) -> Trainer | None:
        """Return the training state for the last `optimizer`; None if it cannot be saved.

        Raises `UserError` if the checkpoint `resume_from` is unreadable or belongs to another
        training.
        """
        return None

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, compiled if the model is. Its tensors keep one shape."""
        return function

    def discard_compiled(self) -> None:
        """Compile the model again at its next call, because its layers use other functions now.

        The `convolution` room calls this after it has replaced layers' algorithms.
        """
        return None

    def held(self, value: Any) -> Any:
        """Return a copy of a device scalar, such as a loss, for a later `number`.

        Does not synchronize. A CUDA graph would overwrite the scalar at its next launch.
        """
        return value

    def work(self, inputs: Any, *, training: bool) -> Work | None:
        """Return the analytic work per call: FLOPs and bytes by layer, counted without the device.

        None if it is unknown. Raises `Unsupported` if the model cannot be traced.
        """
        return None

    def tokens(self, inputs: Any) -> Tokens | None:
        """Return the tokens among a call's inputs; None for a model of images."""
        return None

    def capture(self, call: Callable[[], object]) -> Callable[[], object]:
        """Return a function that launches a call on fixed tensors as one CUDA graph.

        The call first runs a few times. Raises `Unsupported` if it cannot be captured or the device
        has no graphs.
        """

    def copy(self, batch: Batch, into: Batch | None = None) -> Batch:
        """Copy a batch on the device, to new tensors or `into` another batch.

        Tensors that both batches share are not copied.
        """
        return batch

    def number(self, value: Any) -> float:
        """Return the value of a device scalar as a float. Synchronizes with the device."""

    def is_finite(self, outputs: Any) -> bool:
        """Return whether the outputs contain neither infinities nor NaN.

        Synchronizes, and needs next to no memory. The procedure checks it after the timing.
        """
        return True

    def correct(self, outputs: Any, targets: Any) -> tuple[Any, Any]:
        """Return the number of correct predictions and the number of all predictions.

        Validation during training sums them. A prediction is a class or, for segmentation, a pixel.
        Each number is an int or a one-element tensor that the device may still be computing.
        """
        return 0, 0

    def compilation(self) -> list[Metric]:
        """Return compile time and graph counts since the last `reset`; empty without a compiler."""
        return []

    def facts(self) -> dict[str, Any]:
        """Return current versions, flags, thread counts and model parameters, as JSON values."""

    def doubts(self) -> list[Diagnostic]:
        """Return diagnostics for settings that could not be applied, such as a precision."""
        return []


class Model(Protocol):
    """Interface of objects built from a `model` node in the configuration.

    Building is cheap; `open` loads the model.
    """

    def open(
        self,
        *,
        device: Device,
        precision: Precision,
        execution: Execution,
        num_classes: int | None,
        seed: int,
    ) -> Session:
        """Load weights, move them to the device and apply the plan's torch settings.

        Args:
            num_classes: number of classes in data with real labels; None for the model's own
                number.

        Raises:
            UserError: the model does not fit the settings.
        """


@runtime_checkable
class Unwaiting(Protocol):
    """A session that synchronizes in its calls for side results, and can avoid it.

    Only mmsegmentation models are such sessions.
    """

    def without_waits(self) -> AbstractContextManager[str]:
        """Make calls return the same result without synchronizing; yield a method description."""


class Sharing(StrEnum):
    """How ranks cooperate in a burst of calls.

    Attributes:
        all: normal training.
        no_gradients: gradients are not exchanged. SyncBatchNorm still shares statistics.
        nothing: all ranks run at the same time, each as if alone.
        alone: only the first rank runs; the others wait.
    """

    all = "all"
    no_gradients = "no_gradients"
    nothing = "nothing"
    alone = "alone"
