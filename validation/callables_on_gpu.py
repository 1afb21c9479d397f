"""Two functions judged on the first CUDA device: kernels in Triton, equal sides, and cheats.

    python validation/callables_on_gpu.py [--json=FILE] [NAME …]

Each right side stands for what people write: a layer norm in Triton, perfexp's own direct convolution beside cuDNN,
the left function again, also with 100 µs more of the host's time, and six that do not compute what they claim. The last
must be NOT COMPARABLE, all others must get a verdict on their time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from perfexp.comparison.document import Verdict
from perfexp.run.callable_judge import compare_callables, lines

SECONDS = 60
INPUTS = """
import torch

def make(seed):
    return torch.randn(8192, 1024, device="cuda"), torch.randn(1024, device="cuda"), torch.randn(1024, device="cuda")

def make_images(seed):
    return torch.randn(32, 256, 28, 28, device="cuda"), torch.randn(256, 1, 5, 5, device="cuda")
"""
LEFT = """
import torch

def norm(x, weight, bias):
    return torch.nn.functional.layer_norm(x, (1024,), weight, bias)

def convolution(x, weight):
    return torch.nn.functional.conv2d(x, weight, padding=2, groups=256)
"""
TRITON = """
import torch, triton
import triton.language as tl

@triton.jit
def _norm(x, weight, bias, y, WIDTH: tl.constexpr, EPSILON: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * WIDTH
    columns = tl.arange(0, WIDTH)
    row = tl.load(x + start + columns)
    centered = row - tl.sum(row) / WIDTH
    scale = tl.rsqrt(tl.sum(centered * centered) / WIDTH + EPSILON)
    outputs = centered * scale * tl.load(weight + columns) + tl.load(bias + columns)
    tl.store(y + start + columns, outputs)

def norm(x, weight, bias):
    y = torch.empty_like(x)
    _norm[(len(x),)](x, weight, bias, y, 1024, 1e-5, num_warps=4)
    return y
"""
DIRECT = """
from perfexp.convolution import kernels
from perfexp.convolution.portable.geometry import Convolution

FORM = Convolution.of((256, 1, 5, 5), padding=2, groups=256)

def convolution(x, weight):
    return kernels.compute("direct", x, weight, FORM)
"""
SLOW_HOST = """
import time

def norm(x, weight, bias):
    end = time.perf_counter() + 1e-4
    while time.perf_counter() < end:
        pass
    return torch.nn.functional.layer_norm(x, (1024,), weight, bias)
"""
CHEATS = {
    "half precision": """
def norm(x, weight, bias):
    return torch.nn.functional.layer_norm(x.half(), (1024,), weight.half(), bias.half()).float()
""",
    "another stream": """
stream = torch.cuda.Stream()
def norm(x, weight, bias):
    with torch.cuda.stream(stream):
        return torch.nn.functional.layer_norm(x, (1024,), weight, bias)
""",
    "a stream without a join": """
stream = torch.cuda.Stream()
def norm(x, weight, bias):
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        return torch.nn.functional.layer_norm(x, (1024,), weight, bias)
""",
    "results by address": """
known = {}
def norm(x, weight, bias):
    if x.data_ptr() not in known:
        known[x.data_ptr()] = torch.nn.functional.layer_norm(x, (1024,), weight, bias)
    return known[x.data_ptr()]
""",
    "unwritten memory": """
def norm(x, weight, bias):
    return torch.empty_like(x)
""",
    "patched events": """
torch.cuda.Event.elapsed_time = lambda self, other: 1e-3
def norm(x, weight, bias):
    return torch.nn.functional.layer_norm(x, (1024,), weight, bias)
""",
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found, wrong = [], []
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name, (function, maker) in sides().items():
            if arguments.names and name not in arguments.names:
                continue
            begun = time.monotonic()
            compared = compare_callables(
                f"left.py:{function}",
                f"{file_of(name)}:{function}",
                f"inputs.py:{maker}",
                max_seconds=SECONDS,
            )
            seconds = time.monotonic() - begun
            is_refused = compared.verdict is Verdict.NOT_COMPARABLE
            if is_refused != (name in CHEATS):
                wrong.append(name)
            print(f"{name}, {seconds:.0f} s: {lines(compared)[2:]} {compared.seconds}", flush=True)
            ratio = compared.ratio and [
                compared.ratio.value,
                compared.ratio.low,
                compared.ratio.high,
            ]
            found.append(
                {"name": name, "word": compared.word, "seconds": compared.seconds, "ratio": ratio}
                | {"pairs": compared.pairs, "reason": compared.reason, "judged_in_seconds": seconds}
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    print("wrong:", ", ".join(wrong) or "none")
    return int(bool(wrong))


def file_of(name: str) -> str:
    return f"{name.replace(' ', '_')}.py"


def sides() -> dict[str, tuple[str, str]]:
    """Write all files into the current folder; return function and maker for each name of a right side."""
    texts = {"triton layer norm": TRITON, "direct convolution": DIRECT, "equal": LEFT}
    texts["slow host"] = f"import torch\n{SLOW_HOST}"
    texts |= {name: f"import torch\n{text}" for name, text in CHEATS.items()}
    for name, text in {"left": LEFT, "inputs": INPUTS, **texts}.items():
        Path(file_of(name)).write_text(text)
    convolution = {"direct convolution": ("convolution", "make_images")}
    return {name: convolution.get(name, ("norm", "make")) for name in texts}


if __name__ == "__main__":
    sys.exit(main())
