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
        self._normalised = [each for each in module.modules() if isinstance(each, torch.nn.SyncBatchNorm)]
        self._own = None
        if self._normalised:
            self._own, _ = dist.new_subgroups(group_size=1)  # type: ignore[no-untyped-call]
        self.settings = given

    @contextmanager
    def without_gradients(self) -> Iterator[None]:
        """While entered, gradients stay where they are; SyncBatchNorm still asks the other ranks."""
        with self.shared.no_sync():
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While entered, SyncBatchNorm asks nobody: the module itself can be called by one rank."""
        before = [each.process_group for each in self._normalised]
        for each in self._normalised:
            each.process_group = self._own
        try:
            yield
        finally:
            for each, group in zip(self._normalised, before, strict=True):
                each.process_group = group

    def facts(self) -> dict[str, Any]:
        """What is to be recorded."""
        return {"ddp": dict(self.settings), "sync_batch_norms": len(self._normalised)}
