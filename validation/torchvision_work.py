"""MACs and parameters of torchvision's classification models, as perfexp counts them and as torchvision publishes them.

    python validation/torchvision_work.py [NAME ...] [--train]

One line for each set of published weights (or for those whose name begins with a NAME): billions of MACs of one picture
of the size that the weights are evaluated at, ours and `meta["_ops"]`, their ratio, and parameters, ours and
`meta["num_params"]`. Nothing is downloaded and nothing runs: models are built without their initial numbers.

`*` marks what differs by more than 1 % and, as `_ops` is rounded to 0.001, by more than the rounding. With torchvision
0.28 nothing does: all 115 agree to the last digit that is published, and in parameters exactly. shufflenet_v2_x0_5
alone has a ratio beyond 1 %, because its 0.0405 is published as 0.040. With `--train` the backward pass is counted too,
and FLOPs of both passes are printed over those of the forward pass.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from perfexp.cost.count import count
from perfexp.models.torchvision_import import import_torchvision
from tests.support.published_models import ROUNDING, TOLERANCE, build, size_of


def published(models: Any, beginnings: list[str]) -> Iterator[tuple[str, Any]]:
    """Names of classification models with each of their sets of weights."""
    for name in models.list_models(module=models):
        if not beginnings or name.startswith(tuple(beginnings)):
            yield from ((name, weights) for weights in models.get_model_weights(name))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--train", action="store_true")
    arguments = parser.parse_args()
    models = import_torchvision().models
    compared, digits, different, uncounted = 0, 0, [], set()
    print(
        f"{'model and weights':<44} {'size':>4} {'GMACs':>9} {'theirs':>9} {'ratio':>7} "
        f"{'parameters':>11} {'theirs':>11}"
    )
    for name, weights in published(models, arguments.names):
        size = size_of(weights)
        work = count(
            build(models, name, size), torch.Size((1, 3, size, size)), backward=arguments.train
        )
        ours, theirs = work.macs * 1e-9, weights.meta["_ops"]
        parameters = weights.meta["num_params"]
        agrees = (
            abs(ours - theirs) <= max(TOLERANCE * theirs, ROUNDING)
            and abs(work.parameters - parameters) <= TOLERANCE * parameters
        )
        compared += 1
        digits += round(ours, 3) == theirs and work.parameters == parameters
        uncounted.update(work.uncounted)
        if not agrees:
            different.append(f"{name}.{weights.name}")
        passes = f" {work.flops_model / work.flops:6.3f}" if arguments.train else ""
        print(
            f"{name + '.' + weights.name:<44} {size:>4} {ours:>9.3f} {theirs:>9.3f} {ours / theirs:>7.4f} "
            f"{work.parameters:>11} {parameters:>11}{passes}{'' if agrees else ' *'}"
        )
    print(
        f"{compared} sets of weights, {digits} equal to the last digit, {len(different)} differ"
        f"{': ' if different else ''}{', '.join(different)}"
    )
    print(f"operators that were not counted: {', '.join(sorted(uncounted)) or 'none'}")


if __name__ == "__main__":
    main()
