"""Architectures of Hugging Face on the first CUDA device: layers, work, and decode against a loop.

    python validation/hugging_face.py [FOLDER]

* `closure`: layers together over the call without profiling, less 1; within 3 %.
* `MACs`: counted over the formula of a transformer, less 1; within 1 %.
* `decode`: `device/graph` of mode=decode, over a captured loop written by hand with the same
  transformers cache; within 2 %.
"""

from __future__ import annotations

import inspect
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from perfexp.records.quantities import CACHE_BYTES, CLOSURE, MACS, MBU
from perfexp.records.record import Point, Record

LARGEST_CLOSURE, LARGEST_MACS, LARGEST_DECODE = 0.03, 0.01, 0.02
#: A language model of about 1 billion parameters.
LLAMA = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
}
#: Overrides for each architecture, large enough that kernels take most of the time: torch's
#: profiler adds up to 2 µs to a matrix product of cuBLAS.
RUNS = {
    "bert": ["input_size=128", "batch_size=128"],
    "vit": ["batch_size=128"],
    "segformer": ["input_size=512", "batch_size=64"],
    "clip": ["batch_size=128"],
    "qwen3": ["input_size=1024", "model.config.num_hidden_layers=4"],
    "llama": ["input_size=1024", *(f"model.config.{key}={value}" for key, value in LLAMA.items())],
}
CONTEXT = 4096
#: Replays per round of the loop, and rounds.
REPLAYS, ROUNDS = 200, 5


def main() -> int:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    missed = []
    for name, words in RUNS.items():
        points = measured(folder / name, name, [*words, "probes.layers=true"])
        missed.append(not checked(f"{name} closure", figure(points, CLOSURE), LARGEST_CLOSURE))
        macs = figure(points, MACS)
        if name in FORMULAS:
            error = macs and macs / FORMULAS[name]() - 1
            missed.append(not checked(f"{name} MACs", error, LARGEST_MACS))
    missed.append(
        not checked_decode(folder / "decode")
    )  # last: it leaves its context on the device
    return int(any(missed))


def checked_decode(folder: Path) -> bool:
    """Print decode's time beside the loop, and return whether they agree."""
    words = [word for word in RUNS["llama"] if not word.startswith("input_size")]
    decode = [*words, "mode=decode", f"input_size={CONTEXT}", "probes.ceilings=true"]
    points = measured(folder, "llama", decode)
    series = points[0].find_series("device/graph") if points else None
    seconds = statistics.median(series.measured) if series and series.measured else None
    loop = captured_loop_seconds()
    print(f"decode {seconds and seconds * 1e6} µs, loop {loop * 1e6:.1f} µs per token;", end=" ")
    print(f"cache {figure(points, CACHE_BYTES)} bytes, MBU {figure(points, MBU)}")
    return checked("llama decode", seconds and seconds / loop - 1, LARGEST_DECODE)


def checked(what: str, error: float | None, most: float) -> bool:
    """Print a relative error, and return whether it is within its bar."""
    is_within = error is not None and abs(error) <= most
    text = "missing" if error is None else f"{error:+.2%}"
    print(f"{what:<20} {text:>8}  {'ok' if is_within else 'NO'}", flush=True)
    return is_within


def measured(folder: Path, name: str, words: list[str]) -> list[Point]:
    """Measure in bf16 and return the points."""
    common = ["precision=bf16", "tracking=none", "processes=1", "cold_start=false"]
    command = [sys.executable, "-m", "perfexp", f"model=hf:{name}", *common]
    command += [*words, f"output_dir={folder}", "stopping.max_seconds=3"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        print(name, done.stderr.strip()[-300:])
    points = list(Record.load(folder).points)
    for point in points:
        for diagnostic in point.doubts:
            print(f"  {name}: {diagnostic.severity} {diagnostic.message}")
    return points


def figure(points: list[Point], name: str) -> float | None:
    """Return a metric's value from the first point that has it."""
    values = (metric.value for point in points if (metric := point.metric(name)) is not None)
    return next((value for value in values if value is not None), None)


def blocks(length: int, layers: int, width: int, inner: int, keys: int, products: int) -> int:
    """Return the MACs of the blocks of a transformer for one text or image.

    Args:
        keys: width of the keys, and of the values.
        products: matrix products of the MLP.
    """
    attention = 2 * width * (width + keys) + 2 * length * width
    return layers * length * (attention + products * width * inner)


def of_bert() -> int:
    """Return BERT's MACs: 12 blocks, and a head of two matrices for each token."""
    return 128 * (blocks(128, 12, 768, 3072, 768, 2) + 128 * 768 * (768 + 30522))


def of_vit() -> int:
    """Return ViT-B/16's MACs, with patches and two classes."""
    return 128 * (blocks(197, 12, 768, 3072, 768, 2) + 196 * 768 * 3 * 16 * 16 + 768 * 2)


def of_llama() -> int:
    """Return the MACs of the language model, with the scores of all tokens."""
    width, inner = LLAMA["hidden_size"], LLAMA["intermediate_size"]
    keys = LLAMA["num_key_value_heads"] * LLAMA["head_dim"]
    of_blocks = blocks(1024, LLAMA["num_hidden_layers"], width, inner, keys, 3)
    return of_blocks + 1024 * width * LLAMA["vocab_size"]


FORMULAS = {"bert": of_bert, "vit": of_vit, "llama": of_llama}


def captured_loop_seconds() -> float:
    """Return the time per token of a captured loop written by hand."""
    from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

    config = AutoConfig.for_model("llama", **LLAMA)
    made = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    model: Any = made.to("cuda", torch.bfloat16).eval()
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache = StaticCache(config=config, max_cache_len=CONTEXT)
    ids = torch.randint(config.vocab_size, (1, 1), device="cuda")
    times = []
    with torch.no_grad():

        def token() -> None:
            model(input_ids=ids, use_cache=True, **{name: cache})

        token()
        for layer in cache.layers:
            layer.keys.normal_()
            layer.values.normal_()
        for _ in range(ROUNDS):
            for layer in cache.layers:
                layer.cumulative_length.fill_(CONTEXT - 2 * REPLAYS)
            times.append(_replayed_seconds(token))
    return statistics.median(times)


def _replayed_seconds(token: Any) -> float:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            token()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token()
    for _ in range(REPLAYS // 2):
        graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / REPLAYS


if __name__ == "__main__":
    sys.exit(main())
