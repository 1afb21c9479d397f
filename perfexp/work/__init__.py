"""Work: how much a call of a model computes and moves, layer by layer, counted without running it.

`perfexp.work.count.count` counts, with stand-ins for tensors that have a shape and no memory; what it returns is
described here, free of torch. Conventions:

* **MACs** are multiplications of a contraction (convolution, matrix product, attention, recurrence) by its definition,
  those with a convolution's zeros around the inputs included, whatever an algorithm saves. Adding a bias is free.
* **FLOPs** are 2 for each MAC. Everything else has MACs 0 and FLOPs by the table of `perfexp.work.costs` (1 for each
  output of an elementwise operator, …); moving, comparing and looking up numbers is free. They do not depend on the
  precision or the algorithm.
* **Bytes** are the least that a row can move: what it reads from outside once, and what it writes for others once, in
  the data types at hand. Intermediates within a row, and views, move nothing.
* **Backward**: the gradient of each operand of a product takes as many FLOPs as the product, exactly so for
  convolutions of any groups, stride and dilation; of anything else the gradient of its inputs takes as many FLOPs as
  the forward pass, that of its parameters again as many, by convention. Only what a loss on the model's outputs reaches
  is counted, and nothing again that a kernel computes again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """A convolution of any number of dimensions, as its operator is told.

    Attributes:
        in_channels: C.
        out_channels: O.
        kernel: elements in each direction.
        stride: in each direction.
        padding: zeros on each side in each direction; those that `padding="same"` or another padding mode adds by an
            operator of its own are not among them.
        dilation: in each direction.
        groups: G.
        transposed: whether it is a transposed convolution.
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
        path: of the module, dotted, by the first of its names; '' for the model itself. Of an operation: of the module
            whose code called it.
        call: which of the module's calls, from 0. A module of two names is one module.
        operation: which of the operations of that call, from 0; None for a module.
        kind: class of the module, or name of the operation without underscores (`conv2d`, `add`, `flatten`).
        macs: multiply-accumulates of the forward pass.
        flops: of the forward pass.
        input_gradient_flops: of the gradient of what comes from the model's inputs; None if not asked for.
        weight_gradient_flops: of the gradient of parameters, and of what is computed from parameters alone; likewise.
        bytes_min: read and written in the forward pass at least.
        activation_bytes: outputs that did not exist before; what is changed in place adds nothing.
        parameters: elements of the parameters that it reads and no row before it read.
        inputs: shapes of the tensors that it was given, parameters and buffers aside.
        outputs: shapes of the tensors that it returned.
        convolution: of its one convolution; None if it has none, or several.
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
        """Of both gradients; None if not asked for."""
        if self.input_gradient_flops is None or self.weight_gradient_flops is None:
            return None
        return self.input_gradient_flops + self.weight_gradient_flops

    @property
    def arithmetic_intensity(self) -> float | None:
        """FLOPs per byte of the forward pass; None where nothing is moved."""
        return self.flops / self.bytes_min if self.bytes_min else None


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one call of a model takes.

    Attributes:
        rows: in the order in which they ran; together they are the whole call, and nothing is in two of them.
        parameters: elements of all parameters of the model, shared ones once, whether the call reads them or not.
        backward: whether the backward pass was asked for.
        uncounted: operators whose work is not known, with `backward of` before it where only that is missing. The
            totals are too small by theirs: a doubt, unless it is empty.
    """

    rows: tuple[Row, ...]
    parameters: int
    backward: bool
    uncounted: tuple[str, ...]

    def within(self, path: str) -> Iterator[Row]:
        """Rows of a module and of the modules inside it.

        Args:
            path: of the module, '' for the model itself.
        """
        return (row for row in self.rows if not path or row.path == path or row.path.startswith(f"{path}."))

    @property
    def macs(self) -> int:
        """Of the forward pass."""
        return self._sum(lambda row: row.macs)

    @property
    def flops(self) -> int:
        """Of the forward pass."""
        return self._sum(lambda row: row.flops)

    @property
    def backward_flops(self) -> int | None:
        """Of the backward pass; None if not asked for."""
        return self._sum(lambda row: row.backward_flops or 0) if self.backward else None

    @property
    def flops_model(self) -> int:
        """Of all that was asked for, forward or both passes, whatever algorithm and precision compute them."""
        return self.flops + (self.backward_flops or 0)

    @property
    def bytes_min(self) -> int:
        """That the rows of the forward pass read and write at least, each by itself."""
        return self._sum(lambda row: row.bytes_min)

    @property
    def activation_bytes(self) -> int:
        """Outputs of all rows: about what is kept for the backward pass."""
        return self._sum(lambda row: row.activation_bytes)

    @property
    def parameters_read(self) -> int:
        """Elements of the parameters that the call reads."""
        return self._sum(lambda row: row.parameters)

    def _sum(self, of: Callable[[Row], int]) -> int:
        return sum(map(of, self.rows))
