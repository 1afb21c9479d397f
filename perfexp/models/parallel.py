"""Parallel: a module that several ranks train together, in torch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from perfexp.errors import UserError
from perfexp.models import Ddp


class Parallel:
    """A module as all ranks train it.

    Args:
        module: on its device; all ranks get the weights of the first.
        settings: of DistributedDataParallel.

    Attributes:
        shared: the module in its wrapper.

    Raises:
        UserError: it has no parameters, or the settings do not fit.
    """

    def __init__(self, module: torch.nn.Module, settings: Ddp) -> None:
        given = {name: value for name, value in vars(settings).items() if value is not None}
        try:
            self.shared = DistributedDataParallel(module, **given)
        except (RuntimeError, ValueError, TypeError) as error:
            raise UserError(f"The model can't be trained by several ranks: {error}") from error
        self._normalised = sum(isinstance(each, torch.nn.SyncBatchNorm) for each in module.modules())
        self.settings = given

    @contextmanager
    def without_gradients(self) -> Iterator[None]:
        """While entered, gradients stay where they are; SyncBatchNorm still asks the other ranks."""
        with self.shared.no_sync():
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While entered, the module itself can be called by one rank: whatever is in it finds no other ranks.

        SyncBatchNorm, mmengine's functions and heads that share statistics all ask torch whether there are any.
        """
        before = dist.is_initialized
        dist.is_initialized = _nobody
        try:
            yield
        finally:
            dist.is_initialized = before

    def facts(self) -> dict[str, Any]:
        """What is to be recorded."""
        return {"ddp": dict(self.settings), "sync_batch_norms": self._normalised}


def _nobody() -> bool:
    """No ranks, as far as the module is concerned."""
    return False


def is_shared() -> bool:
    """Whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
