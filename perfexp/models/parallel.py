"""Train a module by several ranks with torch's DistributedDataParallel."""

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

    Raises:
        UserError: it has no parameters, or the settings do not fit.
    """

    def __init__(self, module: torch.nn.Module, settings: Ddp) -> None:
        options = {name: value for name, value in vars(settings).items() if value is not None}
        try:
            self.shared = DistributedDataParallel(module, **options)
        except (RuntimeError, ValueError, TypeError) as error:
            raise UserError(f"The model can't be trained by several ranks: {error}") from error
        self._normalised = sum(isinstance(child, torch.nn.SyncBatchNorm) for child in module.modules())
        self.settings = options

    @contextmanager
    def without_gradients(self) -> Iterator[None]:
        """While entered, gradients are not exchanged; SyncBatchNorm still communicates."""
        with self.shared.no_sync():
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While entered, one rank can call the module itself, which sees no other ranks.

        SyncBatchNorm, mmengine's functions and heads that share statistics all query `torch.distributed`.
        """
        before = dist.is_initialized
        dist.is_initialized = _no_ranks
        try:
            yield
        finally:
            dist.is_initialized = before

    def facts(self) -> dict[str, Any]:
        """Facts for the record."""
        return {"ddp": dict(self.settings), "sync_batch_norms": self._normalised}


def _no_ranks() -> bool:
    return False


def is_shared() -> bool:
    """Whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
