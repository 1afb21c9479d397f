"""Whether attention backends run as requested, and what `fastest` and applied plans gain, on a GPU.

    python validation/attention_backends.py [--only SHAPES,SWAPS,MODELS,PUBLIC,APPLY] [--models NAME,…]

Offline. Five tables; a part that fails prints its reason, and the exit code is 1.

* `SHAPES`: 12 shapes, forward and with backward, by each backend: milliseconds, and whether the
  kernels prove it.
* `SWAPS`: every two backends swapped in perfexp's table; each swap must be found out.
* `MODELS`: `execution.attention=fastest` against torch's choice on whole models, as CUDA graphs.
* `PUBLIC`: the cudnn backend beside cudnn-frontend's published H200 figures.
* `APPLY`: a plan in a script of its own, with its gain and the time of the second start.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from perfexp.convolution import attention
from perfexp.convolution.attention import AttentionBackends
from perfexp.devices.cuda import CudaDevice
from perfexp.errors import PerfexpError, Unsupported
from perfexp.measuring import baselines
from perfexp.models import Attention, cuda_graphs, hf
from perfexp.statistics.estimators import Interval

hf._make_masks_capturable()
transformers: Any = hf.transformers
Shape = tuple[int, int, int, int, int, bool, torch.dtype]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
#: batch, query heads, key-value heads, length, width, causal, data type.
SHAPES: dict[str, Shape] = {
    "ViT-B b64": (64, 12, 12, 197, 64, False, BF16),
    "ViT-B b64 fp32": (64, 12, 12, 197, 64, False, FP32),
    "ViT-B b64 fp16": (64, 12, 12, 197, 64, False, FP16),
    "Swin windows": (512, 3, 3, 49, 32, False, BF16),
    "Swin windows fp32": (512, 3, 3, 49, 32, False, FP32),
    "BERT b32": (32, 12, 12, 512, 64, False, BF16),
    "BERT b8 fp16": (8, 12, 12, 128, 64, False, FP16),
    "causal 4096": (1, 32, 32, 4096, 128, True, BF16),
    "causal 1024 fp32": (1, 16, 16, 1024, 64, True, FP32),
    "causal 2048 grouped": (1, 32, 8, 2048, 128, True, BF16),
    "wide 256": (4, 8, 8, 512, 256, False, BF16),
    "short 16": (256, 8, 8, 16, 64, False, BF16),
}
BACKENDS = ("flash", "efficient", "cudnn", "math")
IMAGES = (16, 3, 512, 512)
LLAMA = {"num_hidden_layers": 8, "hidden_size": 4096, "num_attention_heads": 32}
#: cudnn-frontend, llama3.1 on an H200, cuDNN 9.19.1: milliseconds forward and backward, by length.
PUBLIC = {2048: (0.142, 0.464), 4096: (0.465, 1.450), 8192: (1.708, 5.083)}
#: The published script sleeps ten times a pass after it.
PUBLIC_PAUSES = 10.0


class Encoder(nn.Module):
    """Layers of a transformer that call scaled_dot_product_attention, as BERT or GPT do."""

    def __init__(self, layers: int, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.parts = nn.ModuleList(
            nn.ModuleList(
                [
                    nn.LayerNorm(width),
                    nn.Linear(width, 3 * width),
                    nn.Linear(width, width),
                    nn.LayerNorm(width),
                    nn.Linear(width, 4 * width),
                    nn.Linear(4 * width, width),
                ]
            )
            for _ in range(layers)
        )

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values after all layers."""
        batch, length, width = values.shape
        for part in self.parts:
            before, joint, out, between, wide, narrow = part
            split = joint(before(values)).view(batch, length, 3, self.heads, -1)
            query, key, value = split.permute(2, 0, 3, 1, 4)
            mixed = scaled_dot_product_attention(query, key, value, is_causal=self.causal)
            values = values + out(mixed.transpose(1, 2).reshape(batch, length, width))
            values = values + narrow(nn.functional.gelu(wide(between(values))))
        return values


class Tokens(nn.Module):
    """The logits of an architecture of transformers with random weights."""

    def __init__(self, name: str, head: str, overrides: dict[str, int] | None = None) -> None:
        super().__init__()
        config = transformers.AutoConfig.for_model(name, use_cache=False, **(overrides or {}))
        auto = getattr(transformers, f"AutoModelFor{head}")
        self.model = auto.from_config(config, attn_implementation="sdpa")
        self.model.config.pad_token_id = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits of token ids or images."""
        logits: torch.Tensor = self.model(inputs).logits
        return logits


class Windows(nn.Module):
    """Attention in the windows of Swin-T's first stage; torchvision's own multiplies by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder(4, 96, 3, causal=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of all windows."""
        result: torch.Tensor = self.encoder(values)
        return result


def tensors_of(shape: Shape) -> list[torch.Tensor]:
    """Return query, key and value."""
    batch, heads, own, length, width, _, dtype = shape
    return [
        torch.randn(batch, count, length, width, device="cuda", dtype=dtype, requires_grad=True)
        for count in (heads, own, own)
    ]


def call_of(shape: Shape, *, backward: bool) -> Callable[[], Any]:
    """Return a call of attention, with its backward pass if requested."""
    tensors, is_grouped = tensors_of(shape), shape[1] != shape[2]
    outer = torch.randn(*shape[:2], shape[3], shape[4], device="cuda", dtype=shape[6])

    def run() -> Any:
        with torch.set_grad_enabled(backward):
            outputs = scaled_dot_product_attention(
                *tensors, is_causal=shape[5], enable_gqa=is_grouped
            )
        return torch.autograd.grad(outputs, tensors, outer) if backward else outputs

    return run


def milliseconds(call: Callable[[], Any], device: CudaDevice, *, pauses: float = 0.0) -> float:
    """Return the median time of a call as a CUDA graph.

    A long call runs once per sample: calls in a row bring the device to its power limit.

    Args:
        pauses: sleep after each sample, as a multiple of a call's time.
    """
    for _ in range(3):
        call()
    graph = cuda_graphs.captures(device)(call)
    times: list[float] = []
    for _ in range(16):
        repeats = 5 if not times or times[0] < 1 else 1
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(200_000)
        begin.record()
        for _ in range(repeats):
            graph()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / repeats)
        time.sleep(pauses * times[-1] / 1e3)
    return sorted(times)[len(times) // 2]


def proven(shape: Shape, backend: str, device: CudaDevice, *, timed: bool) -> tuple[str, float]:
    """Return the statuses of a backend's passes, and its time with backward if requested."""
    call = call_of(shape, backward=True)
    backends = AttentionBackends(Attention(backend), device, verify=True)
    with backends.applied():
        backends.begin_point()
        call()
        backends.report()
        backends.prove(call)
        [layer] = backends.report().layers
        statuses = "/".join(one.status.value for one in layer.passes)
        return statuses, milliseconds(call, device) if timed else 0.0


def shapes(device: CudaDevice) -> Iterator[str]:
    """Yield a row for each shape: times with proof, and torch's choice."""
    yield "| shape | torch's choice | " + " | ".join(BACKENDS) + " |"
    yield "|---|---|" + "---|" * len(BACKENDS)
    bad = 0
    for name, shape in SHAPES.items():
        cells = []
        with AttentionBackends(Attention.auto, device).applied() as recorded:
            call_of(shape, backward=True)()
            own = recorded.report().layers[0].used
        for backend in BACKENDS:
            try:
                statuses, both = proven(shape, backend, device, timed=True)
                with AttentionBackends(Attention(backend), device).applied() as forced:
                    call = call_of(shape, backward=False)
                    call()
                    forced.report()
                    forward = milliseconds(call, device)
                bad += statuses != "ok/ok"
                cells.append(f"{forward:.3f} / {both:.3f} {statuses}")
            except PerfexpError as error:
                cells.append(f"– {str(error).partition('(')[2][:90]}")
            except Exception as error:
                bad += 1
                cells.append(f"FAILED {type(error).__name__}: {str(error).splitlines()[0][:90]}")
        yield f"| {name} | {own} | " + " | ".join(cells) + " |"
    yield f"{bad} not proven or failed"
    if bad:
        raise AssertionError(f"{bad} backends not proven")


def swaps(device: CudaDevice) -> Iterator[str]:
    """Yield for each two backends whether a swapped table is found out, for all shapes."""
    missed = 0
    for one, other in combinations(BACKENDS, 2):
        table = attention.BACKENDS
        found, tried = 0, 0
        for shape in SHAPES.values():
            with suppress(PerfexpError):
                names = (one, other)
                if any(proven(shape, name, device, timed=False)[0] != "ok/ok" for name in names):
                    continue
                table[one], table[other] = table[other], table[one]
                refuses, attention.why_not = attention.why_not, lambda *_: None
                try:
                    tried += 1
                    found += "substituted" in proven(shape, one, device, timed=False)[0]
                finally:
                    attention.why_not = refuses
                    table[one], table[other] = table[other], table[one]
        missed += tried - found
        yield f"{one} ↔ {other}: found out in {found} of {tried} shapes"
    if missed:
        raise AssertionError(f"{missed} swaps not found out")


def gain_of(call: Callable[[], Any], device: CudaDevice) -> tuple[str, Interval]:
    """Return the chosen backends, and the speedup over torch's choice as CUDA graphs."""
    backends = AttentionBackends(Attention.fastest, device)
    with backends.applied():
        backends.begin_point()
        call()
        layers = backends.report().layers
        chosen = ", ".join(f"{one.used} ({one.name})" for one in layers)
        try:
            compared = baselines.compare(
                backends, call, device, lambda: cuda_graphs.captures(device)(call)
            )
        except Unsupported as error:
            print(f"(not captured: {error})")
            compared = baselines.compare(backends, call, device)
        assert compared is not None
        return chosen, compared.speedups["auto"]


def models(device: CudaDevice) -> Iterator[str]:
    """Yield the gain of `fastest` on whole models, inference and training in bf16."""
    from torchvision.models import swin_t, vit_b_16

    makers: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
        "ViT-B b64": (vit_b_16, (64, 3, 224, 224)),
        "Swin-T b64": (swin_t, (64, 3, 224, 224)),
        "Swin windows": (Windows, (4096, 49, 96)),
        "BERT b32 × 512": (lambda: Tokens("bert", "MaskedLM"), (32, 512)),
        "SegFormer-B0 512 b16": (lambda: Tokens("segformer", "SemanticSegmentation"), IMAGES),
        "Llama 8 layers 1 × 4096": (lambda: Tokens("llama", "CausalLM", LLAMA), (1, 4096)),
    }
    yield "| model | inference | training step |\n|---|---|---|"
    slower = []
    for name, (make, size) in makers.items():
        cells = []
        for training in (False, True):
            try:
                module = make().cuda().to(BF16).train(training)
                if len(size) == 2:
                    inputs = torch.randint(1000, size, device="cuda")
                else:
                    inputs = torch.randn(size, device="cuda", dtype=BF16)

                def call(
                    module: nn.Module = module,
                    inputs: torch.Tensor = inputs,
                    training: bool = training,
                ) -> Any:
                    with torch.set_grad_enabled(training):
                        outputs = module(inputs)
                        if training:
                            outputs.float().square().mean().backward()
                    return outputs

                chosen, ratio = gain_of(call, device)
                low, high = ratio.low or 0.0, ratio.high or 0.0
                cells.append(f"{ratio.value:.3f} × ({low:.3f} … {high:.3f}) {chosen[:80]}")
                if high < 0.99:
                    slower.append(name)
            except Exception as error:
                cells.append(f"{type(error).__name__}: {str(error).splitlines()[0][:100]}")
            torch.cuda.empty_cache()
        yield f"| {name} | " + " | ".join(cells) + " |"
    if slower:
        raise AssertionError(f"slower than auto by more than 1 %: {', '.join(slower)}")


def of_cudnn(shape: Shape, device: CudaDevice) -> tuple[float, float]:
    """Return the milliseconds of cudnn's forward and of its backward pass."""
    with AttentionBackends(Attention.cudnn, device).applied() as forced:
        alone, joint = (call_of(shape, backward=one) for one in (False, True))
        alone()
        joint()
        forced.report()
        own = milliseconds(alone, device, pauses=PUBLIC_PAUSES)
        return own, milliseconds(joint, device, pauses=PUBLIC_PAUSES) - own


def public(device: CudaDevice) -> Iterator[str]:
    """Yield the cudnn backend's times beside the published ones; 10 % is the bar."""
    off = 0
    for length, (forward, backward) in PUBLIC.items():
        try:
            own, own_backward = of_cudnn((1, 64, 8, length, 128, True, BF16), device)
        except Unsupported as error:
            yield f"{length}: grouped heads refused, expanded ones instead ({error})"
            own, own_backward = of_cudnn((1, 64, 64, length, 128, True, BF16), device)
        ratios = own / forward, own_backward / backward
        off += any(abs(ratio - 1) > 0.1 for ratio in ratios)
        yield (
            f"{length}: forward {own:.3f} ms ({ratios[0]:.2f} of published), "
            f"backward {own_backward:.3f} ms ({ratios[1]:.2f})"
        )
    if off:
        raise AssertionError(f"{off} lengths differ by more than 10 %")


APPLIED = ["vgg16", "vgg19_bn", "resnext50_32x4d"]
SCRIPT = """
import json, sys, time
import torch, torchvision
torch.backends.cudnn.benchmark = True
torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
name, plan = sys.argv[1:]
torch.manual_seed(0)
module = torchvision.models.get_model(name).cuda().eval()
inputs = torch.randn(16, 3, 224, 224, device="cuda")

def seconds():
    for _ in range(5):
        module(inputs)
    times = []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        module(inputs)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[10]

with torch.inference_mode():
    expected, before = module(inputs), seconds()
    begun = time.perf_counter()
    import perfexp
    perfexp.apply
    imported = time.perf_counter() - begun
    applied = perfexp.apply(module, plan=plan)
    applying = time.perf_counter() - begun
    outputs = module(inputs)
    torch.cuda.synchronize()
    start = time.perf_counter() - begun
    after = seconds()
    gain = perfexp.gain(applied, lambda: module(inputs))
error = float((outputs - expected).norm() / expected.norm())
print(json.dumps({"script": before / after, "low": gain.low, "gain": gain.value, "high": gain.high,
                  "error": error, "import_seconds": imported,
                  "apply_seconds": applying - imported, "start_seconds": start}))
"""


def apply(_: CudaDevice) -> Iterator[str]:
    """Yield the promised gain of a run, and the gain of its plan in a script."""
    for name in APPLIED:
        begun = time.perf_counter()
        with tempfile.TemporaryDirectory() as place:
            folder, plan = Path(place) / "run", Path(place) / "plan.json"
            run = [sys.executable, "-m", "perfexp", f"model={name}", "algorithm=fastest"]
            run += ["batch_size=16", "precision=fp32", "tracking=none", "stopping=coarse"]
            run += ["processes=5", "cold_start=false", f"output_dir={folder}"]
            out = subprocess.run(run, capture_output=True, text=True, check=False, timeout=400)
            export = [sys.executable, "-m", "perfexp", "export", str(folder), "--plan", str(plan)]
            written = subprocess.run(export, capture_output=True, text=True, check=False)
            if not plan.exists():
                lines = [*out.stderr.splitlines(), *written.stderr.splitlines(), "no output"]
                yield f"{name}: FAILED {lines[-2][:200] if len(lines) > 1 else lines[0]}"
                continue
            promised = {
                key: value
                for key, value in json.loads(plan.read_text())["gains"].items()
                if key.endswith("benchmark")
            }
            script = [sys.executable, "-c", SCRIPT, name, str(plan)]
            done = subprocess.run(script, capture_output=True, text=True, check=False, timeout=120)
        result = (done.stdout or done.stderr or "nothing").strip().splitlines()[-1]
        yield f"{name}: promised {promised}; {result} ({time.perf_counter() - begun:.0f} s)"


def main() -> None:
    """Print all tables; a part that fails does not end the others."""
    parts = {
        "SHAPES": shapes,
        "SWAPS": swaps,
        "MODELS": models,
        "PUBLIC": public,
        "APPLY": apply,
    }
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--only", default=",".join(parts))
    arguments.add_argument("--models", default=",".join(APPLIED), help="of APPLY")
    options = arguments.parse_args()
    wanted = options.only.upper().split(",")
    APPLIED[:] = options.models.split(",")
    device, failed = CudaDevice(), []
    device.start()
    print(torch.cuda.get_device_name(), torch.__version__, torch.backends.cudnn.version())
    for name, part in parts.items():
        if name not in wanted:
            continue
        begun = time.perf_counter()
        print(f"\n## {name}", flush=True)
        try:
            for line in part(device):
                print(line, flush=True)
        except Exception as error:
            failed.append(name)
            if not isinstance(error, AssertionError):
                traceback.print_exc(limit=4, file=sys.stdout)
            print(f"{name} FAILED: {type(error).__name__}: {error}", flush=True)
        print(f"({time.perf_counter() - begun:.0f} s)", flush=True)
    print("\nall passed" if not failed else f"\nfailed: {', '.join(failed)}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
