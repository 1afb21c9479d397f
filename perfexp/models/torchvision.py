"""Torchvision models for one image or clip, with random, downloaded or local weights.

`model=NAME` selects one, such as `resnet50` or `swin_t`. Its package in torchvision decides its
kind: classification, video or segmentation.
"""

from __future__ import annotations

import inspect
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from perfexp.devices import Device
from perfexp.errors import UserError, did_you_mean
from perfexp.models import Execution, Precision, Stem
from perfexp.models.initial_weights import initialized
from perfexp.models.kinds import Classification, Kind, Segmentation, VideoClassification
from perfexp.models.session import TorchSession
from perfexp.models.torchvision_import import import_torchvision
from perfexp.models.torchvision_names import REFUSED
from perfexp.models.weight_files import find_weights
from perfexp.models.weights import load_weights
from perfexp.records import diagnostics

models = import_torchvision().models
#: Default number of classes by package: Kinetics-400, Pascal VOC; otherwise ImageNet.
_USUAL_CLASSES = {"video": 400, "segmentation": 21}
_IMAGENET_CLASSES = 1000
#: Names for torchvision's recommended weights.
_RECOMMENDED = ("DEFAULT", "torchvision")


@dataclass(kw_only=True, eq=False)
class Torchvision:
    """A model built by torchvision.

    The fields are the keys of the `model` node; `plan/key_descriptions.yaml` describes them.
    """

    name: str
    weights: str | None = None
    weights_dir: str | None = None
    num_classes: int | None = None
    frames: int = 16
    stem: Stem = Stem.imagenet
    kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.stem = Stem(self.stem)  # a plan contains its name

    def open(
        self,
        *,
        device: Device,
        precision: Precision,
        execution: Execution,
        num_classes: int | None,
        seed: int,
    ) -> TorchSession:
        """Build the model, load its weights, and return its session.

        Raises `UserError` for an unknown model, or for classes, weights or settings that do not
        fit.
        """
        package, published = self._package(), self._published_weights()
        if published is None:
            file = find_weights(self.name, self.weights, self.weights_dir)
            classes = num_classes or _USUAL_CLASSES.get(package, _IMAGENET_CLASSES)
        else:
            file, classes = None, len(published.meta["categories"])
        classes = self.num_classes or classes
        if num_classes is not None and num_classes > classes:
            raise UserError(
                f"The data has {num_classes} classes, {self.name} with these settings has "
                f"{classes}. "
                "Leave model.num_classes and model.weights empty to have as many as the data has."
            )
        if published is not None and self.stem is Stem.cifar:
            raise UserError(
                f"The weights {published} are for model.stem=imagenet; leave one of the two out."
            )
        settings = self.name, published, classes, self.stem, self.kwargs or {}
        module = initialized(partial(self._build, published, classes), *settings, seed=seed)
        if file is not None:
            load_weights(module, file)
        doubts = []
        if package == "quantization":
            plain = self.name.removeprefix("quantized_")
            doubts = [diagnostics.make("not_quantized", model=self.name, plain=plain)]
        return TorchSession(
            module,
            kind=self._kind(package, classes),
            name=self.name,
            device=device,
            precision=precision,
            execution=execution,
            facts={"weights": str(published or file or f"random, seed {seed}")},
            doubts=doubts,
        )

    def _package(self) -> str:
        """Return the part of torchvision.models with the builder, for example `segmentation`.

        Raises `UserError` for a model or setting that perfexp does not measure.
        """
        names = models.list_models()
        if self.name not in names:
            raise UserError(
                f"torchvision builds no model {self.name!r}. {did_you_mean(self.name, names)}"
            )
        package = str(models.get_model_builder(self.name).__module__).split(".")[2]
        if package in REFUSED:
            raise UserError(
                f"{self.name} {REFUSED[package]}, which perfexp does not measure; choose another "
                "model."
            )
        if (self.kwargs or {}).get("quantize"):
            raise UserError(
                f"model.kwargs.quantize: int8 is not a precision of perfexp; {self.name} runs "
                "without it."
            )
        return package

    def _published_weights(self) -> Any:
        """Return torchvision's weights of the given name, for example `IMAGENET1K_V2`.

        None if `weights` is empty or names no published weights; then it is a file.
        """
        if self.weights is None:
            return None
        published = models.get_model_weights(self.name.removeprefix("quantized_"))
        name = "DEFAULT" if self.weights in _RECOMMENDED else self.weights.rpartition(".")[2]
        return published[name] if name in published.__members__ else None

    def _build(self, weights: Any, classes: int) -> torch.nn.Module:
        """Return the model with random weights, or with published ones after downloading them.

        Raises `UserError` if the download fails or the builder refuses the settings.

        Args:
            weights: published weights of torchvision; None for random ones.
        """
        settings = {"weights": weights, "num_classes": classes}
        builder = models.get_model_builder(self.name)
        if "weights_backbone" in inspect.signature(builder).parameters:
            settings["weights_backbone"] = None
        try:
            with warnings.catch_warnings():
                # a builder's new default, and torch's deprecated quantization
                for kind in (FutureWarning, DeprecationWarning):
                    warnings.simplefilter("ignore", kind)
                module = builder(progress=False, **settings, **(self.kwargs or {}))
        except OSError as error:
            raise UserError(
                f"The weights {settings['weights']} could not be downloaded: {error}. Download "
                "them elsewhere and name "
                "the file by model.weights and model.weights_dir, or leave model.weights empty "
                "for random ones."
            ) from error
        except (TypeError, ValueError) as error:
            raise UserError(
                f"torchvision's {self.name} does not take these settings: {error}."
            ) from error
        assert isinstance(module, torch.nn.Module)
        if self.stem is Stem.cifar:
            self._give_small_stem(module)
        return module

    def _give_small_stem(self, module: torch.nn.Module) -> None:
        """Replace the first layers for 32 × 32 images, with torchvision's initialization.

        Raises `UserError` if the module is not a ResNet. `model.stem=cifar` needs it: the usual
        stem would shrink such images to 8 × 8 pixels.
        """
        if not isinstance(module, models.ResNet):
            raise UserError(
                f"model.stem=cifar is for ResNets; {self.name} has its own stem: leave it out."
            )
        module.conv1 = torch.nn.Conv2d(
            3, module.conv1.out_channels, kernel_size=3, padding=1, bias=False
        )
        torch.nn.init.kaiming_normal_(module.conv1.weight, mode="fan_out", nonlinearity="relu")
        module.maxpool = torch.nn.Identity()

    def _kind(self, package: str, classes: int) -> Kind:
        """Return the kind of model for a package of torchvision.models."""
        if package == "video":
            return VideoClassification(classes, frames=self.frames)
        return Segmentation(classes) if package == "segmentation" else Classification(classes)
