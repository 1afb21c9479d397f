"""mmsegmentation models, by configuration name or path, without downloads.

Such a configuration is a Python file that describes a model, its data pipelines, optimizer and
learning rate schedules. perfexp takes all of them unless settings replace them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch

from perfexp.cost import Work
from perfexp.cost.tensors import tensors_in
from perfexp.devices import Device
from perfexp.errors import UserError
from perfexp.models import Batch, Ddp, Execution, Precision
from perfexp.models.kinds import VOID, Segmentation, main_output
from perfexp.models.kinds import correct as correct_pixels
from perfexp.models.mmseg_config import (
    HostImages,
    build,
    classes_of,
    read_config,
    set_classes,
    version,
    without_sync_batch_norm,
)
from perfexp.models.session import TorchSession, is_shared
from perfexp.models.trainer import TorchTrainer, begin_momentum
from perfexp.models.weight_files import find_weights
from perfexp.models.weights import load_weights

#: Settings of mmengine's optimizer wrapper that perfexp controls.
_SET_BY_PERFEXP = ("accumulative_counts", "loss_scale", "dtype")


@dataclass(kw_only=True, eq=False)
class Mmseg:
    """A model described by an mmsegmentation configuration.

    The fields are the keys of the `model` node; `plan/key_descriptions.yaml` describes them.
    """

    name: str
    config: str
    weights: str | None = None
    weights_dir: str | None = None
    num_classes: int | None = None
    output: str = "raw"
    optimizer: str | None = None
    options: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.output not in ("raw", "predict"):
            raise UserError(f"model.output={self.output}: raw or predict.")
        if self.optimizer not in (None, "own", "mode"):
            raise UserError(f"model.optimizer={self.optimizer}: own or mode.")

    def open(
        self,
        *,
        device: Device,
        precision: Precision,
        execution: Execution,
        num_classes: int | None,
        seed: int,
    ) -> MmsegSession:
        """Build the model, load its weights, and return its session.

        Raises `UserError` if mmsegmentation is missing, or the configuration, weights or classes do
        not fit.
        """
        config, source = read_config(self.config, dict(self.options or {}))
        classes = self.num_classes or num_classes
        if classes is not None:
            set_classes(config.model, classes)
        classes = classes_of(config.model)
        if num_classes is not None and num_classes > classes:
            raise UserError(f"The data has {num_classes} classes, model.num_classes is {classes}.")
        # SyncBatchNorm supports only CUDA
        keeps_sync = is_shared() and device.kind == "cuda"
        is_replaced = not keeps_sync and without_sync_batch_norm(config.model)
        torch.manual_seed(seed)
        module = build(config.model, self.config)
        if (file := find_weights(self.name, self.weights, self.weights_dir)) is not None:
            load_weights(module, file)
        facts = {"weights": str(file or f"random, seed {seed}"), "config": source}
        facts |= {"mmsegmentation": version(), "output": self.output}
        if is_replaced:
            facts["sync_batch_norm"] = "as batch norm: it needs several CUDA devices"
        return MmsegSession(
            module,
            config=config,
            output=self.output,
            own_optimizer=self.optimizer != "mode",
            kind=Segmentation(classes),
            name=self.name,
            device=device,
            precision=precision,
            execution=execution,
            facts=facts,
        )


class MmsegSession(TorchSession):
    """An mmsegmentation model with its own loss, optimizer and schedule.

    `config` is mmengine's configuration; the Cityscapes data takes its pipelines from there.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        config: Any,
        output: str,
        own_optimizer: bool,
        **session: Any,
    ) -> None:
        super().__init__(module, **session)
        self.config, self._output, self._own_optimizer = config, output, own_optimizer
        self._preprocessor: Any = None

    def place(self, batch: Batch) -> Batch:
        """Copy a batch to the device.

        Pipeline images go through the configuration's data_preprocessor there.
        """
        if isinstance(batch.inputs, HostImages):
            batch = Batch(inputs=self._preprocessed(batch.inputs), targets=batch.targets)
        return super().place(batch)

    def forward(self, inputs: Any) -> Any:
        """Return scores (batch, classes, height, width), or a list of samples with `predict`."""
        if self._output == "raw":
            return super().forward(inputs)
        with self._autocast():
            return self._run(self._fresh(inputs), _samples(inputs), mode="predict")

    def learn(self, batch: Batch) -> Any:
        """Return a mapping of losses, which the model computes in the forward pass."""
        with self._autocast():
            return self._run(
                self._fresh(batch.inputs), _samples(batch.inputs, batch.targets), mode="loss"
            )

    def share(self, settings: Ddp) -> dict[str, Any]:
        """Train with other ranks from now on, each with its own buffers, as mmengine does."""
        return super().share(replace(settings, broadcast_buffers=bool(settings.broadcast_buffers)))

    def loss(self, outputs: Any, targets: Any, label_smoothing: float = 0.0) -> Any:
        """Return the sum of the losses, as mmengine does; raise `UserError` for label smoothing.

        `outputs` is the mapping from `learn`, whose losses depend on the targets already.
        """
        if label_smoothing:
            raise UserError(
                "mode.train.label_smoothing: mmsegmentation's losses are those of its "
                "configuration."
            )
        module: Any = self.module
        return module.parse_losses(outputs)[0]

    def correct(self, outputs: Any, targets: Any) -> tuple[Any, Any]:
        """Return the number of correctly predicted pixels and the number of all labeled pixels.

        In training the first is rounded from a percentage; 0 if the model reports none.
        """
        # in training, the decode head reports the share itself, in percent
        if isinstance(outputs, Mapping):
            percentages = [
                value
                for name, value in outputs.items()
                if name.endswith("acc_seg") and "aux" not in name
            ]
            counted = int((targets != VOID).sum())
            if not percentages:
                return 0, counted
            return round(float(percentages[-1]) / 100 * counted), counted
        if isinstance(outputs, list):
            outputs = torch.stack([sample.seg_logits.data for sample in outputs])
        scores = torch.nn.functional.interpolate(
            main_output(outputs), targets.shape[-2:], mode="bilinear"
        )
        return correct_pixels(scores, targets)

    def optimizer(self, settings: dict[str, Any]) -> Callable[[], None]:
        """Return the update of the configuration's optimizer, or of the mode's if it is selected.

        Raises `UserError` if the configuration's optimizer cannot be built.
        """
        if not self._own_optimizer:
            return super().optimizer(settings)
        wrapper, schedules = self._own_training()

        def clip() -> None:
            wrapper.clip_func(list(self.module.parameters()), **wrapper.clip_grad_kwargs)

        clips = bool(wrapper.clip_grad_kwargs)
        return self._update_function(wrapper.optimizer, clip if clips else None, schedules)

    def trainer(self, **settings: Any) -> TorchTrainer | None:
        """Return the training state with the mode's optimizer; None with the configuration's own.

        mmengine's schedules cannot be saved and resumed here.
        """
        return None if self._own_optimizer else super().trainer(**settings)

    @contextmanager
    def without_waits(self) -> Iterator[str]:
        """Replace functions that synchronize inside the context.

        Yield a description for the record.
        """
        with masked_losses():
            yield (
                "mmsegmentation's accuracy and one-hot labels by a mask instead of a selection "
                "of pixels"
            )

    def work(self, inputs: Any, *, training: bool) -> Work:
        """Return the analytic work per call.

        Training work is counted without the losses, as for any model.
        """
        with _without_losses(self.module):
            work = super().work(inputs, training=training)
        rows = (row for row in work.rows if row.kind != _ScoresSum.__name__)
        return replace(work, rows=tuple(rows))

    def facts(self) -> dict[str, Any]:
        """Return the session's facts, with the configuration's optimizer and schedules if used."""
        if not (self._own_optimizer and "optim_wrapper" in self.config):
            return super().facts()
        stepped, by_epochs = self._schedules()
        facts = {**super().facts(), "optimizer": str(self.config.optim_wrapper.optimizer.type)}
        facts["schedule"] = [str(schedule["type"]) for schedule in stepped]
        if by_epochs:
            facts["schedule_left_out"] = [f"{schedule['type']} by epochs" for schedule in by_epochs]
        return facts

    def _work_arguments(self, inputs: Any, *, training: bool) -> dict[str, Any]:
        """Return random labels and the loss mode for counting training work.

        Nothing for inference.
        """
        if not training:
            return {}
        targets = self._kind.random_targets(inputs.shape[-2:], len(inputs), torch.Generator())
        assert targets is not None
        return {"data_samples": _samples(inputs, targets.to(inputs.device)), "mode": "loss"}

    def _preprocessed(self, images: HostImages) -> torch.Tensor:
        """Return float32 images (batch, 3, height, width) on the device, preprocessed and stacked.

        Channels are reordered, normalized and padded to the size. Raises `UserError` if the
        configuration's preprocessor does not stack images.
        """
        from mmengine.registry import DefaultScope
        from mmseg.registry import MODELS
        from mmseg.structures import SegDataSample

        # not the module's own, since it has the weights' data type
        if self._preprocessor is None:
            settings = self.config.model.get("data_preprocessor")
            settings = settings or {"type": "SegDataPreProcessor"}
            with DefaultScope.overwrite_default_scope("mmseg"):
                self._preprocessor = MODELS.build(settings).to(self.device.identifier)
            self._preprocessor.size_divisor = self._preprocessor.test_cfg = None
        self._preprocessor.size = images.size
        overlapped = self.device.kind == "cuda"
        inputs = [
            tensor.to(self.device.identifier, non_blocking=overlapped) for tensor in images.tensors
        ]
        samples = [SegDataSample() for _ in inputs]
        data = self._preprocessor(
            {"inputs": inputs, "data_samples": samples}, training=images.training
        )
        if not isinstance(data["inputs"], torch.Tensor):
            raise UserError(
                f"The {type(self._preprocessor).__name__} of the configuration does not stack "
                "images."
            )
        return data["inputs"]

    def _schedules(self) -> tuple[list[Any], list[Any]]:
        """Return the configuration's schedules by steps, and its schedules by epochs.

        Only those by steps are used, because endless data has no epochs.
        """
        configured = self.config.get("param_scheduler") or []
        schedules = [configured] if isinstance(configured, Mapping) else list(configured)
        stepped = [schedule for schedule in schedules if not schedule.get("by_epoch", True)]
        return stepped, [schedule for schedule in schedules if schedule not in stepped]

    def _own_training(self) -> tuple[Any, list[Any]]:
        """Return the configuration's optimizer wrapper and its schedules by steps.

        Raises `UserError` if there is no optimizer, or it cannot be built. perfexp sets loss
        scaling and data types itself, so these settings are left out.
        """
        from mmengine.optim import build_optim_wrapper
        from mmengine.registry import PARAM_SCHEDULERS, DefaultScope

        settings = self.config.get("optim_wrapper")
        if settings is None:
            raise UserError(
                "This configuration has no optim_wrapper to train by; set model.optimizer=mode."
            )
        described = {**settings, "type": "OptimWrapper", "optimizer": {**settings["optimizer"]}}
        described = {key: value for key, value in described.items() if key not in _SET_BY_PERFEXP}
        if self._fuses(described["optimizer"]):
            described["optimizer"]["fused"] = True
        with DefaultScope.overwrite_default_scope("mmseg"):
            try:
                wrapper = build_optim_wrapper(self.module, described)
                default = {"optimizer": wrapper}
                schedules = [
                    PARAM_SCHEDULERS.build(dict(item), default_args=default)
                    for item in self._schedules()[0]
                ]
            except (TypeError, ValueError, KeyError, RuntimeError) as error:
                raise UserError(
                    f"The configuration's optimizer can't be built: {error}. Set "
                    "model.optimizer=mode for the mode's."
                ) from error
        if described["optimizer"].get("fused") and described["optimizer"].get("momentum"):
            begin_momentum(
                wrapper.optimizer, [item for item in self.module.parameters() if item.requires_grad]
            )
        return wrapper, schedules


class _ScoresSum(torch.nn.Module):
    """Replacement of a head's losses with its score sum.

    It is a module, so that `work` can recognize and drop its row.
    """

    def forward(self, scores: Any) -> torch.Tensor:
        return torch.stack([tensor.sum() for tensor in tensors_in(scores)]).sum()


@contextmanager
def _without_losses(module: torch.nn.Module) -> Iterator[None]:
    """Make heads return their score sum while entered, instead of their losses.

    Losses may depend on label values, and counting work has no values.
    """
    total = _ScoresSum()

    def sum_of(scores: Any, *_: Any, **__: Any) -> dict[str, torch.Tensor]:
        return {"loss": total(scores)}

    with ExitStack() as stack:
        for head in module.modules():
            if hasattr(head, "loss_by_feat"):
                stack.enter_context(patch.object(head, "loss_by_feat", sum_of))
        yield


def _samples(inputs: torch.Tensor, targets: torch.Tensor | None = None) -> list[Any]:
    """Return mmsegmentation's sample objects, with labels if given, as its models expect them.

    Args:
        inputs: images (batch, 3, height, width).
        targets: class indices (batch, height, width).
    """
    from mmengine.structures import PixelData
    from mmseg.structures import SegDataSample

    size = tuple(inputs.shape[-2:])
    about = {"img_shape": size, "ori_shape": size, "pad_shape": size, "padding_size": [0, 0, 0, 0]}
    samples = []
    for index in range(len(inputs)):
        sample = SegDataSample(metainfo=about)
        if targets is not None:
            sample.gt_sem_seg = PixelData(data=targets[index][None])
        samples.append(sample)
    return samples


@contextmanager
def masked_losses() -> Iterator[None]:
    """Select labeled pixels with a mask inside the context.

    mmsegmentation indexes them, for the accuracy next to each loss and for labels in binary
    cross-entropy. Their number requires a synchronization with the device.
    `MmsegSession.without_waits` applies it.
    """
    from mmseg.models import losses
    from mmseg.models.losses import cross_entropy_loss

    #: Original and replacement of each function.
    replaced: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "accuracy": (losses.accuracy, _accuracy_or(losses.accuracy)),
        "_expand_onehot_labels": (cross_entropy_loss._expand_onehot_labels, _one_hot),
    }
    modules = [module for name, module in sys.modules.items() if name.startswith("mmseg.models")]
    with ExitStack() as stack:
        for module in modules:  # each has its own reference
            for name, (original, masked) in replaced.items():
                if vars(module).get(name) is original:
                    stack.enter_context(patch.object(module, name, masked))
        yield


def _accuracy_or(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of mmsegmentation's accuracy that does not synchronize.

    It covers the arguments that mmsegmentation's heads pass; other calls use the original. Scores
    have the shape (batch, classes, …), targets (batch, …).
    """

    def accuracy(
        pred: torch.Tensor,
        target: torch.Tensor,
        topk: Any = 1,
        thresh: Any = None,
        ignore_index: int | None = None,
    ) -> Any:
        """Return the percentage of correct labeled pixels, shape (1,)."""
        if topk != 1 or thresh is not None or ignore_index is None or not len(pred):
            return original(pred, target, topk, thresh, ignore_index)
        labeled = target != ignore_index
        right = pred.topk(1, dim=1)[1].transpose(0, 1).eq(target[None]) & labeled
        # as in mmsegmentation, against a division by zero
        epsilon = torch.finfo(torch.float32).eps
        num_right = right.reshape(-1).float().sum(0, keepdim=True) + epsilon
        return num_right * 100.0 / (labeled.float().sum() + epsilon)

    return accuracy


def _one_hot(
    labels: torch.Tensor,
    label_weights: torch.Tensor | None,
    target_shape: Sequence[int],
    ignore_index: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return one plane per class, weights and a mask.

    It replaces mmsegmentation's `_expand_onehot_labels`. Labels have the shape (batch, …), the
    results `target_shape` (batch, classes, …). Planes are 0 or 1; the mask is 0 at void pixels.
    """
    valid = ((labels >= 0) & (labels != ignore_index)).unsqueeze(1)
    classes = labels.clamp(0, target_shape[1] - 1).unsqueeze(1)
    planes = labels.new_zeros(target_shape).scatter_(1, classes, valid.to(labels.dtype))
    mask = valid.expand(target_shape).float()
    weights = mask
    if label_weights is not None:
        weights = label_weights.unsqueeze(1).expand(target_shape) * mask
    return planes, weights, mask
