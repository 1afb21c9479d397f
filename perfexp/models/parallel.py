"""Train a module by several ranks with torch's DistributedDataParallel."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from perfexp.errors import UserError
from perfexp.models import Ddp


def shared_by_ranks(module: torch.nn.Module, settings: Ddp) -> tuple[DistributedDataParallel, dict[str, Any]]:
    """A module as all ranks train it, and facts for the record; raises `UserError` if that is impossible."""
    options = {name: value for name, value in vars(settings).items() if value is not None}
    try:
        shared = DistributedDataParallel(module, **options)
    except (RuntimeError, ValueError, TypeError) as error:
        raise UserError(f"The model can't be trained by several ranks: {error}") from error
    norms = sum(isinstance(child, torch.nn.SyncBatchNorm) for child in module.modules())
    return shared, {"ddp": options, "sync_batch_norms": norms}


def alone() -> AbstractContextManager[object]:
    """While entered, one rank can call the module itself, which sees no other ranks.

    SyncBatchNorm, mmengine's functions and heads that share statistics all query `torch.distributed`.
    """
    return patch.object(dist, "is_initialized", lambda: False)


def is_shared() -> bool:
    """Whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
