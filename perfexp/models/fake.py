"""A scripted model for the scripted device, whose calls take a scripted time; no torch."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from perfexp.devices import Device
from perfexp.devices.fake import FakeDevice
from perfexp.errors import Unsupported, UserError, Waits
from perfexp.models import Batch, Execution, Precision
from perfexp.records.diagnostics import Diagnostic


def _out_of_memory(device: FakeDevice, text: str) -> NoReturn:
    raise MemoryError(text)


def _fail(device: FakeDevice, text: str) -> NoReturn:
    raise RuntimeError(text)


def _lose(device: FakeDevice, text: str) -> NoReturn:
    device.lost = True
    raise RuntimeError(text)


def _hang(device: FakeDevice, text: str) -> None:
    while True:
        time.sleep(3600)


#: Faults by their name in the script.
_FAULTS: dict[str, Callable[[FakeDevice, str], object]] = {
    "oom": _out_of_memory,
    "fail": _fail,
    "lost": _lose,
    "hang": _hang,
    "kill": lambda device, text: os.kill(os.getpid(), signal.SIGKILL),
    "crash": lambda device, text: os.kill(os.getpid(), signal.SIGSEGV),
}


class FakeModel:
    """A model of known cost: base_seconds + seconds_per_megapixel · batch · height · width / 10⁶, times noise.

    Args:
        base_seconds: device time of a call, independent of its input.
        seconds_per_megapixel: device time per 10⁶ pixels of a batch.
        noise: relative standard deviation of a call's time.
        waits: whether a forward pass synchronizes inside.
        cold_seconds: extra device time of a pass whose inputs and weights are not in the cache.
        faults: largest number of pixels in a batch without the fault, by fault: `oom` (out of memory), `fail` (an
            exception), `lost` (an error that leaves the device unusable), `hang`, `kill` and `crash` (SIGKILL or
            SIGSEGV to the process).
    """

    def __init__(
        self,
        *,
        name: str = "fake",
        base_seconds: float = 1e-3,
        seconds_per_megapixel: float = 0.02,
        noise: float = 0.01,
        launches: int = 1,
        smallest: int = 1,
        waits: bool = False,
        cold_seconds: float = 0.0,
        faults: Mapping[str, int | None] | None = None,
    ) -> None:
        self.name = name
        self.base_seconds = base_seconds
        self.seconds_per_megapixel = seconds_per_megapixel
        self.noise = noise
        self.launches = launches
        self.smallest = smallest
        self.waits = waits
        self.cold_seconds = cold_seconds
        self.faults = {fault: pixels for fault, pixels in (faults or {}).items() if pixels is not None}
        if unknown := self.faults.keys() - _FAULTS.keys():
            raise UserError(f"model.faults: there is no {sorted(unknown)}; possible: {', '.join(_FAULTS)}.")

    def open(
        self, *, device: Device, precision: Precision, execution: Execution, num_classes: int | None, seed: int
    ) -> FakeSession:
        if not isinstance(device, FakeDevice):
            raise UserError(
                f"model={self.name} runs on the scripted device only; add gpu=fake, or choose another model."
            )
        return FakeSession(self, device, precision, random.Random(seed))


class FakeSession:
    """Operations of known cost."""

    num_classes: int | None = 10

    def __init__(self, model: FakeModel, device: FakeDevice, precision: Precision, generator: random.Random) -> None:
        self._model, self._device, self.precision, self._random = model, device, precision, generator

    def random_batch(self, input_size: tuple[int, int], batch_size: int, seed: int) -> Batch:
        """The "inputs" are the batch's pixels."""
        height, width = input_size
        if min(input_size) < self._model.smallest:
            raise Unsupported(f"{self._model.name} can't take {height} × {width}: at least {self._model.smallest}.")
        pixels = batch_size * height * width
        for fault, most in self._model.faults.items():
            if pixels > most:
                _FAULTS[fault](self._device, f"scripted: {pixels} pixels are more than {most}")
        return Batch(inputs=pixels, targets=None)

    def random_targets(self, input_size: tuple[int, int], batch_size: int, seed: int) -> Any:
        """See `Session`; there are none."""
        return None

    def place(self, batch: Batch) -> Batch:
        """See `Session`; there is nothing to copy."""
        return batch

    @contextmanager
    def inferring(self) -> Iterator[None]:
        """See `Session`; there is no state."""
        yield

    @contextmanager
    def training(self) -> Iterator[None]:
        """See `Session`; there is no state."""
        yield

    def reset(self) -> None:
        """See `Session`; there is no state."""

    def forward(self, inputs: Any) -> Any:
        """The scripted work."""
        cold = self._model.cold_seconds if self._device.cold else 0.0
        self._device.cold = False
        self._work(inputs, 1.0, cold)
        if self._model.waits:
            self._device.synchronize()
        return inputs

    def learn(self, batch: Batch) -> Any:
        return self.forward(batch.inputs)

    def first_forward(self, batch: Batch) -> Any:
        """See `Session`; `random_batch` has refused unsupported sizes."""
        return self.forward(batch.inputs)

    def loss(self, outputs: Any, targets: Any) -> Any:
        """1 % of a forward pass."""
        self._work(outputs, 0.01)
        return outputs

    def backward(self, loss: Any) -> None:
        """Twice a forward pass."""
        self._work(loss, 2.0)

    def optimizer(self, settings: dict[str, Any]) -> Callable[[], None]:
        """A tenth of the base cost."""
        return lambda: self._work(0, 0.1)

    def number(self, value: Any) -> float:
        self._device.synchronize()
        return float(value)

    def correct(self, outputs: Any, targets: Any) -> tuple[int, int]:
        """See `Session`; there are no predictions."""
        return 0, 0

    def work(self, inputs: Any, *, training: bool) -> None:
        """See `Session`; the work is unknown."""

    def capture(self, call: Callable[[], object]) -> Callable[[], object]:
        if self._device.waits_inside(call):
            raise Waits
        return self._device.capture(call)

    def copy(self, batch: Batch, into: Batch | None = None) -> Batch:
        """See `Session`; there is nothing to copy."""
        return batch

    def facts(self) -> dict[str, Any]:
        return {"model_class": type(self._model).__name__}

    def doubts(self) -> list[Diagnostic]:
        """See `Session`; the device has its own."""
        return []

    def _work(self, pixels: int, share: float, more_seconds: float = 0.0) -> None:
        model = self._model
        seconds = share * (model.base_seconds + model.seconds_per_megapixel * pixels / 1e6) + more_seconds
        for _ in range(model.launches):
            noise = max(0.0, 1 + model.noise * self._random.gauss(0, 1))
            self._device.launch(seconds / model.launches * noise)
