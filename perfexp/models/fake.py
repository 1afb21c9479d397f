"""A scripted model for the scripted device: its calls take the time that the script says; no torch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from perfexp.devices import Device
from perfexp.devices.fake import FakeDevice
from perfexp.errors import Unsupported, UserError
from perfexp.models import Batch, Execution, Precision
from perfexp.record import Doubt


class FakeModel:
    """A model of known cost: base_seconds + seconds_per_megapixel · batch · height · width / 10⁶, times noise.

    Args:
        name: what to call it.
        base_seconds: device time of a call that does not depend on its input.
        seconds_per_megapixel: device time per 10⁶ pixels of a batch.
        noise: relative standard deviation of a call's time.
        launches: launches per forward pass.
        smallest: inputs with a shorter side are not supported.
        oom_above_pixels: batches of more pixels run out of memory.
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
        oom_above_pixels: int | None = None,
    ) -> None:
        self.name = name
        self.base_seconds = base_seconds
        self.seconds_per_megapixel = seconds_per_megapixel
        self.noise = noise
        self.launches = launches
        self.smallest = smallest
        self.oom_above_pixels = oom_above_pixels

    def open(
        self, *, device: Device, precision: Precision, execution: Execution, num_classes: int | None, seed: int
    ) -> FakeSession:
        """See `Model`."""
        if not isinstance(device, FakeDevice):
            raise UserError(
                f"model={self.name} runs on the scripted device only; add gpu=fake, or choose another model."
            )
        return FakeSession(self, device, random.Random(seed))


class FakeSession:
    """Operations of known cost.

    Args:
        model: the script.
        device: where the time is spent.
        generator: of the noise.
    """

    num_classes: int | None = 10

    def __init__(self, model: FakeModel, device: FakeDevice, generator: random.Random) -> None:
        self._model, self._device, self._random = model, device, generator

    def random_batch(self, input_size: tuple[int, int], batch_size: int, seed: int) -> Batch:
        """The "inputs" are the batch's pixels."""
        height, width = input_size
        if min(input_size) < self._model.smallest:
            raise Unsupported(f"{self._model.name} can't take {height} × {width}: at least {self._model.smallest}.")
        pixels = batch_size * height * width
        if self._model.oom_above_pixels is not None and pixels > self._model.oom_above_pixels:
            raise MemoryError(f"scripted: {pixels} pixels are more than {self._model.oom_above_pixels}")
        return Batch(inputs=pixels, targets=None)

    def random_targets(self, input_size: tuple[int, int], batch_size: int, seed: int) -> Any:
        """It has none."""
        return None

    def place(self, batch: Batch) -> Batch:
        """Nothing to copy."""
        return batch

    @contextmanager
    def inferring(self) -> Iterator[None]:
        """No state."""
        yield

    @contextmanager
    def training(self) -> Iterator[None]:
        """No state."""
        yield

    def reset(self) -> None:
        """Nothing is learnt."""

    def forward(self, inputs: Any) -> Any:
        """The scripted work."""
        self._work(inputs, 1.0)
        return inputs

    def first_forward(self, batch: Batch) -> Any:
        """See `Session`; what is not supported was told by `random_batch`."""
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
        """Waits, as reading a scalar does."""
        self._device.synchronize()
        return float(value)

    def correct(self, outputs: Any, targets: Any) -> tuple[int, int]:
        """It predicts nothing."""
        return 0, 0

    def facts(self) -> dict[str, Any]:
        """See `Session`."""
        return {"model_class": type(self._model).__name__}

    def doubts(self) -> list[Doubt]:
        """The device has said it."""
        return []

    def _work(self, pixels: int, share: float) -> None:
        model = self._model
        seconds = share * (model.base_seconds + model.seconds_per_megapixel * pixels / 1e6)
        for _ in range(model.launches):
            noise = max(0.0, 1 + model.noise * self._random.gauss(0, 1))
            self._device.launch(seconds / model.launches * noise)
