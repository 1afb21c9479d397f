"""A scripted model for the scripted device, without torch. Its calls take a scripted time.

`model=fake gpu=fake` tests the whole program in seconds, with known truth and without a GPU.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from perfexp.devices import Device
from perfexp.devices.fake import FakeDevice
from perfexp.errors import Unsupported, UserError, Waits
from perfexp.models import Batch, Execution, Precision, Session

#: Scripted faults.
_FAULTS = ("oom", "fail", "lost", "hang", "kill", "crash")


def _raise_fault(fault: str, device: FakeDevice, text: str) -> None:
    """Fail in a scripted way: raise an error, hang forever, or kill this process.

    Args:
        fault: `oom`, `fail`, `lost`, `hang`, `kill` or `crash`. After `lost`, the device stays
            lost.
        text: message of the error.
    """
    if fault == "oom":
        raise MemoryError(text)
    if fault in ("fail", "lost"):
        device.lost |= fault == "lost"
        raise RuntimeError(text)
    if fault == "hang":
        while True:
            time.sleep(3600)
    os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSEGV)


@dataclass(kw_only=True, eq=False)
class FakeModel:
    """A model with known cost.

    A call takes base_seconds + seconds_per_megapixel · batch · height · width / 10⁶, times noise.
    The fields are the keys of the `model` node; `plan/key_descriptions.yaml` describes them.
    `faults` has the pixel count above which each fault happens.
    """

    name: str = "fake"
    base_seconds: float = 1e-3
    seconds_per_megapixel: float = 0.02
    noise: float = 0.01
    launches: int = 1
    smallest: int = 1
    stairs: float = 0.0
    waits: bool = False
    cold_seconds: float = 0.0
    weight_bytes: int = 0
    bytes_per_pixel: int = 0
    faults: Mapping[str, int | None] | None = None

    def __post_init__(self) -> None:
        """Keep the faults with a limit; raise `UserError` for an unknown fault."""
        self.limits = {
            fault: pixels for fault, pixels in (self.faults or {}).items() if pixels is not None
        }
        if unknown := self.limits.keys() - set(_FAULTS):
            raise UserError(
                f"model.faults: there is no {sorted(unknown)}; possible: {', '.join(_FAULTS)}."
            )

    def open(
        self,
        *,
        device: Device,
        precision: Precision,
        execution: Execution,
        num_classes: int | None,
        seed: int,
    ) -> FakeSession:
        """Return a session; raise `UserError` on any other device than the scripted one."""
        if not isinstance(device, FakeDevice):
            remedy = "add gpu=fake, or choose another model"
            raise UserError(f"model={self.name} runs on the scripted device only; {remedy}.")
        return FakeSession(self, device, precision, random.Random(seed))


class FakeSession(Session):
    """Operations with known cost. Inputs, outputs and loss are the batch's pixel count."""

    num_classes: int | None = 10

    def __init__(
        self, model: FakeModel, device: FakeDevice, precision: Precision, generator: random.Random
    ) -> None:
        self._model, self.device, self.precision, self._random = model, device, precision, generator

    def random_batch(self, input_size: tuple[int, int], batch_size: int, seed: int) -> Batch:
        """Return a batch with its pixel count as the "inputs".

        Raises `Unsupported` below the smallest size. Scripted faults happen here.
        """
        height, width = input_size
        if min(input_size) < self._model.smallest:
            raise Unsupported(
                f"{self._model.name} can't take {height} × {width}: at least "
                f"{self._model.smallest}."
            )
        pixels = batch_size * height * width
        for fault, most in self._model.limits.items():
            if pixels > most:
                _raise_fault(fault, self.device, f"scripted: {pixels} pixels are more than {most}")
        return Batch(inputs=pixels, targets=None)

    def forward(self, inputs: Any) -> Any:
        """Launch a forward pass and return the pixel count."""
        cold = self._model.cold_seconds if self.device.cold else 0.0
        self.device.cold = False
        self._occupy(inputs)
        self._work(inputs, 1.0, cold)
        if self._model.waits:
            self.device.synchronize()
        return inputs

    def loss(self, outputs: Any, targets: Any, label_smoothing: float = 0.0) -> Any:
        """Take 1 % of a forward pass."""
        self._work(outputs, 0.01)
        return outputs

    def backward(self, loss: Any) -> None:
        """Take twice as long as a forward pass."""
        self._occupy(2 * loss)
        self._work(loss, 2.0)

    def optimizer(self, settings: dict[str, Any]) -> Callable[[], None]:
        """Return a function that takes a tenth of the base time."""
        return lambda: self._work(0, 0.1)

    def number(self, value: Any) -> float:
        """Return the value after synchronizing."""
        self.device.synchronize()
        return float(value)

    def capture(self, call: Callable[[], object]) -> Callable[[], object]:
        """Return a function that launches the call as one graph.

        Raises `Waits` if the call synchronizes.
        """
        if self.device.waits_inside(call):
            raise Waits
        return self.device.capture(call)

    def facts(self) -> dict[str, Any]:
        return {"model_class": type(self._model).__name__}

    def _occupy(self, pixels: int) -> None:
        """Occupy device memory for the weights and a number of pixels."""
        self.device.occupy(self._model.weight_bytes + self._model.bytes_per_pixel * pixels)

    def _work(self, pixels: int, share: float, more_seconds: float = 0.0) -> None:
        """Launch kernels on the scripted device.

        Args:
            pixels: pixels of the batch; 0 leaves the base time only.
            share: time relative to a forward pass.
            more_seconds: additional time.
        """
        model = self._model
        stair = 1 + model.stairs * random.Random(pixels).uniform(-1, 1) if model.stairs else 1.0
        scripted = model.base_seconds + model.seconds_per_megapixel * pixels / 1e6
        seconds = share * stair * scripted + more_seconds
        for _ in range(model.launches):
            noise = max(0.0, 1 + model.noise * self._random.gauss(0, 1))
            self.device.launch(seconds / model.launches * noise)
