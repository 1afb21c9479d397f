"""How far the portable convolution algorithms are from a float64 reference: the largest relative L2 errors seen.

    python validation/convolution_errors.py [--shapes 100] [--seed 0] [--device cpu]

Random shapes (kernels, strides, dilations, paddings, groups), inputs and weights normally distributed; each algorithm
on those that it supports. The reference is `torch.nn.functional.conv2d` in float64 on the same numbers. A line for each
algorithm and data type: outputs and the gradients of inputs, weights and bias.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict

import torch
from torch.nn.functional import conv2d as conv2d_of_torch

from perfexp.convolution.portable.algorithms import ALGORITHMS
from perfexp.convolution.portable.geometry import Convolution

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
KINDS = ("outputs", "inputs'", "weights'", "bias'")


def shapes(
    generator: random.Random,
) -> tuple[tuple[int, int, int, int], tuple[int, ...], dict[str, object]]:
    """Shape of inputs and weights, and the other arguments of a convolution."""
    groups = generator.choice((1, 1, 1, 2, 4))
    in_group, out_group = generator.choice((1, 3, 16, 32)), generator.choice((1, 4, 8))
    kernel = generator.choice(((3, 3), (3, 3), (3, 3), (1, 1), (5, 5), (7, 7), (1, 3)))
    stride = generator.choice(((1, 1), (1, 1), (1, 1), (2, 2), (2, 1)))
    dilation = generator.choice(((1, 1), (1, 1), (1, 1), (2, 2)))
    padding = generator.choice((0, 1, (2, 0), *(("same",) if stride == (1, 1) else ())))
    size = (
        generator.randint(1, 2),
        groups * in_group,
        generator.randint(14, 40),
        generator.randint(14, 40),
    )
    settings = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return size, (groups * out_group, in_group, *kernel), settings


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    generator = random.Random(arguments.seed)
    torch.manual_seed(arguments.seed)
    worst, counts = defaultdict(lambda: [0.0] * len(KINDS)), defaultdict(int)
    for number in range(arguments.shapes):
        size, weight_shape, settings = shapes(generator)
        convolution = Convolution.of(weight_shape, **settings)
        exact = [torch.randn(shape) for shape in (size, weight_shape, weight_shape[:1])]
        for dtype in DTYPES:
            tensors = [tensor.to(arguments.device, dtype) for tensor in exact]
            for name, errors in errors_of(convolution, tensors, settings, number):
                worst[name, dtype] = list(map(max, worst[name, dtype], errors))
                counts[name, dtype] += 1
    print(
        f"{'algorithm':<22} {'data type':<9} {'shapes':>6} "
        + " ".join(f"{kind:>9}" for kind in KINDS)
    )
    for name in ALGORITHMS:
        for dtype in DTYPES:
            if counts[name, dtype]:
                errors = " ".join(f"{error:9.1e}" for error in worst[name, dtype])
                print(
                    f"{name:<22} {str(dtype).removeprefix('torch.'):<9} {counts[name, dtype]:>6} {errors}"
                )


def errors_of(convolution, tensors, settings, seed):
    """Names of the algorithms that support a convolution, with the errors of outputs and gradients."""
    dtype = tensors[0].dtype
    doubles = [tensor.double() for tensor in tensors]
    outputs = conv2d_of_torch(*tensors, **settings)
    gradient = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(seed)).to(outputs)
    truth = results(lambda *leaves: conv2d_of_torch(*leaves, **settings), doubles, gradient)
    for name, algorithm in ALGORITHMS.items():
        if algorithm.supports(convolution, dtype) is None:
            found = results(
                lambda *leaves, run=algorithm.run: run(convolution, *leaves), tensors, gradient
            )
            pairs = zip(found, truth, strict=True)
            yield name, [float((ours - theirs).norm() / theirs.norm()) for ours, theirs in pairs]


def results(compute, tensors, gradient) -> list[torch.Tensor]:
    """Outputs and gradients of a convolution, in float64."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    outputs = compute(*leaves)
    outputs.backward(gradient.to(outputs.dtype))
    return [tensor.detach().double() for tensor in (outputs, *(leaf.grad for leaf in leaves))]


if __name__ == "__main__":
    main()
