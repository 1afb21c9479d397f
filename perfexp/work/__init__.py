"""How much a call of a model computes and moves, layer by layer, counted without running it.

`perfexp.work.count.count` counts on meta tensors, which have a shape and no memory; its results are described here,
without torch. Conventions:
* **MACs** are multiplications of a contraction (convolution, matrix product, attention, recurrence) by its definition,
  including those with a convolution's zero padding, whatever an algorithm saves. Adding a bias is free.
* **FLOPs** are 2 per MAC. All other operators have 0 MACs and FLOPs by the table of `perfexp.work.costs` (1 per output
  of an elementwise operator, …); moving, comparing and looking up numbers is free. FLOPs do not depend on the precision
  or the algorithm.
* **Complex numbers** count by their real parts: a multiply-accumulate is 4 MACs, hence 8 FLOPs; see also
  `perfexp.work.costs`. A convolution that torch computes by three real ones counts by its definition, too.
* **Bytes** are the least that a row can move: external inputs read once and external outputs written once, in their
  data types. Intermediates within a row, and views, move nothing.
* **Backward**: the gradient of each operand of a product takes as many FLOPs as the product, exactly so for
  convolutions of any groups, stride and dilation. For other operators, by convention, the gradient of the inputs takes
  as many FLOPs as the forward pass, and that of the parameters again as many. Only nodes that a loss on the model's
  outputs reaches are counted, without recomputation inside kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

Shape = tuple[int, ...]
#: Autograd's node that accumulates a parameter's gradient; it has no sequence number.
ACCUMULATE = "AccumulateGrad"


class Inconclusive(Exception):
    """Raised where the work of a module cannot be counted."""


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """A convolution of any number of dimensions, with its operator's arguments.

    `padding` is the zeros on each side, without those that a separate operator adds (`padding="same"`, other modes).
    """

    in_channels: int
    out_channels: int
    kernel: Shape
    stride: Shape
    padding: Shape
    dilation: Shape
    groups: int = 1
    transposed: bool = False


@dataclass(frozen=True, kw_only=True)
class Row:
    """One call of a module, or one functional operation in a call of a module.

    Attributes:
        path: dotted path, by its first name, of the module or of the one whose code called the operation.
        call: index of the module's call. A module with two names is one module.
        operation: index of the operation in that call; None for a module.
        kind: class of the module, or name of the operation without underscores (`conv2d`, `add`, `flatten`).
        input_gradient_flops: FLOPs of gradients with respect to the model's inputs; None without a backward pass.
        weight_gradient_flops: FLOPs of gradients of parameters, and of values computed from parameters alone.
        bytes_min: least bytes read and written in the forward pass.
        activation_bytes: bytes of new outputs; in-place changes add nothing.
        parameters: elements of the parameters that this row is the first to read.
        inputs: shapes of the input tensors, without parameters and buffers.
        convolution: geometry of its only convolution; None for none or several.
    """

    path: str
    call: int
    operation: int | None
    kind: str
    macs: int
    flops: int
    input_gradient_flops: int | None
    weight_gradient_flops: int | None
    bytes_min: int
    activation_bytes: int
    parameters: int
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    convolution: Geometry | None = None

    @property
    def backward_flops(self) -> int | None:
        """FLOPs of both gradients; None without a backward pass."""
        if self.input_gradient_flops is None or self.weight_gradient_flops is None:
            return None
        return self.input_gradient_flops + self.weight_gradient_flops

    @property
    def contraction_flops(self) -> int:
        """FLOPs of the contractions, forward and backward: two per multiply-accumulate, and as many for each gradient.

        A row with trained parameters has two gradients, also the first one, whose inputs need none: that is the
        definition of 6 FLOPs per multiply-accumulate of a training step. Otherwise its inputs have one or two, as in
        attention.
        """
        gradients = (
            2
            if self.weight_gradient_flops
            else (self.input_gradient_flops or 0) // (2 * self.macs or 1)
        )
        return 2 * self.macs * (1 + min(gradients, 2))

    @property
    def arithmetic_intensity(self) -> float | None:
        """FLOPs per byte of the forward pass; None where nothing is moved."""
        return self.flops / self.bytes_min if self.bytes_min else None


@dataclass(frozen=True, kw_only=True)
class Work:
    """Work of one call of a model.

    Attributes:
        rows: rows in order of execution; together they are the whole call, without overlap.
        parameters: elements of all parameters of the model, shared ones once, whether the call reads them or not.
        uncounted: operators of unknown work, which the totals lack; after `backward of` where only that is unknown.
        is_random: whether rows differ from call to call, because the model's code draws random numbers on the host.
    """

    rows: tuple[Row, ...]
    parameters: int
    backward: bool
    uncounted: tuple[str, ...]
    is_random: bool = False

    @property
    def macs(self) -> int:
        """Multiply-accumulates of the forward pass."""
        return sum(row.macs for row in self.rows)

    @property
    def flops(self) -> int:
        """FLOPs of the forward pass."""
        return sum(row.flops for row in self.rows)

    @property
    def backward_flops(self) -> int | None:
        """FLOPs of the backward pass; None if it is not counted."""
        return sum(row.backward_flops or 0 for row in self.rows) if self.backward else None

    @property
    def flops_model(self) -> int:
        """FLOPs of the counted passes, whatever algorithm and precision compute them."""
        return self.flops + (self.backward_flops or 0)

    @property
    def contraction_flops(self) -> int:
        """FLOPs of the contractions of the counted passes."""
        return sum(row.contraction_flops if self.backward else 2 * row.macs for row in self.rows)

    @property
    def convolution_flops(self) -> int:
        """The part of `contraction_flops` in convolutions."""
        return sum(
            row.contraction_flops if self.backward else 2 * row.macs
            for row in self.rows
            if row.convolution
        )

    @property
    def bytes_min(self) -> int:
        """Least bytes that the rows of the forward pass read and write, each by itself."""
        return sum(row.bytes_min for row in self.rows)

    @property
    def activation_bytes(self) -> int:
        """Bytes of all rows' outputs, about the memory of activations for the backward pass."""
        return sum(row.activation_bytes for row in self.rows)
