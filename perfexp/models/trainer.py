"""Training state in torch: start from the loaded weights or a checkpoint, update, and save.

A session's `trainer` makes a `TorchTrainer` for real epochs (`mode.train.epochs`). Every session
builds its optimizer here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from copy import deepcopy
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils._pytree import tree_map_only

from perfexp.errors import UserError, did_you_mean
from perfexp.host.files import write_atomically
from perfexp.models import Trainer
from perfexp.models.weights import check_fit, read_content

#: Entry that identifies a checkpoint, and the version of its layout.
_FORMAT = "perfexp checkpoint 1"
_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
_ADVICE = "Name a checkpoint of perfexp: MODEL_DATA_best.pt or MODEL_DATA_epoch_N.pt."


class TorchTrainer(Trainer):
    """A module, its optimizer and its gradient scaler.

    Tensors are never replaced, because a CUDA graph may use them. Checkpoints are torch.save files
    that load with `weights_only=True`.

    Args:
        restore: function that loads the module's weights from before its first training.
        decay: decay of the moving average of the weights per step; None for no average.
        batch_size: samples per step, saved in checkpoints and compared on resuming.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        restore: Callable[[], None],
        *,
        decay: float | None,
        batch_size: int,
    ) -> None:
        self._module, self._optimizer = module, optimizer
        self._scaler, self._restore = scaler, restore
        self._parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        # the schedule's factors are relative to these rates
        self._base_rates = [float(group["lr"]) for group in optimizer.param_groups]
        self._first_scale = scaler.state_dict()
        self._batch_size, self._step = batch_size, 0
        self._content: dict[str, Any] = {}
        self._factor: Callable[[int], float] = lambda _: 1.0
        self._weights: dict[str, torch.Tensor] = {}  # tensors to average
        self._num_averaged = 0
        if decay is not None:
            state = module.state_dict()
            tensors = {name: value for name, value in state.items() if torch.is_tensor(value)}
            self._weights = {
                name: value.detach() for name, value in tensors.items() if value.is_floating_point()
            }
            self._add_to_average = get_ema_multi_avg_fn(decay)
        self._average = {name: value.clone() for name, value in self._weights.items()}
        # one thread for the last checkpoint, one for the weights
        self._writer = ThreadPoolExecutor(2, "checkpoint")
        self._writing: list[Future[None]] = []

    @property
    def saved(self) -> dict[str, Any]:
        """Return the facts in the checkpoint to resume from, such as `epoch`; empty without one."""
        return dict(self._content.get("facts", {}))

    def begin(self, factor: Callable[[int], float], step: int, seed: int) -> None:
        """Restore the loaded weights and a new optimizer state, or the checkpoint's.

        The learning rate is set for the next step.

        Args:
            factor: learning rate as a function of the step, relative to the optimizer's rate.
            step: index of the next step, from 0.
            seed: seed for torch's random numbers, unless a checkpoint contains their state.
        """
        self._restore()
        for state in self._optimizer.state.values():
            for value in state.values():
                if torch.is_tensor(value):
                    # every optimizer starts with zeros
                    value.zero_()
        self._scaler.load_state_dict(self._first_scale)
        self._num_averaged = 0
        torch.manual_seed(seed)
        if self._content:
            self._load()
        self._factor, self._step = factor, step - 1
        self.advance()

    def advance(self) -> None:
        """Set the learning rate for the next step, in place if it is a tensor in a CUDA graph."""
        self._step += 1
        factor = self._factor(self._step)
        for group, rate in zip(self._optimizer.param_groups, self._base_rates, strict=True):
            if torch.is_tensor(group["lr"]):
                group["lr"].fill_(rate * factor)
            else:
                group["lr"] = rate * factor

    @torch.no_grad()
    def average(self) -> None:
        """Add the weights to their moving average; the first call copies them.

        The training loop calls it after each step.
        """
        average, now = list(self._average.values()), list(self._weights.values())
        if self._num_averaged:
            self._add_to_average(average, now, self._num_averaged)
        else:
            torch._foreach_copy_(average, now)
        self._num_averaged += 1

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Use the averaged weights inside the context, then the trained ones.

        No change without an average. Validation and saved weights use the average.
        """
        if not self._num_averaged:
            yield
            return
        now = list(self._weights.values())
        unaveraged = [value.clone() for value in now]
        torch._foreach_copy_(now, list(self._average.values()))
        try:
            yield
        finally:
            torch._foreach_copy_(now, unaveraged)

    def prepare_saving(self) -> None:
        """Allocate pinned host memory and start the writing thread before the first step.

        Otherwise the first checkpoint would delay training by these one-off costs.
        """
        # at the end of training, copies of all three are in host memory at once
        states = self._checkpoint({}), self._module.state_dict(), self._average
        checkpoint, *_ = self._on_host(states)  # torch keeps the pinned memory that it frees
        # any small content starts the thread and imports the modules that torch.save needs
        self._writer.submit(torch.save, checkpoint["random"], BytesIO()).result()

    def save(self, path: Path, facts: dict[str, Any], *, later: bool = False) -> None:
        """Write a checkpoint, after earlier files.

        With `later`, a thread writes it during training.
        """
        self.finish()
        self._write(path, self._checkpoint(facts), later=later)

    def save_weights(self, path: Path, *, later: bool = False) -> None:
        """Write the averaged weights, or else the weights, as a plain state dict."""
        with self.averaged():
            self._write(path, self._module.state_dict(), later=later)

    def finish(self) -> None:
        """Wait until every file is written; raise the error of a thread that could not write."""
        writing, self._writing = self._writing, []
        wait(writing)
        for written in writing:
            written.result()

    def _checkpoint(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Return a checkpoint's content: facts, weights, optimizer, scaler and random states.

        With a moving average, `state_dict` contains the averaged weights.
        """
        content = {
            "format": _FORMAT,
            "facts": {
                **facts,
                "batch_size": self._batch_size,
                "optimizer": type(self._optimizer).__name__,
            },
            "model": self._module.state_dict(),
            "optimizer": self._optimizer.state_dict()["state"],
            "scaler": self._scaler.state_dict(),
            "random": self._random_states(),
        }
        # `model.weights` looks here first
        if self._num_averaged:
            with self.averaged():
                weights = deepcopy(self._module.state_dict())
            content |= {"state_dict": weights, "num_averaged": self._num_averaged}
        return content

    def _write(self, path: Path, content: dict[str, Any], *, later: bool) -> None:
        """Write the content with torch.save; the file appears whole or not at all."""
        if later:
            self._writing.append(self._writer.submit(_write_file, path, self._on_host(content)))
        else:
            _write_file(path, content)

    def _on_host(self, content: Any) -> Any:
        """Return a copy of all tensors on the host.

        GPU tensors go to pinned memory, which allows copies at full bus speed.
        """
        is_cuda = self._parameters[0].is_cuda

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            """Return a copy on the host; the copy from a GPU may still be under way."""
            try:
                buffer = torch.empty_like(
                    tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False
                )
            except RuntimeError:  # the host limits pinned memory
                buffer = torch.empty_like(tensor, device="cpu", requires_grad=False)
            return buffer.copy_(tensor.detach(), non_blocking=True)

        copy = tree_map_only(torch.Tensor, copied, content)
        if is_cuda:
            torch.cuda.synchronize()
        return copy

    def resume(self, file: Path) -> None:
        """Check a checkpoint and load it once, before anything runs, so that errors appear early.

        The module keeps its weights until `begin`. Raises `UserError` if the checkpoint does not
        fit.
        """
        content = read_checkpoint(file)
        self._content = content
        try:
            facts = {**content["facts"]}  # a TypeError unless it is a mapping
            settings_here = {
                "batch_size": self._batch_size,
                "optimizer": type(self._optimizer).__name__,
            }
            for name, value in settings_here.items():
                if facts[name] != value:
                    raise UserError(
                        f"{file} is of a training with {name} {facts[name]}, this one has {value}."
                    )
            check_fit(self._module, content["model"], file)
            for index, state in content["optimizer"].items():
                shape = self._parameters[index].shape
                for value in state.values():
                    # step counts are tensors without dimensions
                    if torch.is_tensor(value) and value.ndim and value.shape != shape:
                        raise ValueError("the optimizer's state is of other shapes")
            for name in ("epoch", "stale"):
                if type(facts[name]) is not int or facts[name] < 0:
                    raise ValueError("its epochs are not numbers")
            # the plan's optimizer settings take precedence
            groups = self._optimizer.state_dict()["param_groups"]
            # torch would share the tensors, and training changes them
            own_state = deepcopy(content["optimizer"])
            self._optimizer.load_state_dict({"state": own_state, "param_groups": groups})
            before = deepcopy(self._module.state_dict())
            self._load()
            self._module.load_state_dict(before)
        except (
            AttributeError,
            IndexError,
            KeyError,
            OverflowError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(f"{file} can't be resumed from: {reason}. {_ADVICE}") from error

    @torch.no_grad()
    def _load(self) -> None:
        """Copy the checkpoint into this training, without replacing tensors."""
        content = self._content
        self._module.load_state_dict(content["model"])
        for index, state in content["optimizer"].items():
            parameter_state = self._optimizer.state[self._parameters[index]]
            for name, value in state.items():
                if torch.is_tensor(parameter_state.get(name)):  # `resume` has loaded other entries
                    parameter_state[name].copy_(value)
        # empty if the training had no scaler
        self._scaler.load_state_dict(content["scaler"] or self._first_scale)
        if self._average:
            # without an average in the checkpoint, its weights count as the first one
            averages = content.get("state_dict", content["model"])
            for name, value in self._average.items():
                value.copy_(averages[name])
            self._num_averaged = int(content.get("num_averaged", 1))
        self._set_random_states(content["random"])

    def _random_states(self) -> dict[str, Any]:
        """Return the states of the random number generators in torch, Python, NumPy and CUDA.

        They consist of tensors, numbers and lists, because `weights_only=True` loads nothing else.
        """
        name, keys, *rest = np.random.get_state(legacy=True)
        numpy = (name, np.asarray(keys).tolist(), *rest)
        states = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": numpy}
        device = self._parameters[0].device
        return states | (
            {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
        )

    def _set_random_states(self, states: dict[str, Any]) -> None:
        """Restore the states from `_random_states`; a checkpoint from a CPU has no CUDA state."""
        torch.set_rng_state(states["torch"])
        version, words, gauss = states["python"]
        random.setstate((version, tuple(words), gauss))
        name, keys, *rest = states["numpy"]
        np.random.set_state((name, np.asarray(keys, dtype=np.uint32), *rest))
        device = self._parameters[0].device
        if device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], device)


def read_checkpoint(file: Path) -> dict[str, Any]:
    """Read a checkpoint to host memory.

    Raises `UserError` for any other file, for example weights without training state. The worker
    reads a checkpoint before a run begins, and `resume` reads it for training.
    """
    content = read_content(file, "a checkpoint", _ADVICE)
    if not (isinstance(content, dict) and content.get("format") == _FORMAT):
        raise UserError(
            f"{file} is not a checkpoint to resume from. {_ADVICE} model.weights=FILE takes "
            "weights alone."
        )
    return content


def _write_file(path: Path, content: dict[str, Any]) -> None:
    """Write the content with torch.save; the file appears whole or not at all."""
    write_atomically(path, lambda file: torch.save(content, file))


def build_optimizer(
    name: str, parameters: list[Any], settings: dict[str, Any]
) -> torch.optim.Optimizer:
    """Return torch's optimizer for a name in the configuration.

    Args:
        name: `sgd`, `adam` or `adamw`.
        parameters: parameters, or groups as torch's optimizers accept them.
        settings: torch's arguments, for example `lr`.

    Raises:
        UserError: the name is unknown, or torch refuses the settings.
    """
    builder = _OPTIMIZERS.get(name)
    if builder is None:
        raise UserError(f"There is no optimizer {name!r}. {did_you_mean(name, _OPTIMIZERS)}")
    try:
        optimizer = builder(parameters, **settings)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"The optimizer {name} does not take these settings: {error}. Take one out with "
            "~mode.train.optimizer.NAME."
        ) from error
    uses_momentum = settings.get("momentum") and not settings.get("dampening")
    if name == "sgd" and settings.get("fused") and uses_momentum:
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        begin_momentum(optimizer, trained)
    return optimizer


def begin_momentum(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]) -> None:
    """Initialize the momentum of SGD without dampening to zero, as before the first gradient.

    Otherwise the fused form in torch 2.11 allocates it in the first step. If an overflow skips that
    step, the memory stays uninitialized and the loss is NaN from then on (seen on an H200;
    LibreYOLO pull request 771).
    """
    for parameter in parameters:
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
