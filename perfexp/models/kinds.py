"""Kinds of models: their inputs, targets and losses, by task and output structure.

A model's `open` gives the `TorchSession` a kind, for example `Classification`. The kind makes
random batches, defines the training loss and counts correct predictions. Model names never decide.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import cross_entropy, interpolate
from torch.utils._pytree import tree_leaves

from perfexp.cost.tape import original_of
from perfexp.errors import Unsupported, UserError
from perfexp.models.transformer import info_nce

#: Label for pixels outside all classes (Pascal VOC, Cityscapes, torchvision's references).
VOID = 255
#: Weight of an auxiliary classifier (Szegedy et al., "Going Deeper with Convolutions", section 5).
CLASSIFIER_AUXILIARY_WEIGHT = 0.3
#: Weight of a segmentation model's auxiliary head.
#: Source: pytorch/vision, references/segmentation/train.py.
SEGMENTATION_AUXILIARY_WEIGHT = 0.5


class Kind:
    """A model's inputs, targets and loss. The defaults are for single images.

    Attributes:
        name: task, for the record and for messages.
        num_classes: number of classes; None if the model has none.
        target_dims: dimensions of a target batch; None for any.
        channels: channels of an image.
        inputs_help: sentence on giving the module other inputs, with a leading space.
    """

    name: str
    target_dims: int | None
    channels = 3
    inputs_help = ""

    def __init__(self, num_classes: int | None) -> None:
        self.num_classes = num_classes

    def sample_shape(self, input_size: tuple[int, int]) -> tuple[int, ...]:
        """Return the shape of one sample, without the batch, from height and width in pixels."""
        return (self.channels, *input_size)

    @property
    def input_dims(self) -> int | None:
        """Return the dimensions of an input batch; None if the module makes its own inputs."""
        return 1 + len(self.sample_shape((224, 224)))

    def random_inputs(
        self, input_size: tuple[int, int], batch_size: int, generator: torch.Generator
    ) -> Any:
        """Return random inputs on the host, normally distributed like normalized images.

        For modules with several inputs they are a tuple of positional arguments or a dictionary of
        named arguments. A session copies them to the device.
        """
        return torch.randn(batch_size, *self.sample_shape(input_size), generator=generator)

    def tokens(self, inputs: Any) -> int:
        """Return the number of token ids in a call's inputs; 0 if there are none, or images, too.

        The count is for all samples of the batch, for tokens/s. Token ids are integers of shape
        (batch, length), alone or with a name that ends in `input_ids`.
        """
        named = inputs if isinstance(inputs, Mapping) else {"input_ids": inputs}
        tensors = {key: tensor for key, tensor in named.items() if isinstance(tensor, torch.Tensor)}
        if any(tensor.is_floating_point() for tensor in tensors.values()):
            return 0
        ids = (
            tensor
            for key, tensor in tensors.items()
            if key.endswith("input_ids") and tensor.ndim == 2
        )
        return sum(tensor.numel() for tensor in ids)

    def labels(
        self, input_size: tuple[int, int], batch_size: int
    ) -> tuple[int, tuple[int, ...]] | None:
        """Return the number of classes and the shape of a target batch; None without targets.

        `random_targets` draws class indices from it.
        """
        raise NotImplementedError

    def random_targets(
        self, input_size: tuple[int, int], batch_size: int, generator: torch.Generator
    ) -> torch.Tensor | None:
        """Return class indices for `loss` on the host, (batch,) or (batch, height, width).

        None if the model has no targets.
        """
        labels = self.labels(input_size, batch_size)
        return None if labels is None else torch.randint(*labels, generator=generator)

    def observe(self, inputs: Any, outputs: Any) -> None:
        """Remember the output shape of a first call, for targets that nothing else describes."""

    def loss(self, outputs: Any, targets: Any, label_smoothing: float = 0.0) -> torch.Tensor:
        """Return the scalar to minimize, from outputs and class indices.

        Class indices have the shape (batch,) or (batch, height, width).
        """
        return weighted_cross_entropy(outputs, targets, label_smoothing)


class Classification(Kind):
    """One class per image."""

    name = "classification"
    target_dims = 1
    num_classes: int

    def labels(self, input_size: tuple[int, int], batch_size: int) -> tuple[int, tuple[int, ...]]:
        """Return the number of classes and the shape (batch,)."""
        return self.num_classes, (batch_size,)


class VideoClassification(Classification):
    """One class per clip; a sample is (3, frames, height, width)."""

    name = "video classification"

    def __init__(self, num_classes: int, *, frames: int) -> None:
        super().__init__(num_classes)
        self._frames = frames

    def sample_shape(self, input_size: tuple[int, int]) -> tuple[int, ...]:
        """Return the shape of one clip, (3, frames, height, width)."""
        return (3, self._frames, *input_size)


class Segmentation(Classification):
    """One class per pixel."""

    name = "segmentation"
    target_dims = 3

    def labels(self, input_size: tuple[int, int], batch_size: int) -> tuple[int, tuple[int, ...]]:
        """Return the number of classes and the shape (batch, height, width)."""
        return self.num_classes, (batch_size, *input_size)


class Named(Kind):
    """Token ids and images by the names of transformers; a single input has no name.

    `input_size` is the number of tokens; with images it is their size, and texts are as long as
    the model allows. The loss uses all outputs, so that all parameters are trained: InfoNCE of a
    batch's images and texts, or else the mean square of each output.

    Args:
        vocabulary: number of token ids; None for images alone.
        names: names of the token ids.
        longest: maximum number of tokens, if the model has one.
        takes_images: whether `pixel_values` are an input.
    """

    target_dims: int | None = None

    def __init__(
        self,
        name: str,
        *,
        vocabulary: int | None = None,
        names: Sequence[str] = (),
        longest: int | None = None,
        takes_images: bool = False,
    ) -> None:
        super().__init__(None)
        self.name, self._vocabulary, self._names = name, vocabulary, tuple(names)
        self._longest, self._takes_images = longest, takes_images

    @property
    def input_dims(self) -> int | None:
        """Return 4 for images, 2 for token ids; None for several inputs."""
        if len(self._names) + self._takes_images > 1:
            return None
        return 4 if self._takes_images else 2

    def length(self, input_size: tuple[int, int]) -> int:
        """Return the tokens per sample: `input_size`, or with images as many as the model allows.

        Raises `Unsupported` if the model has too few positions.
        """
        length, longest = input_size[1], self._longest or input_size[1]
        if self._takes_images:
            return longest
        if length > longest:
            raise Unsupported(
                f"{length} tokens: the model has positions for {longest} tokens; set input_size="
                f"{longest} (or decode.context), or more positions in its configuration "
                "(model.config.…)"
            )
        return length

    def random_inputs(
        self, input_size: tuple[int, int], batch_size: int, generator: torch.Generator
    ) -> Any:
        """Return random inputs on the host: a dictionary by name, or a tensor for a single input.

        Token ids have shape (batch, length) and are evenly distributed over the vocabulary. Images
        have shape (batch, channels, height, width).
        """
        inputs = {}
        if self._vocabulary is not None:
            shape = batch_size, self.length(input_size)
            inputs = {
                name: torch.randint(self._vocabulary, shape, generator=generator)
                for name in self._names
            }
        if self._takes_images:
            inputs["pixel_values"] = super().random_inputs(input_size, batch_size, generator)
        return inputs if len(inputs) > 1 else next(iter(inputs.values()))

    def labels(
        self, input_size: tuple[int, int], batch_size: int
    ) -> tuple[int, tuple[int, ...]] | None:
        """Return None, because the loss needs no targets."""
        return None

    def loss(self, outputs: Any, targets: Any, label_smoothing: float = 0.0) -> torch.Tensor:
        """Return InfoNCE of images and texts, or the sum of all outputs' mean squares.

        Raises `UserError` for label smoothing, which needs labels.
        """
        if label_smoothing:
            raise UserError(f"mode.train.label_smoothing: {self.name} has no labels; set it to 0.")
        if (scores := getattr(outputs, "logits_per_image", None)) is not None:
            return info_nce(scores)
        leaves = (leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor))
        learned = [leaf.float().square().mean() for leaf in leaves if leaf.requires_grad]
        return torch.stack(learned).sum()


class LanguageModel(Named):
    """Text whose tokens are predicted: the next ones, hidden ones, or an answer's.

    Args:
        shifted: whether outputs predict the next token. Otherwise each position has a label.
    """

    target_dims = 2

    def __init__(self, name: str, *, shifted: bool, **inputs: Any) -> None:
        super().__init__(name, **inputs)
        self._shifted = shifted

    def labels(
        self, input_size: tuple[int, int], batch_size: int
    ) -> tuple[int, tuple[int, ...]] | None:
        """Return the vocabulary size and the shape (batch, length)."""
        assert self._vocabulary is not None
        return self._vocabulary, (batch_size, self.length(input_size))

    def loss(self, outputs: Any, targets: Any, label_smoothing: float = 0.0) -> torch.Tensor:
        """Return the mean cross-entropy over all tokens, computed in float32.

        Outputs have `logits` (batch, length, vocabulary), targets are token ids (batch, length).
        """
        logits = outputs.logits
        if self._shifted:
            logits, targets = logits[:, :-1], targets[:, 1:]
        # as Hugging Face does; autocast would round the logarithms to half precision
        logits = logits.float()
        return cross_entropy(
            logits.flatten(0, 1), targets.flatten(), label_smoothing=label_smoothing
        )


class ByOutput(Kind):
    """Kind by output shape.

    Outputs (batch, classes) mean classification, outputs (batch, classes, height, width)
    segmentation. The first call determines the shape, so there are no targets before it.

    The module's class may replace defaults with methods `sample_shape`, `example_inputs` and
    `loss`, the module with an integer `num_classes`.
    """

    name = "by output shape"
    target_dims = None
    inputs_help = (
        " A module gets one float tensor, a batch of images: for another shape give its class a "
        "method "
        "sample_shape(input_size); for token ids or several inputs a method "
        "example_inputs(batch_size)."
    )

    def __init__(self, module: torch.nn.Module, inputs: Any = None) -> None:
        module = original_of(module)
        super().__init__(own_classes(module))
        self._sample_shape = _own_method(module, "sample_shape", 1) or super().sample_shape
        self._loss = _own_method(module, "loss", 2)
        # it may take the batch size and the input size, the batch size alone, or nothing
        forms = (_own_method(module, "example_inputs", count) for count in (2, 1, 0))
        self._example_inputs = next(filter(None, forms), None)
        if inputs is not None:
            self._example_inputs = lambda: inputs
        #: Number of classes and target shape by batch size or input shape.
        self._labels: dict[tuple[int, ...], tuple[int, tuple[int, ...]]] = {}

    def sample_shape(self, input_size: tuple[int, int]) -> tuple[int, ...]:
        """Return the shape of one sample, from the module's own `sample_shape` if it has one."""
        return tuple(self._sample_shape(input_size))

    @property
    def input_dims(self) -> int | None:
        """Return the dimensions of an image batch; None if the module makes its own inputs."""
        return None if self._example_inputs else super().input_dims

    def random_inputs(
        self, input_size: tuple[int, int], batch_size: int, generator: torch.Generator
    ) -> Any:
        """Return random images, or the module's `example_inputs` under the generator's seed.

        Raises `UserError` if no tensor among the example inputs has the batch size.
        """
        if self._example_inputs is None:
            return super().random_inputs(input_size, batch_size, generator)
        count = len(inspect.signature(self._example_inputs).parameters)
        arguments = (batch_size, input_size)[:count]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator.initial_seed())
            inputs = self._example_inputs(*arguments)
        inputs = tuple(inputs) if isinstance(inputs, list) else inputs
        batches = {
            len(leaf)
            for leaf in tree_leaves(inputs)
            if isinstance(leaf, torch.Tensor) and leaf.ndim
        }
        if batch_size not in batches:
            contents = "no tensor with a batch"
            if batches:
                contents = f"a batch of {max(batches)}: set batch_size={max(batches)}"
            raise UserError(
                f"example_inputs gives {contents}, or let it take the batch size: "
                "example_inputs(batch_size)."
            )
        return inputs

    def labels(
        self, input_size: tuple[int, int], batch_size: int
    ) -> tuple[int, tuple[int, ...]] | None:
        """Return the classes and target shape that `observe` saw for this batch.

        None before the first call, or if its outputs are not class scores.
        """
        shape = () if self._example_inputs else self.sample_shape(input_size)
        return self._labels.get((batch_size, *shape))

    def observe(self, inputs: Any, outputs: Any) -> None:
        """Remember classes and target shape of a first call, if its outputs are class scores.

        `labels` returns them for later batches of the same shape.
        """
        try:
            scores = main_output(outputs)
        except UserError:  # the module has its own loss, or does not train
            return
        if scores.ndim in (2, 4):
            batch = scores.shape[:1] if self._example_inputs else inputs.shape
            self._labels[tuple(batch)] = scores.shape[1], (scores.shape[0], *scores.shape[2:])

    def loss(self, outputs: Any, targets: Any, label_smoothing: float = 0.0) -> torch.Tensor:
        """Return the module's own loss, or else the cross-entropy.

        Raises `UserError` for label smoothing with the module's own loss.
        """
        if self._loss is None:
            return super().loss(outputs, targets, label_smoothing)
        if label_smoothing:
            raise UserError(
                "mode.train.label_smoothing: the module has a loss of its own; set it to 0."
            )
        value: torch.Tensor = self._loss(outputs, targets)
        return value


def own_classes(module: torch.nn.Module) -> int | None:
    """Return the module's `num_classes` if it is a number."""
    classes = getattr(module, "num_classes", None)
    return classes if type(classes) is int else None


def _own_method(module: torch.nn.Module, name: str, count: int) -> Callable[..., Any] | None:
    """Return a method of the module's class that accepts `count` arguments.

    Attributes do not count, such as a stored loss or a loss module, nor do methods with another
    purpose. A user's module may define `loss`, `sample_shape` or `example_inputs`.
    """
    if not inspect.isfunction(getattr(type(module), name, None)):
        return None
    method: Callable[..., Any] = getattr(module, name)
    try:
        inspect.signature(method).bind(*range(count))
    except TypeError:
        return None
    return method


def main_output(outputs: Any) -> torch.Tensor:
    """Return the class scores among a module's outputs, (batch, classes, …).

    Raises `UserError` if the outputs have no known form.
    """
    return next(_weighted(outputs))[1]


def weighted_cross_entropy(
    outputs: Any, targets: Any, label_smoothing: float = 0.0
) -> torch.Tensor:
    """Return the cross-entropy of the main output plus weighted auxiliary cross-entropies.

    It is the training loss unless a kind has its own.

    Args:
        outputs: a tensor, a mapping with `out` and optionally `aux`, or a named tuple with `logits`
            and `aux_logits…`.
        targets: class indices, (batch,) or (batch, height, width). Void pixels do not count.

    Raises:
        UserError: outputs have another form, or there are no targets.
    """
    if targets is None:
        raise UserError(
            "There are no targets to learn from: the model's outputs are neither (batch, "
            "classes) nor (batch, classes, "
            "height, width). Infer with it, or give the module a method loss(outputs, targets)."
        )
    ignored = _ignored_label(targets)
    losses = []
    for weight, scores in _weighted(outputs):
        scores = _at_labels(scores, targets)
        loss = cross_entropy(scores, targets, ignore_index=ignored, label_smoothing=label_smoothing)
        losses.append(weight * loss)
    first, *auxiliary = losses
    return sum(auxiliary, start=first)


def correct(outputs: Any, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of correctly predicted targets and the number of all targets.

    Void pixels do not count. Both counts stay on the device, so the host does not wait. Sessions
    use it for validation.
    """
    counted = targets != _ignored_label(targets)
    right = (_at_labels(main_output(outputs), targets).argmax(1) == targets) & counted
    return right.sum(), counted.sum()


def _at_labels(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return scores resized to the labels' height and width.

    Some models segment at a quarter of it.
    """
    size = targets.shape[1:]
    if len(size) != 2 or scores.shape[2:] == size:
        return scores
    return interpolate(scores, size=size, mode="bilinear", align_corners=False)


def _ignored_label(targets: torch.Tensor) -> int:
    """Return the void label for pixels, or torch's default of -100.

    Only pixels can be void, since 255 may be an image's class.
    """
    return VOID if targets.ndim == 3 else -100


def _weighted(outputs: Any) -> Iterator[tuple[float, torch.Tensor]]:
    """Yield each output with class scores and its weight in the loss, the main output first.

    The forms are torch's and torchvision's, see `weighted_cross_entropy`. Raises `UserError` for
    others.
    """
    if isinstance(outputs, torch.Tensor):
        yield 1.0, outputs
    elif isinstance(outputs, Mapping) and "out" in outputs:
        yield 1.0, outputs["out"]
        if "aux" in outputs:
            yield SEGMENTATION_AUXILIARY_WEIGHT, outputs["aux"]
    elif hasattr(outputs, "logits"):
        yield 1.0, outputs.logits
        for name in getattr(outputs, "_fields", ()):
            if name.startswith("aux_logits") and getattr(outputs, name) is not None:
                yield CLASSIFIER_AUXILIARY_WEIGHT, getattr(outputs, name)
    else:
        raise UserError(
            f"The model returns a {type(outputs).__name__}; its class scores are looked for in a "
            "tensor, a mapping "
            "with 'out', or a tuple with 'logits'. Infer with it, or give the module a method "
            "loss(outputs, targets)."
        )
