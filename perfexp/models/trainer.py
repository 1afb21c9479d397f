"""Training state in torch: reset to the loaded weights or a checkpoint, and saved."""

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

from perfexp.errors import UserError
from perfexp.host.files import write_atomically
from perfexp.models import Trainer
from perfexp.models.weights import check_fit, read_content

#: Entry that identifies a checkpoint, and the version of its layout.
_FORMAT = "perfexp checkpoint 1"
_ADVICE = "Name a checkpoint of perfexp: MODEL_DATA_best.pt or MODEL_DATA_epoch_N.pt."


class TorchTrainer(Trainer):
    """A module, its optimizer and its gradient scaler.

    Tensors are never replaced, because a CUDA graph may use them.

    Args:
        restore: function that loads the module's weights from before its first training.
        decay: decay of the moving average of the weights; None for no average.
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
        self._module, self._optimizer, self._scaler, self._restore = (
            module,
            optimizer,
            scaler,
            restore,
        )
        self._parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        self._highest = [float(group["lr"]) for group in optimizer.param_groups]
        self._first_scale = scaler.state_dict()
        self._batch_size, self._step, self._file = batch_size, 0, Path()
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
        return dict(self._content.get("facts", {}))

    def begin(self, factor: Callable[[int], float], step: int, seed: int) -> None:
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
        self._step += 1
        factor = self._factor(self._step)
        for group, highest in zip(self._optimizer.param_groups, self._highest, strict=True):
            if torch.is_tensor(group["lr"]):
                group["lr"].fill_(highest * factor)
            else:
                group["lr"] = highest * factor

    @torch.no_grad()
    def average(self) -> None:
        average, now = list(self._average.values()), list(self._weights.values())
        if self._num_averaged:
            self._add_to_average(average, now, self._num_averaged)
        else:
            torch._foreach_copy_(average, now)
        self._num_averaged += 1

    @contextmanager
    def averaged(self) -> Iterator[None]:
        if not self._num_averaged:
            yield
            return
        now = list(self._weights.values())
        own = [value.clone() for value in now]
        torch._foreach_copy_(now, list(self._average.values()))
        try:
            yield
        finally:
            torch._foreach_copy_(now, own)

    def prepare_saving(self) -> None:
        # these are written at the same time
        last = (
            self._checkpoint({}),
            self._module.state_dict(),
            self._average,
        )
        content = self._on_host(last)[0]  # torch keeps the pinned memory that it frees
        # starts a thread and imports modules
        self._writer.submit(torch.save, content["random"], BytesIO()).result()

    def save(self, path: Path, facts: dict[str, Any], *, later: bool = False) -> None:
        self.finish()
        self._write(path, self._checkpoint(facts), later=later)

    def save_weights(self, path: Path, *, later: bool = False) -> None:
        with self.averaged():
            self._write(path, self._module.state_dict(), later=later)

    def finish(self) -> None:
        writing, self._writing = self._writing, []
        wait(writing)
        for each in writing:
            each.result()

    def _checkpoint(self, facts: dict[str, Any]) -> dict[str, Any]:
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
        if later:
            self._writing.append(self._writer.submit(_write, path, self._on_host(content)))
        else:
            _write(path, content)

    def _on_host(self, content: Any) -> Any:
        """Return a copy of all tensors on the host.

        GPU tensors go to pinned memory, which allows copies at full bus speed.
        """
        is_cuda = self._parameters[0].is_cuda

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            try:
                own = torch.empty_like(
                    tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False
                )
            except RuntimeError:  # the host limits pinned memory
                own = torch.empty_like(tensor, device="cpu", requires_grad=False)
            return own.copy_(tensor.detach(), non_blocking=True)

        copy = tree_map_only(torch.Tensor, copied, content)
        if is_cuda:
            torch.cuda.synchronize()
        return copy

    def resume(self, file: Path) -> None:
        """Check a checkpoint and load it, before anything runs.

        Raise `UserError` if it does not fit.
        """
        self._file, self._content = file, (content := read_checkpoint(file))
        try:
            facts = {**content["facts"]}
            own = {"batch_size": self._batch_size, "optimizer": type(self._optimizer).__name__}
            for name, value in own.items():
                if facts[name] != value:
                    raise UserError(
                        f"{file} is of a training with {name} {facts[name]}, this one has {value}."
                    )
            check_fit(self._module, content["model"], file)
            for index, state in content["optimizer"].items():
                for value in state.values():
                    if (
                        torch.is_tensor(value)
                        and value.ndim
                        and value.shape != self._parameters[index].shape
                    ):
                        raise ValueError("the optimizer's state is of other shapes")
            if [type(facts[name]) for name in ("epoch", "stale")] != [int, int] or min(
                facts["epoch"], facts["stale"]
            ) < 0:
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
            own = self._optimizer.state[self._parameters[index]]
            for name, value in state.items():
                if torch.is_tensor(own.get(name)):  # `resume` has loaded other entries
                    own[name].copy_(value)
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
        name, keys, *rest = np.random.get_state(legacy=True)
        numpy = (name, np.asarray(keys).tolist(), *rest)
        states = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": numpy}
        device = self._parameters[0].device
        return states | (
            {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
        )

    def _set_random_states(self, states: dict[str, Any]) -> None:
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

    Raises `UserError` for any other file, for example weights without training state.
    """
    content = read_content(file, "a checkpoint", _ADVICE)
    if not (isinstance(content, dict) and content.get("format") == _FORMAT):
        raise UserError(
            f"{file} is not a checkpoint to resume from. {_ADVICE} model.weights=FILE takes "
            "weights alone."
        )
    return content


def _write(path: Path, content: dict[str, Any]) -> None:
    write_atomically(path, lambda file: torch.save(content, file))
