"""Default runs beside a script that sets nothing: rate of a loop and time of a CUDA graph, in turns.

Usage: python studies/default_precision.py [ROUNDS [MODEL …]]
       python studies/default_precision.py amp [ROUNDS [MODEL …]]    # both under autocast to bf16
       python studies/default_precision.py host [ROUNDS [MODEL …]]   # batch 1: the processor is the limit

Each side runs in fresh processes, one after the other. Above 1 perfexp's time is longer. Needs a CUDA device.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from perfexp.records.record import Record

#: Batch sizes at which the device is the limit.
BATCHES = {"resnet50": 64, "vgg16": 32, "regnet_x_3_2gf": 64, "swin_t": 64, "hf:bert": 64}
#: With autocast, whose calls need the host for longer.
AMP_BATCHES = BATCHES | {"regnet_x_3_2gf": 256, "swin_t": 256, "hf:bert": 256}
#: Tokens of each sequence.
LENGTH = 128
PHASES = ("inference", "train")
SECONDS, CALLS = 1.5, 10


def plain(
    name: str, phase: str, batch: int, precision: str = "torch", grad_mode: str = "no_grad"
) -> dict[str, float]:
    """Return the seconds of a call in a loop without waits, with one, and as a graph, as most scripts measure them."""
    import torch

    torch.manual_seed(0)
    if name == "hf:bert":
        from transformers import BertConfig, BertForMaskedLM

        model = BertForMaskedLM(BertConfig()).cuda()
        size, classes = (batch, LENGTH), model.config.vocab_size
        inputs = torch.randint(classes, size, device="cuda")
        targets = torch.randint(classes, size, device="cuda").flatten()
    else:
        import torchvision

        model = torchvision.models.get_model(name).cuda()
        inputs = torch.randn(batch, 3, 224, 224, device="cuda")
        targets = torch.randint(1000, (batch,), device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, weight_decay=0.0001)
    is_amp = precision == "amp_bf16"

    def forward() -> Any:
        with torch.autocast("cuda", torch.bfloat16, enabled=is_amp):
            outputs = model(inputs)
        return outputs.logits.flatten(0, 1) if name == "hf:bert" else outputs

    def infer() -> Any:
        with getattr(torch, grad_mode)():
            return forward()

    def train() -> Any:
        outputs = forward()
        with torch.autocast("cuda", torch.bfloat16, enabled=is_amp):
            loss = torch.nn.functional.cross_entropy(outputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    model.train(phase == "train")
    call = train if phase == "train" else infer
    found = {"loop": _loop(call), "latency": _loop(call, calls=1)}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return found | {"graph": _loop(graph.replay)}


def _loop(call: Any, calls: int = CALLS) -> float:
    import torch

    seconds: list[float] = []
    begun = time.perf_counter()
    while sum(seconds) < SECONDS or time.perf_counter() - begun < 2 * SECONDS:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - start) / calls)
    return statistics.median(seconds[len(seconds) // 3 :])


def measured(name: str, phase: str, batch: int, precision: str) -> dict[str, float]:
    """Return the same of perfexp's defaults."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "run"
        command = [
            sys.executable,
            "-m",
            "perfexp",
            f"model={name}",
            f"mode={phase}",
            f"batch_size={batch}",
        ]
        command += [f"precision={precision}"] if precision != "torch" else []
        command += [f"input_size={LENGTH}"] if name.startswith("hf:") else []
        command += ["stopping=brisk", "stopping.processes=2", "processes=1", "tracking=none"]
        command += ["probes.work=false", f"output_dir={place}"]
        subprocess.run(command, check=True, capture_output=True)
        record = Record.load(place)
    [point] = [one for one in record.points if one.key.is_timed]
    medians = {}
    for name in ("throughput", "device", "device/graph"):
        series = point.find_series(name)
        medians[name] = statistics.median(series.measured) if series else float("nan")
    print(
        f"  {record.environment['device']['name']}, {record.environment['session']['cudnn_allow_tf32']}",
        flush=True,
    )
    graph, device = medians["device/graph"], medians["device"]
    return {"loop": medians["throughput"], "graph": graph, "device over graph": device}


def host_bound(rounds: int, names: list[str]) -> None:
    """Print perfexp's interval over processes beside the medians of scripts' processes, at batch 1."""
    for name in names:
        for phase in PHASES:
            theirs: dict[str, list[float]] = {}
            modes = ("inference_mode", "no_grad") if phase == "inference" else ("no_grad",)
            with tempfile.TemporaryDirectory() as folder:
                command = [
                    sys.executable,
                    "-m",
                    "perfexp",
                    f"model={name}",
                    f"mode={phase}",
                    "batch_size=1",
                ]
                command += ["stopping=brisk", "tracking=none", f"output_dir={folder}/run"]
                for number in range(rounds):
                    for mode in modes:
                        script = [
                            sys.executable,
                            __file__,
                            "plain",
                            name,
                            phase,
                            "1",
                            "torch",
                            mode,
                        ]
                        found = json.loads(
                            subprocess.run(script, check=True, capture_output=True).stdout
                        )
                        for kind in ("loop", "latency"):
                            theirs.setdefault(f"{kind} {mode}", []).append(1e3 * found[kind])
                    if number == 0:
                        printed = subprocess.run(
                            command, check=True, capture_output=True, text=True
                        ).stdout
            print(f"{name} {phase} batch 1, ms")
            for kind, values in theirs.items():
                print(f"  script {kind:24s} {' '.join(f'{one:.3f}' for one in sorted(values))}")
            print(printed, flush=True)


def main() -> None:
    """Print the ratios of all rounds, and their median, for each model and phase."""
    if sys.argv[1:2] == ["plain"]:
        print(json.dumps(plain(sys.argv[2], sys.argv[3], int(sys.argv[4]), *sys.argv[5:])))
        return
    if sys.argv[1:2] == ["host"]:
        host_bound(int((sys.argv[2:3] or ["5"])[0]), sys.argv[3:] or list(BATCHES))
        return
    precision = "amp_bf16" if sys.argv[1:2] == ["amp"] else "torch"
    words = sys.argv[2:] if precision != "torch" else sys.argv[1:]
    rounds, names = int((words or ["2"])[0]), words[1:] or list(BATCHES)
    for name in names:
        for phase in PHASES:
            batch = (BATCHES if precision == "torch" else AMP_BATCHES)[name]
            ratios: dict[str, list[float]] = {}
            for _ in range(rounds):
                script = [sys.executable, __file__, "plain", name, phase, str(batch), precision]
                theirs = json.loads(subprocess.run(script, check=True, capture_output=True).stdout)
                ours = measured(name, phase, batch, precision)
                for kind in ours:
                    own = ours[kind] / theirs[kind.split()[-1]]
                    ratios.setdefault(kind, []).append(own)
            texts = (
                f"{kind} {statistics.median(own):.3f} {[round(one, 3) for one in own]}"
                for kind, own in ratios.items()
            )
            print(
                f"{name} {phase} {precision} batch {batch}: {'  '.join(texts)}; script {theirs}",
                flush=True,
            )


if __name__ == "__main__":
    main()
