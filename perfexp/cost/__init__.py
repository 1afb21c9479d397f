"""Cost: how much a model call computes and moves, layer by layer, without running it.

May import: host.
Used by: convolution, measuring, models, worker.

`perfexp.cost.count.count` runs a model's code on torch's fake tensors (here: *stand-ins*), which
have a shape and a data type and no memory. It returns a `Work` with one `WorkRow` per layer. This
module defines these results, without torch. Conventions:

* **MACs** are the multiplications of a contraction (convolution, matrix product, attention,
recurrence) by its definition, whatever an algorithm saves. Multiplications with a convolution's
zero padding count. Adding a bias is free.
* **FLOPs** are 2 per MAC. All other operators have 0 MACs, and FLOPs by the table in
`perfexp.cost.formulas` (for example 1 per output of an elementwise operator). Moving, comparing and
looking up numbers is free. FLOPs do not depend on precision or algorithm.
* **Complex numbers** count by their real parts: a multiply-accumulate is 4 MACs, hence 8 FLOPs (see
`perfexp.cost.formulas`). This also holds for convolutions that torch computes by three real
convolutions.
* **Bytes** are the minimum that a row can move: external inputs read once and external outputs
written once, in their data types. Intermediates within a row, and views, move nothing.
* **Backward**: each operand's gradient of a product takes as many FLOPs as the product. This is
exact for convolutions with any groups, stride and dilation. For other operators, by convention,
input gradients and parameter gradients each take as many FLOPs as the forward pass. Only nodes that
a loss on the model's outputs reaches are counted, without recomputation inside kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

Shape = tuple[int, ...]
#: Autograd's node that accumulates a parameter's gradient; it has no sequence number.
ACCUMULATE = "AccumulateGrad"


class Inconclusive(Exception):
    """Raised if a module's work cannot be counted, for example if it depends on input values."""


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """A convolution's channels, and its kernel, stride, padding and dilation by dimension.

    `padding` counts zeros on each side. Zeros added by a separate operator (`padding="same"`, other
    modes) are not included.
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
class WorkRow:
    """The work of one module call, or of one functional operation (e.g. `x + y`).

    Attributes:
        path: dotted path (its first name) of the module, or of the module with the operation in its
            code.
        call: index of the module's call. A module with two names is a single module.
        operation: index of the operation in that call; None for a module.
        kind: module class, or operation name without underscores, for example `conv2d` or `add`.
        macs: multiply-accumulates in the forward pass.
        flops: FLOPs in the forward pass.
        input_gradient_flops: FLOPs for gradients with respect to the model's inputs; None without a
            backward pass.
        weight_gradient_flops: FLOPs for gradients with respect to parameters and values computed
            from them alone.
        bytes_min: minimum bytes read and written in the forward pass.
        activation_bytes: bytes in new outputs; in-place changes add nothing.
        parameters: elements of parameters that no earlier row has read.
        inputs: input tensor shapes, without parameters and buffers.
        outputs: output tensor shapes.
        convolution: geometry of the row's only convolution; None for none or several.
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
        """Return the FLOPs of both gradients; None without a backward pass."""
        if self.input_gradient_flops is None or self.weight_gradient_flops is None:
            return None
        return self.input_gradient_flops + self.weight_gradient_flops

    @property
    def contraction_flops(self) -> int:
        """Return the forward and backward FLOPs of contractions.

        They are two per multiply-accumulate, and as many for each gradient. A row with trained
        parameters has two gradients. This includes the first row, although its inputs need none: a
        training step has 6 FLOPs per multiply-accumulate by definition. Other rows have a gradient
        for each input that needs it, up to two (e.g. in attention). Rates of tensor cores are
        computed from it (`measuring.probes.work_rates`).
        """
        gradients = 2
        if not self.weight_gradient_flops:
            gradients = (self.input_gradient_flops or 0) // (2 * self.macs or 1)
        return 2 * self.macs * (1 + min(gradients, 2))

    @property
    def arithmetic_intensity(self) -> float | None:
        """Return the FLOPs per byte in the forward pass; None if nothing is moved."""
        if self.bytes_min:
            return self.flops / self.bytes_min
        return None


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of a model call: its rows and their sums.

    Attributes:
        rows: rows in execution order; together they are the whole call, without overlap.
        parameters: elements of all model parameters, read or not; shared parameters count once.
        backward: whether the backward pass is counted, too.
        uncounted: operators with unknown work, which is missing in the totals. The prefix `backward
            of` means that only their backward pass is unknown.
        is_random: whether rows differ from call to call, because the model draws random numbers on
            the host.
    """

    rows: tuple[WorkRow, ...]
    parameters: int
    backward: bool
    uncounted: tuple[str, ...]
    is_random: bool = False

    @property
    def macs(self) -> int:
        """Return the multiply-accumulates in the forward pass."""
        return sum(row.macs for row in self.rows)

    @property
    def flops(self) -> int:
        """Return the FLOPs in the forward pass."""
        return sum(row.flops for row in self.rows)

    @property
    def backward_flops(self) -> int | None:
        """Return the FLOPs in the backward pass; None if it is not counted."""
        if self.backward:
            return sum(row.backward_flops or 0 for row in self.rows)
        return None

    @property
    def flops_model(self) -> int:
        """Return the FLOPs of the counted passes, independent of algorithm and precision."""
        return self.flops + (self.backward_flops or 0)

    @property
    def contraction_flops(self) -> int:
        """Return the FLOPs of contractions in the counted passes."""
        return sum(row.contraction_flops if self.backward else 2 * row.macs for row in self.rows)

    @property
    def convolution_flops(self) -> int:
        """Return the part of `contraction_flops` in convolutions.

        Rates by kind of operation need it.
        """
        return sum(
            row.contraction_flops if self.backward else 2 * row.macs
            for row in self.rows
            if row.convolution
        )

    @property
    def bytes_min(self) -> int:
        """Return the minimum bytes that the forward rows read and write, each row on its own."""
        return sum(row.bytes_min for row in self.rows)

    @property
    def activation_bytes(self) -> int:
        """Return the bytes of all row outputs, about the activation memory for backward."""
        return sum(row.activation_bytes for row in self.rows)
