"""Listings: CSVs as ncu writes them, made by hand, with known FLOPs and bytes."""

from __future__ import annotations

import csv
import io
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

THREAD = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
SPAN = "Id:Domain:Start/Stop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
ABOUT = (
    "ID",
    "Process ID",
    "Process Name",
    "Host Name",
    THREAD,
    SPAN,
    "Kernel Name",
    "Context",
    "Stream",
    "Block Size",
)
ABOUT += ("Grid Size", "Device", "CC")

TIME, BYTES, L2 = "gpu__time_duration.sum", "dram__bytes.sum", "lts__t_bytes.sum"
SM = "sm__throughput.avg.pct_of_peak_sustained_elapsed"
DRAM = "dram__throughput.avg.pct_of_peak_sustained_elapsed"


def operation(name: str) -> str:
    return f"smsp__sass_thread_inst_executed_op_{name}_pred_on.sum"


FADD, FMUL, FFMA = map(operation, ("fadd", "fmul", "ffma"))


@dataclass(kw_only=True)
class Kernel:
    """A launch: metrics as (unit, value as text) by name."""

    name: str = "gemm"
    metrics: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    stack: Sequence[str] = ()
    spans: Sequence[str] = ()
    capability: str = "9.0"


def counted(
    name: str = "gemm",
    *,
    us: float = 10,
    adds: int = 0,
    muls: int = 0,
    fmas: int = 10**9,
    mbytes: float = 10,
    **more: object,
) -> Kernel:
    """A launch whose single-precision instructions and DRAM bytes were counted."""
    metrics = {
        TIME: ("usecond", str(us)),
        FADD: ("inst", str(adds)),
        FMUL: ("inst", str(muls)),
        FFMA: ("inst", str(fmas)),
        BYTES: ("Mbyte", str(mbytes)),
    }
    return Kernel(name=name, metrics=metrics, **more)  # type: ignore[arg-type]


def long_form(kernels: Sequence[Kernel], *, delimiter: str = ",") -> str:
    header = [*ABOUT, "Section Name", "Metric Name", "Metric Unit", "Metric Value"]
    rows = [
        [*_about(number, kernel), "Command line profiler metrics", name, unit, value]
        for number, kernel in enumerate(kernels)
        for name, (unit, value) in kernel.metrics.items()
    ]
    return _text([header, *rows], delimiter)


def wide_form(kernels: Sequence[Kernel], *, delimiter: str = ",") -> str:
    names = list(dict.fromkeys(name for kernel in kernels for name in kernel.metrics))
    units = {name: unit for kernel in kernels for name, (unit, _) in kernel.metrics.items()}
    body = [
        [*_about(number, kernel), *(kernel.metrics.get(name, ("", ""))[1] for name in names)]
        for number, kernel in enumerate(kernels)
    ]
    return _text(
        [[*ABOUT, *names], ["" for _ in ABOUT] + [units[name] for name in names], *body], delimiter
    )


def many(count: int, seed: int = 1, *, l2_roof: bool = False) -> list[Kernel]:
    """Kernels of every kind, below the roofs of an H100."""
    source = random.Random(seed)
    found = []
    for number in range(count):
        us = 10 ** source.uniform(0.3, 3)
        moved = us * source.uniform(0.02, 0.95) * 3.35  # MB
        flops = us * 1e-6 * 67e12 * 10 ** source.uniform(-4, -0.05)
        templates = f"<float, (int){number % 7}, at::native::Functor{number}<float>>(int, T1 *)"
        name = f"void at::native::kernel_{number}_of_some_length{templates}"
        kernel = counted(name, us=round(us, 2), fmas=int(flops / 2), mbytes=round(moved, 3))
        kernel.metrics = {
            **kernel.metrics,
            L2: ("Mbyte", str(round(moved * source.uniform(1.1, 5), 3))),
        }
        if l2_roof:
            share = float(kernel.metrics[L2][1]) / us / 5.5 * 100  # of 5.5 TB/s
            kernel.metrics = {
                **kernel.metrics,
                "lts__t_bytes.sum.pct_of_peak_sustained_elapsed": ("%", f"{share:.3f}"),
            }
        if number % 4 == 0:
            tensor = str(int(us * 1e-6 * 989e12 * source.uniform(0.01, 0.8)))
            kernel.metrics = {
                **kernel.metrics,
                "sm__ops_path_tensor_src_bf16_dst_fp32.sum": ("", tensor),
            }
        kernel.spans = (
            "train_step",
            ("forward", "backward", "backward", "optimizer_step")[number % 4],
        )
        found.append(kernel)
    return found


def _about(number: int, kernel: Kernel) -> list[str]:
    ends = ":none:none:none:none:none:none"
    stack = "  ".join(f'"<default domain>:{name}{ends}"' for name in kernel.stack)
    spans = "  ".join(f'"<default domain>:{name}{ends}"' for name in kernel.spans)
    head = [
        str(number),
        "4713",
        "python3.11",
        "127.0.0.1",
        f"4713  {stack} " if stack else "",
        f"1 {spans}" if spans else "",
    ]
    return [*head, kernel.name, "1", "7", "(256, 1, 1)", "(64, 1, 1)", "0", kernel.capability]


def _text(rows: Sequence[Sequence[str]], delimiter: str) -> str:
    buffer = io.StringIO(newline="")
    csv.writer(buffer, delimiter=delimiter, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(
        rows
    )
    return buffer.getvalue()
