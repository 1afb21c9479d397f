"""Image classifiers from timm (PyTorch Image Models) with random weights.

`model=timm:NAME` selects one.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from perfexp.devices import Device
from perfexp.errors import UserError, did_you_mean
from perfexp.models import Execution, Precision
from perfexp.models.initial_weights import initialized
from perfexp.models.kinds import Classification
from perfexp.models.session import TorchSession
from perfexp.models.torchvision_import import import_torchvision
from perfexp.models.torchvision_names import TIMM

_IMAGENET_CLASSES = 1000
#: Settings that make timm load or download a file. A foreign plan must not do that.
_LOADING = ("checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay")


class Timm:
    """A classifier built by timm.

    The arguments are the keys of the `model` node; `plan/key_descriptions.yaml` describes them.

    Raises:
        UserError: `kwargs` would load weights.
    """

    def __init__(
        self, *, name: str, num_classes: int | None = None, kwargs: dict[str, Any] | None = None
    ) -> None:
        self.name = name
        self._num_classes, self._kwargs = num_classes, dict(kwargs or {})
        if loading := [key for key in _LOADING if key in self._kwargs]:
            raise UserError(
                f"model.kwargs.{loading[0]}: timm's models have random weights here; leave it out."
            )

    def open(
        self,
        *,
        device: Device,
        precision: Precision,
        execution: Execution,
        num_classes: int | None,
        seed: int,
    ) -> TorchSession:
        """Build the classifier and return its session.

        Raises `UserError` if timm is missing, has no such model, or refuses the settings.
        """
        classes = self._num_classes or num_classes or _IMAGENET_CLASSES
        if num_classes is not None and num_classes > classes:
            raise UserError(f"The data has {num_classes} classes, model.num_classes is {classes}.")
        return TorchSession(
            initialized(partial(self._build, classes), self.name, classes, self._kwargs, seed=seed),
            kind=Classification(classes),
            name=self.name,
            device=device,
            precision=precision,
            execution=execution,
            facts={"weights": f"random, seed {seed}"},
        )

    def _build(self, classes: int) -> torch.nn.Module:
        """Return timm's model with random weights; raise `UserError` if timm cannot build it."""
        # timm imports it too, and fails if its compiled operators do not fit torch
        import_torchvision()
        try:
            import timm
        except ImportError as error:
            raise UserError(f"model={self.name} needs timm: pip install 'perfexp[timm]'") from error
        name = self.name.removeprefix(TIMM)
        names = timm.list_models()
        # hub names would download
        if name not in names:
            raise UserError(f"timm builds no model {name!r}. {did_you_mean(name, names)}".rstrip())
        try:
            module = timm.create_model(name, pretrained=False, num_classes=classes, **self._kwargs)
        except (TypeError, ValueError, RuntimeError, AssertionError) as error:
            raise UserError(f"timm's {name} does not take these settings: {error}.") from error
        assert isinstance(module, torch.nn.Module)
        return module
