"""Whether `algorithm.verify=true` finds out a binding whose codes are swapped, on the first CUDA device.

    python validation/swapped_codes.py

For every pass and every two of cuDNN's algorithms: a few convolutions, forward and backward, by each of the two with
the table of codes as it is, and with their codes swapped; in float32 (TF32 off) and float16. A swap is found out where
fewer passes by one of the two are `ok` than without it. A line for each pair, with the passes that are `ok`; the exit
code is 1 if a pair is not found out of which one is `ok` at all, swapped or not.
"""

from __future__ import annotations

import sys
from collections import Counter
from itertools import combinations
from types import SimpleNamespace

import torch
from torch import nn

from perfexp.convolution import convolution_plan as plans
from perfexp.convolution.coverage import Pass
from perfexp.convolution.cudnn import CODES
from perfexp.convolution.forced import Forced
from perfexp.errors import PerfexpError

DATA_TYPES = (torch.float32, torch.float16)
#: Passes that are `ok`, of those by an algorithm.
Outcome = Counter[str]


def model(dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor]:
    """Convolutions of several kinds, and what they take."""
    layers = nn.Sequential(
        nn.Conv2d(64, 64, 3, padding=1),
        nn.Conv2d(64, 64, 5, padding=2),
        nn.Conv2d(64, 128, 1),
        nn.Conv2d(128, 64, 3),
    )
    return layers.to("cuda", dtype), torch.randn(
        16, 64, 28, 28, device="cuda", dtype=dtype, requires_grad=True
    )


def outcome(which: Pass, name: str) -> Outcome:
    """How many passes by an algorithm ended how."""
    backward = {} if which is Pass.forward else {which.value: name}
    found: Outcome = Counter()
    for dtype in DATA_TYPES:
        layers, inputs = model(dtype)
        algorithm = Forced(
            name=name if which is Pass.forward else "gemm", backend="cudnn", verify=True, **backward
        )
        plans._plans.clear()
        try:
            with algorithm.applied(SimpleNamespace(module=layers)):

                def step(layers: nn.Module = layers, inputs: torch.Tensor = inputs) -> None:
                    layers(inputs).float().sum().backward()

                step()
                algorithm.prove(step)
            report = algorithm.report()
        except PerfexpError as error:  # no layer supports it
            found[type(error).__name__] += 1
            continue
        assert report is not None
        found.update(
            each.status.value
            for layer in report.layers
            for each in layer.passes
            if each.which is which
        )
    return found


def main() -> None:
    """Print the table."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    missed, pairs = 0, 0
    print("| pass | pair | ok, as it is | ok, swapped | found out |\n|---|---|---:|---:|---|")
    for which in CODES:
        right = {name: outcome(which, name) for name in CODES[which]}
        for one, other in combinations(CODES[which], 2):
            codes = CODES[which]
            codes[one], codes[other] = codes[other], codes[one]
            swapped = outcome(which, one)["ok"], outcome(which, other)["ok"]
            codes[one], codes[other] = codes[other], codes[one]
            before = right[one]["ok"], right[other]["ok"]
            fewer = any(now < then for now, then in zip(swapped, before, strict=True))
            verdict = "yes" if fewer else "NO" if any((*before, *swapped)) else "neither is ok"
            missed, pairs = missed + (verdict == "NO"), pairs + 1
            cells = (
                which.value,
                f"{one}, {other}",
                "{} + {}".format(*before),
                "{} + {}".format(*swapped),
                verdict,
            )
            print(f"| {' | '.join(cells)} |", flush=True)
    print(f"\n{pairs} pairs, {missed} not found out")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
