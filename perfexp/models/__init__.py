"""Model: what is measured, and the session in which it lives on a device; torch stays in the modules beside it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from perfexp.devices import Device
from perfexp.records.diagnostics import Diagnostic
from perfexp.work import Work


@dataclass(kw_only=True)
class Precision:
    """In which numbers a model computes.

    Attributes:
        name: `fp32`, `tf32`, `fp16`, `bf16`, `amp_fp16`, `amp_bf16`.
        storage: data type of parameters and inputs (`float32`, `float16`, `bfloat16`).
        autocast: data type of torch's autocast, or None for none.
        tf32: whether matrix products and convolutions of float32 may use TF32.
    """

    name: str
    storage: str = "float32"
    autocast: str | None = None
    tf32: bool = False


@dataclass(kw_only=True)
class Ddp:
    """Settings of torch's DistributedDataParallel, by which several ranks train together; None is torch's own choice.

    Attributes:
        broadcast_buffers: whether each forward pass begins with the buffers of the first rank. None is torch's choice
            (it does), but for models of mmsegmentation mmengine's (it does not).
        bucket_cap_mb: gradients that are sent together, MiB.
        find_unused_parameters: for models of which some parameters get no gradient in some steps.
        gradient_as_bucket_view: whether gradients are kept where they are sent from.
        static_graph: whether each step uses the same parameters in the same order.
    """

    broadcast_buffers: bool | None = None
    bucket_cap_mb: float | None = None
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False


@dataclass(kw_only=True)
class Execution:
    """How torch runs the model.

    Attributes:
        compile: mode of torch.compile (`default`, `reduce-overhead`, `max-autotune`), or None for eager.
        channels_last: whether 4-D tensors lie in memory as NHWC (5-D as NDHWC).
        cuda_graph: whether the call is captured as a CUDA graph and replayed.
        cudnn_benchmark: torch.backends.cudnn.benchmark.
        deterministic: torch.use_deterministic_algorithms and cudnn.deterministic.
        threads: threads within an operation, or None for torch's choice.
        interop_threads: threads between operations, or None for torch's choice.
        ddp: how several ranks train together.
    """

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
    """Inputs and targets of one call, where and as the model wants them.

    Attributes:
        inputs: a tensor (batch, channels, height, width), (batch, channels, frames, height, width), or what the model
            takes.
        targets: class indices (batch,) or (batch, height, width), or None.
    """

    inputs: Any
    targets: Any


class Session(Protocol):
    """A loaded model on a device: the operations that the modes put together.

    Attributes:
        num_classes: classes that the model tells apart, or None where it has none.
        precision: in which it computes.
    """

    num_classes: int | None
    precision: Precision

    def random_batch(self, input_size: tuple[int, int], batch_size: int, seed: int) -> Batch:
        """Random inputs (never zeros) and targets of the model's kind, on the device.

        Args:
            input_size: height and width in pixels.
            batch_size: samples.
            seed: of the random numbers.
        """

    def random_targets(self, input_size: tuple[int, int], batch_size: int, seed: int) -> Any:
        """Random targets of the model's kind, on the device.

        Args:
            input_size: height and width in pixels.
            batch_size: samples.
            seed: of the random numbers.
        """

    def place(self, batch: Batch) -> Batch:
        """Copy a batch of a data loader to the device, in the session's data type and memory format."""

    def inferring(self) -> AbstractContextManager[None]:
        """Entered around all calls of an inference: evaluation mode, no autograd."""

    def training(self) -> AbstractContextManager[None]:
        """Entered around all calls of a training: training mode."""

    def reset(self) -> None:
        """Forget all training: weights and buffers as they were loaded, no gradients; each point starts from there."""

    def forward(self, inputs: Any) -> Any:
        """The model's outputs; enqueued on an asynchronous device."""

    def learn(self, batch: Batch) -> Any:
        """The outputs from which a training's loss is taken; a model may compute its own losses in the same pass.

        Args:
            batch: on the device.
        """

    def first_forward(self, batch: Batch) -> Any:
        """`forward`, or in training `learn`, of a size for the first time.

        Raises:
            Unsupported: the model can't take inputs of this size or batch.
        """

    def loss(self, outputs: Any, targets: Any) -> Any:
        """The scalar to be minimised."""

    def backward(self, loss: Any) -> None:
        """Gradients of all parameters."""

    def optimizer(self, settings: dict[str, Any]) -> Callable[[], None]:
        """A function that applies the gradients and clears them.

        Args:
            settings: `name` (`sgd`, `adam`, `adamw`) and the keyword arguments of torch's optimiser.
        """

    def work(self, inputs: Any, *, training: bool) -> Work | None:
        """What a call takes by definition, counted without the device; None where nobody knows.

        Args:
            inputs: of the call.
            training: whether its backward pass is counted too.

        Raises:
            Unsupported: the model can't be followed.
        """

    def capture(self, call: Callable[[], object]) -> Callable[[], object]:
        """A call as one launch (a CUDA graph), after it has run a few times.

        Args:
            call: always with the same tensors.

        Returns:
            A function that launches it.

        Raises:
            Unsupported: the call can't be captured, or the device has no such thing.
        """

    def copy(self, batch: Batch, into: Batch | None = None) -> Batch:
        """A copy of a batch on the device.

        Args:
            batch: on the device.
            into: a batch of the same shapes whose tensors take it, or None for new ones; a tensor that both have
                is left alone.
        """

    def number(self, value: Any) -> float:
        """A scalar of the device as a number; waits for it."""

    def correct(self, outputs: Any, targets: Any) -> tuple[int, int]:
        """How many predictions are right, and of how many (pixels, for segmentation)."""

    def facts(self) -> dict[str, Any]:
        """Versions, flags and thread counts as they are; parameters of the model. JSON values."""

    def doubts(self) -> list[Diagnostic]:
        """What could not be done as it was asked (a precision that the device lacks, …)."""


class Model(Protocol):
    """What a `model` node of the configuration builds. Building it is cheap; `open` loads."""

    def open(
        self, *, device: Device, precision: Precision, execution: Execution, num_classes: int | None, seed: int
    ) -> Session:
        """Load weights, move them to the device, and set torch up as the plan says.

        Args:
            device: where.
            precision: in which numbers.
            execution: how.
            num_classes: classes of the data where its labels are real; None leaves the model's own.
            seed: of random weights.

        Raises:
            UserError: name, weights or settings do not fit.
        """


@runtime_checkable
class Unwaiting(Protocol):
    """A session whose call reads values back for figures of its own, and can do without."""

    def without_waits(self) -> AbstractContextManager[str]:
        """While entered, a call comes to the same without waiting for the device; gives how, in words."""


class Sharing(StrEnum):
    """What the ranks do together in a stretch of calls: all as always, without gradients, or only the first, alone."""

    all = "all"
    no_gradients = "no_gradients"
    alone = "alone"
