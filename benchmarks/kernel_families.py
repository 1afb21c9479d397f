"""Learn which kernels cuDNN runs for which algorithm, on the first CUDA device.

    python benchmarks/kernel_families.py [--seconds 120] [--out perfexp/algorithms/families.json] [--seen FILE]

Every algorithm of every pass computes every distinct convolution of a few models (batch 16, 224 × 224) and some others,
one call at a time between markers in the queue, in float32 with and without TF32, in float16, and in float16 NHWC. The
codes are those of NVIDIA's headers, not perfexp's table of them, so that a mistake in that table is not learnt. The
file counts in how many calls of each algorithm each kernel's bare name was seen; FILE gets the sets of names seen
together, which the tests read.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchvision

from perfexp.algorithms import proof
from perfexp.algorithms.convolution_plan import Plan, Shape
from perfexp.algorithms.coverage import Pass
from perfexp.algorithms.cudnn import CODES, CudnnError, Math
from perfexp.algorithms.families import bare

MODELS = ("vgg16", "alexnet", "resnet50", "googlenet", "densenet121", "resnet152")
#: cudnnConvolutionFwdAlgo_t, cudnnConvolutionBwdDataAlgo_t and cudnnConvolutionBwdFilterAlgo_t of NVIDIA's headers.
ENUMERATED = {
    Pass.forward: [
        *("implicit_gemm", "implicit_precomp_gemm", "gemm", "direct", "fft", "fft_tiling", "winograd"),
        "winograd_nonfused",
    ],
    Pass.backward_data: ["algo_0", "algo_1", "fft", "fft_tiling", "winograd", "winograd_nonfused"],
    Pass.backward_filter: ["algo_0", "algo_1", "fft", "algo_3", "winograd", "winograd_nonfused", "fft_tiling"],
}
VARIANTS = (
    (torch.float32, False, Math.fma),
    (torch.float32, False, Math.default),
    (torch.float16, False, Math.tensor_op),
    (torch.float16, True, Math.tensor_op),
)
#: A workspace beyond this is not asked for.
MOST_BYTES = 30 * 2**30

Geometry = tuple[tuple[int, ...], tuple[int, ...], tuple[int, int], tuple[int, int], tuple[int, int], int]


def others() -> list[Geometry]:
    """Convolutions of the kinds that the models lack."""

    def of(x: tuple[int, ...], w: tuple[int, ...], stride: int, padding: int, dilation: int, groups: int) -> Geometry:
        return x, w, (stride, stride), (padding, padding), (dilation, dilation), groups

    return [
        of((8, 128, 56, 56), (256, 128, 3, 3), 1, 1, 1, 1),
        of((16, 64, 28, 28), (64, 64, 3, 3), 1, 1, 1, 1),
        of((16, 32, 30, 30), (64, 32, 5, 5), 1, 2, 1, 1),
        of((8, 64, 56, 56), (64, 64, 3, 3), 2, 1, 1, 1),
        of((8, 64, 56, 56), (64, 1, 3, 3), 1, 1, 1, 64),
        of((8, 64, 56, 56), (64, 16, 3, 3), 1, 1, 1, 4),
        of((8, 64, 56, 56), (64, 64, 3, 3), 1, 2, 2, 1),
    ]


def of_model(name: str) -> list[Geometry]:
    """Distinct convolutions of one of torchvision's models."""
    found: dict[Geometry, None] = {}
    with torch.device("meta"):
        settings = {"init_weights": False} if name == "googlenet" else {}
        model = getattr(torchvision.models, name)(weights=None, **settings).eval()

    def seen(layer: torch.nn.Conv2d, inputs: Any, outputs: Any) -> None:
        shapes = tuple(inputs[0].shape), tuple(layer.weight.shape)
        found[(*shapes, layer.stride, layer.padding, layer.dilation, layer.groups)] = None

    for layer in model.modules():
        if isinstance(layer, torch.nn.Conv2d):
            layer.register_forward_hook(seen)
    model(torch.empty(16, 3, 224, 224, device="meta"))
    return list(found)


def calls_of(geometry: Geometry) -> list[tuple[Pass, str, partial[torch.Tensor]]]:
    """Every call that cuDNN takes, with its pass and algorithm."""
    inputs, weight, stride, padding, dilation, groups = geometry
    calls = []
    for dtype, last, math in VARIANTS:
        shape = Shape(inputs, weight, stride, padding, dilation, groups, dtype, last, math, 0)
        layout = torch.channels_last if last else torch.contiguous_format
        x, w, dy = (
            torch.randn(size, device="cuda").to(dtype, memory_format=layout) for size in (inputs, weight, shape.outputs)
        )
        reads = {Pass.forward: (x, w), Pass.backward_data: (w, dy), Pass.backward_filter: (x, dy)}
        for which, names in ENUMERATED.items():
            for code, name in enumerate(names):
                table = {number: known for known, number in CODES[which].items()}
                try:
                    plan = Plan(which, table[code], shape)
                    if plan.workspace_bytes <= MOST_BYTES:
                        plan(*reads[which])
                        calls.append((which, name, partial(plan, *reads[which])))
                except (CudnnError, torch.OutOfMemoryError):
                    continue
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120.0, help="begin no further convolution after this time")
    parser.add_argument("--out", type=Path, default=Path("perfexp/algorithms/families.json"))
    parser.add_argument("--seen", type=Path, help="where the sets of names go (tests/algorithms/kernels_seen.json)")
    settings = parser.parse_args()
    begun, done = time.monotonic(), 0
    counts: dict[str, dict[str, dict[str, Any]]] = {}
    sets: Counter[tuple[str, str, tuple[str, ...]]] = Counter()
    geometries = dict.fromkeys([*others(), *(each for model in MODELS for each in of_model(model))])
    for geometry in geometries:
        if time.monotonic() - begun > settings.seconds:
            break
        calls = calls_of(geometry)
        seen = proof.watch(lambda calls=calls: [call() for _, _, call in calls])
        for which, name, call in calls:
            entry = counts.setdefault(which.value, {}).setdefault(name, {"calls": 0, "kernels": Counter()})
            names = {bare(kernel) for kernel in seen.kernels[call.func]}
            entry["calls"] += 1
            entry["kernels"].update(names)
            sets[which.value, name, tuple(sorted(names))] += 1
        done += 1
        del calls, seen
        torch.cuda.empty_cache()
    where = f"{torch.cuda.get_device_name()}, cuDNN {torch.backends.cudnn.version()}, torch {torch.__version__}"
    text = f"{where}: {done} of {len(geometries)} convolutions"
    ordered = {
        which: {
            name: {**entry, "kernels": dict(sorted(entry["kernels"].items()))} for name, entry in sorted(each.items())
        }
        for which, each in counts.items()
    }
    settings.out.write_text(json.dumps({"seen": text, "counts": ordered}, indent=1) + "\n")
    if settings.seen:
        rows = [
            {"which": which, "algorithm": name, "kernels": kernels, "calls": calls}
            for (which, name, kernels), calls in sorted(sets.items())
        ]
        settings.seen.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    print(text)


if __name__ == "__main__":
    main()
