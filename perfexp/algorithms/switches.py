"""Torch settings that select an algorithm for a whole model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from perfexp.errors import UserError

#: Algorithms that apply to a whole model and cannot be chosen for one layer.
SWITCHED = ("benchmark", "onednn", "native")


@dataclass(frozen=True)
class Switches:
    """Global torch settings for convolutions."""

    benchmark: bool
    onednn: bool

    @classmethod
    def now(cls) -> Switches:
        """The current settings."""
        return cls(torch._C._get_cudnn_benchmark(), torch._C._get_mkldnn_enabled())

    def of(self, algorithm: str) -> Switches:
        """The settings for an algorithm, most of which need none; raises `UserError` where torch lacks oneDNN."""
        if algorithm == "benchmark":
            return replace(self, benchmark=True)
        if algorithm == "onednn" and not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            raise UserError("this torch has no oneDNN; choose algorithm=default.")
        return replace(self, onednn=algorithm == "onednn") if algorithm in ("onednn", "native") else self

    @contextmanager
    def set(self) -> Iterator[None]:
        """Apply these settings while entered."""
        before = Switches.now()
        self._put()
        try:
            yield
        finally:
            before._put()

    def _put(self) -> None:
        torch._C._set_cudnn_benchmark(self.benchmark)
        torch._C._set_mkldnn_enabled(self.onednn)
