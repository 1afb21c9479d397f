"""Scripted nsys and ncu: small programs that answer as the real ones do, well or badly."""

from __future__ import annotations

import json
import sys
from pathlib import Path

NSYS = """#!{python}
import json, os, sqlite3, sys, time
from pathlib import Path

SCRIPT = json.loads(Path({script!r}).read_text())
with open({calls!r}, "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
arguments = sys.argv[1:]

def value(name):
    return next((text.partition("=")[2] for text in arguments if text.startswith(name + "=")), None)

def tell(arguments, told):
    fd = next(int(text.partition("=")[2]) for text in arguments if text.startswith("--events-fd="))
    event = {{"event": "block", "text": "writes", "profile": told}}
    os.write(fd, json.dumps(event).encode() + b"\\n")

if arguments[0] == "export" or (arguments[0] == "stats" and "--help-reports" not in arguments):
    if not Path(arguments[-1]).is_file():
        print("ERROR: File " + arguments[-1] + " does not exist.", file=sys.stderr)
        sys.exit(0)
if arguments[0] == "--version":
    print(SCRIPT["version"])
elif arguments[0] == "profile":
    if SCRIPT.get("complaint"):
        print(SCRIPT["complaint"], file=sys.stderr)
        sys.exit(1)
    if SCRIPT.get("runs"):
        begin = arguments.index("-m") - 1 - ("-P" in arguments)
        os.execv(arguments[begin], arguments[begin:])
    base = Path(value("--output").replace("%%", "%"))
    if SCRIPT.get("told", True):
        tell(arguments, {{"warmup": 20, "steps": 3, "marked": ["train_step", "forward", "backward"]}})
    if SCRIPT.get("hangs"):
        time.sleep(600)
    print("Generating '" + str(base) + ".qdstrm'")
    base.with_name(base.name + ".qdstrm").write_bytes(b"stream")
    if SCRIPT.get("importer"):
        print(SCRIPT["importer"], file=sys.stderr)
        sys.exit(0)
    base.with_name(base.name + ".qdstrm").unlink()
    base.with_name(base.name + SCRIPT.get("ending", ".nsys-rep")).write_bytes(b"profile")
elif arguments[0] == "export":
    if SCRIPT.get("no_export"):
        print("Failed to create output file", file=sys.stderr)
        sys.exit(0)
    Path(value("--output")).write_bytes(Path(SCRIPT["database"]).read_bytes())
elif "--help-reports" in arguments:
    for name in SCRIPT["reports"]:
        print("  " + name + "[:base] -- Something about it")
elif arguments[0] == "stats":
    report = value("--report")
    text = SCRIPT["reports"].get(report)
    print("Processing [x.sqlite] with [/opt/nsys/reports/" + report + ".py]...")
    if text is None:
        print("ERROR: Report '" + report + "' could not be found.", file=sys.stderr)
    elif text == "crash":
        print("Traceback (most recent call last): KeyError", file=sys.stderr)
        Path(value("--output") + "_" + report + ".csv").write_text("")
    elif text.startswith("SKIPPED"):
        print(text)
    else:
        Path(value("--output") + "_" + report + ".csv").write_text(text)
sys.exit(0)
"""

NCU = """#!{python}
import json, os, sys
from pathlib import Path

SCRIPT = json.loads(Path({script!r}).read_text())
with open({calls!r}, "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
arguments = sys.argv[1:]

def value(name):
    return next((text.partition("=")[2] for text in arguments if text.startswith(name + "=")), None)

if arguments == ["--version"]:
    print("NVIDIA (R) Nsight Compute Command Line Profiler\\nCopyright (c)\\n" + SCRIPT["version"])
elif "--query-metrics" in arguments:
    print("Device NVIDIA H200 (GH100)\\n" + "-" * 30)
    print("Metric Name   Metric Type   Metric Unit   Metric Description")
    for name in SCRIPT["metrics"]:
        print(name + "   Counter   inst   # of something")
elif "--import" in arguments:
    print("==PROF== Loading")
    print(SCRIPT["csv"])
else:
    if SCRIPT.get("told", True):
        fd = next(int(text.partition("=")[2]) for text in arguments if text.startswith("--events-fd="))
        told = {{"warmup": 20, "steps": 1, "marked": ["train_step", "forward", "backward"]}}
        event = {{"event": "block", "text": "writes", "profile": told}}
        os.write(fd, json.dumps(event).encode() + b"\\n")
    if SCRIPT.get("complaint"):
        print(SCRIPT["complaint"], file=sys.stderr)
    if SCRIPT.get("report", True):
        Path(value("--export") + ".ncu-rep").write_bytes(b"report")
sys.exit(SCRIPT.get("code", 0))
"""


class Scripted:
    """A tool that answers by a script."""

    def __init__(self, folder: Path, name: str, text: str, script: dict) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._script, self._calls = folder / f"{name}.json", folder / f"{name}.calls"
        self.path = folder / name
        self.path.write_text(
            text.format(python=sys.executable, script=str(self._script), calls=str(self._calls))
        )
        self.path.chmod(0o755)
        self.script(**script)

    def script(self, **script: object) -> None:
        self._script.write_text(json.dumps(script))

    @property
    def calls(self) -> list[list[str]]:
        return (
            [json.loads(line) for line in self._calls.read_text().splitlines()]
            if self._calls.exists()
            else []
        )


KERN_SUM = """Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name
 60.0,6000,6,1000.0,1000.0,900,1100,12.3,"void dgrad2d<float, 3>(float *, int)"
 40.0,4000,3,1333.3,1333.0,1300,1400,1.0,fprop
"""
OLD_KERN_SUM = """Time(%),Total Time (ns),Instances,Average (ns),Name
 100.0,5000,5,1000.0,fprop
"""
PLAIN = "Time (%),Total Time (ns),Count,Name\n 100.0,10,1,cudaLaunchKernel\n"
#: What nsys says of reports of kernels, and of copies, where there were none.
NO_KERNELS = "SKIPPED: x.sqlite does not contain CUDA kernel data."
NO_COPIES = "SKIPPED: x.sqlite does not contain GPU memory data."
REPORTS = {
    "cuda_api_gpu_sum": PLAIN,
    "cuda_gpu_kern_sum": KERN_SUM,
    "cuda_gpu_mem_time_sum": PLAIN,
    "nvtx_gpu_proj_sum": PLAIN,
    "cuda_api_sum": PLAIN,
}
VERSION = "NVIDIA Nsight Systems version 2025.3.1.90-253135822126v0"

METRICS_SM90 = [
    "gpu__time_duration",
    "dram__bytes",
    "dram__bytes_read",
    "dram__bytes_write",
    "lts__t_bytes",
    "l1tex__t_bytes",
    "sm__throughput",
    "dram__throughput",
    "sm__cycles_elapsed",
    "smsp__sass_thread_inst_executed_op_fadd_pred_on",
    "smsp__sass_thread_inst_executed_op_fmul_pred_on",
    "smsp__sass_thread_inst_executed_op_ffma_pred_on",
    "sm__ops_path_tensor_src_bf16_dst_fp32",
    "sm__ops_path_tensor_src_bf16_dst_fp32_sparsity_on",
    "sm__ops_path_tensor_src_tf32_dst_fp32",
    "sm__ops_path_tensor_src_int8",
    "sm__inst_executed_pipe_tensor_op_hmma",
]
_START = "Id:Domain:Start/Stop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
_PUSH = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"


#: Unit and value of each counter; the last four say what the chip does at most, per cycle, and its clocks.
_COUNTED = {
    "gpu__time_duration.sum": ("nsecond", 0),
    "dram__bytes.sum": ("byte", 4096),
    "smsp__sass_thread_inst_executed_op_fadd_pred_on.sum": ("inst", 100),
    "smsp__sass_thread_inst_executed_op_fmul_pred_on.sum": ("inst", 100),
    "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum": ("inst", 10000),
    "dram__bytes.sum.peak_sustained": ("byte/cycle", 1000),
    "dram__cycles_elapsed.avg.per_second": ("cycle/second", 1000000000),
    "sm__sass_thread_inst_executed_op_ffma_pred_on.sum.peak_sustained": ("inst/cycle", 10000),
    "sm__cycles_elapsed.avg.per_second": ("cycle/second", 1000000000),
}


def ncu_csv(parts: list[str], kernels: list[str]) -> str:
    """The raw page of a step: a kernel in each part."""
    columns = (
        "ID",
        "Process ID",
        "Process Name",
        "Kernel Name",
        "Context",
        "Stream",
        "Device",
        "CC",
        _PUSH,
        _START,
    )
    rows = [[*columns, *_COUNTED], ["" for _ in columns] + [unit for unit, _ in _COUNTED.values()]]
    for number, (part, kernel) in enumerate(zip(parts, kernels, strict=True)):
        ranges = " ".join(
            f'"{index}:<default domain>:{name}:none:none:none:none:none:none"'
            for index, name in enumerate(("train_step", part))
        )
        values = {**_COUNTED, "gpu__time_duration.sum": ("", 1000 * (number + 1))}
        about = (number, 7, "python", kernel, 1, 7, 0, "9.0", "", ranges)
        rows.append([*map(str, about), *(str(value) for _, value in values.values())])
    return "\n".join(",".join('"' + cell.replace('"', '""') + '"' for cell in row) for row in rows)
