"""How many passes by a cuDNN algorithm `algorithm.verify=true` can judge, on the first CUDA device.

    python validation/proven_passes.py [--models alexnet …] [--seconds 300] [--json FILE]

One training step of each model in float32 (TF32 off) and float16, with every forward algorithm, and with every pair of
backward algorithms. The models after the first six were not used to learn the shipped table. A line for each model and
data type: passes by status, and the share of those handed to cuDNN that are judged; then every kernel that is unknown.
The last line says which table judged.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch import nn

from perfexp.convolution import families
from perfexp.convolution.coverage import LayerStatus, Pass
from perfexp.convolution.cudnn import CODES
from perfexp.convolution.forced import Forced
from perfexp.convolution.portable.geometry import clear_constants
from perfexp.cost.tensors import tensors_in
from perfexp.errors import PerfexpError
from perfexp.models.torchvision_import import import_torchvision

MODELS = [
    *("alexnet", "vgg16", "googlenet", "resnet50", "densenet121", "resnet152"),
    *("wide_resnet50_2", "inception_v3", "regnet_y_800mf", "squeezenet1_1"),
]
DATA_TYPES = (torch.float32, torch.float16)
#: Status of passes that verification has judged.
JUDGED = (LayerStatus.ok, LayerStatus.substituted, LayerStatus.fallback)
BATCH = 16


def named(name: str, dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor]:
    """A model in training mode and a batch."""
    torchvision = import_torchvision()

    torch.manual_seed(0)
    keywords = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    model = torchvision.models.get_model(name, weights=None, **keywords).to("cuda", dtype)
    size = 299 if name == "inception_v3" else 224
    return model, torch.randn(BATCH, 3, size, size, device="cuda", dtype=dtype, requires_grad=True)


def choices() -> list[dict[str, str]]:
    """Arguments of `Forced`: each forward algorithm with the default backward ones, then each backward pair."""
    forward = [{"name": name} for name in CODES[Pass.forward]]
    pairs = zip_longest(CODES[Pass.backward_data], CODES[Pass.backward_filter], fillvalue="algo_1")
    return forward + [
        {"name": "implicit_gemm", "backward_data": data, "backward_filter": filt}
        for data, filt in pairs
    ]


def outcome(
    model: nn.Module, inputs: torch.Tensor, choice: dict[str, str]
) -> tuple[Counter[str], Counter[str]]:
    """Passes by status, and reasons of those that could not be judged."""
    found: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    algorithm = Forced(backend="cudnn", verify=True, **choice)

    def step() -> None:
        sum(one.float().sum() for one in tensors_in(model(inputs))).backward()
        model.zero_grad()

    try:
        with algorithm.applied(SimpleNamespace(module=model)):
            step()
            algorithm.prove(step)
            report = algorithm.report()
    except PerfexpError as error:  # no layer supports it
        found[type(error).__name__] += 1
        return found, reasons
    for layer in report.layers:
        for each in layer.passes:
            found[each.status.value] += 1
            if each.status not in JUDGED:
                kernels = ", ".join(each.kernels)[:150]
                reasons[
                    f"{each.which.value} {each.selected} of {layer.name}: {each.reason} ({kernels})"
                ] += 1
    return found, reasons


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument(
        "--seconds", type=float, default=300.0, help="begin no further model after this time"
    )
    parser.add_argument("--json", type=Path)
    settings = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    begun, rows, reasons = time.monotonic(), [], Counter()
    for name in settings.models:
        for dtype in DATA_TYPES:
            if time.monotonic() - begun > settings.seconds:
                print(f"{name} {dtype}: left out, no time")
                continue
            model, inputs = named(name, dtype)
            found: Counter[str] = Counter()
            for choice in choices():
                statuses, unjudged = outcome(model, inputs, choice)
                found, reasons = found + statuses, reasons + unjudged
            clear_constants()
            judged, passes = (
                sum(found[status.value] for status in some) for some in (JUDGED, LayerStatus)
            )
            kind = str(dtype).removeprefix("torch.")
            rows.append({"model": name, "type": kind, **found})
            print(
                f"{name:16} {kind:8} {judged} of {passes} = {judged / max(passes, 1):.2%} {dict(found)}",
                flush=True,
            )
            del model, inputs
            torch.cuda.empty_cache()
    for reason, count in reasons.most_common(30):
        print(f"{count:5} {reason}")
    table = families.current()
    print(f"{time.monotonic() - begun:.0f} s; judged by: {table.seen}")
    if settings.json:
        settings.json.write_text(
            json.dumps({"table": table.seen, "rows": rows, "reasons": reasons}, indent=1)
        )


if __name__ == "__main__":
    main()
