"""Several ranks: real trainings by two processes with gloo on the CPU, through the command."""

import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from perfexp.measuring.ranks import Place
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.messages import Events
from perfexp.records.record import Record, Status
from perfexp.worker import rank_process
from tests.support import processes

#: A network of a few numbers, which needs no import of torchvision; larger pictures take long, but no work.
NET = """
import time
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = torch.nn.Conv2d(3, 4, 3)
        self.head = torch.nn.Linear(4, 10)

    def forward(self, inputs):
        if inputs.shape[-1] == 48:
            time.sleep(0.2)
        return self.head(self.convolution(inputs).mean((2, 3)))
"""
QUICK = [
    *(
        "gpu=cpu",
        "execution.threads=1",
        "gpu.count=2",
        "input_size=32",
        "cold_start=false",
        "tracking=none",
        "quiet=true",
        "percentiles=[50]",
    ),
    *("stopping=fixed", "stopping.warmup=1", "stopping.measure=6"),
]
MODEL = ["--config-dir=own", "model=net", "mode=train", "batch_size=2"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="ranks talk through pipes"),
]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A folder as a user has it: the network and its configuration."""
    (tmp_path / "own" / "model").mkdir(parents=True)
    (tmp_path / "own" / "model" / "net.yaml").write_text("_target_: few_numbers.Net\n")
    (tmp_path / "few_numbers.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(rank_process.__file__).parents[3]))


def perfexp(*arguments):
    return processes.run(*arguments, seconds=300)


def ranks_of(folder):
    """Processes of the ranks of a run, by number."""
    found = {}
    for process in psutil.process_iter():
        try:
            arguments = process.cmdline()
            if str(folder) in arguments and any(each.startswith("--ranks=") for each in arguments):
                found[int(process.environ()["RANK"])] = process
        except psutil.Error:  # it has just ended, or is another user's
            continue
    return found


@pytest.mark.parametrize("axis", ["execution=eager,compile", "execution.channels_last=false,true"])
def test_two_jobs_of_a_multirun_train_by_two_ranks_each(tmp_path, axis):
    """A second job is where `torchrun -m perfexp --multirun` would hang."""
    folder = tmp_path / "sweep"
    asked = ["-m", *MODEL, axis, "probes.scaling=true"]
    ended = perfexp(*asked, *QUICK, f"output_dir={folder}")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    records = [Record.load(path) for path in sorted(folder.glob("*/record.json"))]
    assert [record.status for record in records] == [Status.OK] * 2
    executions = [record.plan["execution"] for record in records]
    assert [(one["compile"], one["channels_last"]) for one in executions] == [
        (None, False),
        ("default", False) if "compile" in axis else (None, True),
    ]
    for record in records:
        [point] = record.points
        values = {metric.name: metric.value for metric in point.metrics}
        assert point.facts["world_size"] == 2
        assert record.environment["ranks"]["backend"] == "gloo"
        assert len(record.environment["ranks"]["devices"]) == 2
        shares = {
            "scaling_efficiency",
            "communication_share",
            "statistics_share",
            "contention_share",
        }
        assert {
            "ranks/1/samples_per_second",
            *(f"ranks/{name}" for name in shares),
        } <= values.keys()
        assert all(value is not None for name, value in values.items() if name.startswith("ranks/"))
        assert {"ranks/all", "ranks/no_gradients", "ranks/alone"} <= {
            series.name for series in point.series
        }


@pytest.mark.parametrize("size", [2, 8])
def test_killed_rank_is_named_and_finished_points_stay(tmp_path, size):
    folder, last = tmp_path / "run", size - 1
    asked = [
        *MODEL,
        *QUICK,
        f"gpu.count={size}",
        "input_size=[32,48]",
        "stopping.measure=40",
        f"output_dir={folder}",
    ]
    with processes.start(
        *asked, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        while not (folder / "details" / "points.jsonl").exists() and process.poll() is None:
            time.sleep(0.05)
        running = ranks_of(folder)
        running[last].send_signal(signal.SIGKILL)
        printed = process.communicate(timeout=300)[0]
    finished, killed = Record.load(folder).points
    assert process.returncode == 1
    assert finished.status is Status.OK, printed
    assert killed.status is Status.KILLED, printed
    assert (
        f"rank {last} of {size} (process {running[last].pid}) was terminated by SIGKILL"
        in killed.error
    )
    assert {f"ranks/{number}/samples_per_second" for number in range(size)} <= {
        one.name for one in finished.metrics
    }
    assert ranks_of(folder) == {}


def test_ranks_share_gradients_and_have_equal_weights(tmp_path):
    """The seeds of their data differ; after some steps the weights do not."""
    script = tmp_path / "rank.py"
    script.write_text("""
import json, os, sys
from pathlib import Path
import torch
from perfexp.devices.cpu import CpuDevice
from perfexp.models import Ddp, Execution, Precision
from perfexp.models.module import adapt
from perfexp.measuring.ranks import Place, Sharing
from perfexp.measuring.ranks.group import TorchGroup

place = Place(number=int(os.environ["RANK"]), size=2, folder=Path("."), per_host=2)
device = CpuDevice()
group = TorchGroup(place, device, threads=1)
torch.manual_seed(place.number)  # the ranks begin with other weights: those of the first are taken
net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(4 * 36, 5))
session = adapt(net, "net").open(
    device=device, precision=Precision(name="fp32"), execution=Execution(), num_classes=None, seed=0
)
session.share(Ddp())
norm = torch.nn.SyncBatchNorm(4)
update = session.optimizer({"name": "sgd", "lr": 0.1})

def step(seed):
    batch = session.random_batch((8, 8), 2, seed)
    session.backward(session.loss(session.learn(batch), batch.targets))
    update()

def spread():
    totals = group.gather(sum(each.double().sum().item() for each in session.module.parameters()))
    return abs(totals[0] - totals[1])

found = {"begin": spread()}
with session.inferring():
    session.first_forward(session.random_batch((8, 8), 2, seed=0))  # its outputs' shape is that of the targets
with session.training():
    for number in range(3):
        step(10 * place.number + number)
    found["shared"] = spread()
    with session.sharing(Sharing.no_gradients):
        step(100 + place.number)
    found["not shared"] = spread()
    with session.sharing(Sharing.alone):
        if place.number == 0:
            norm(torch.ones(2, 4, 3, 3))  # as several ranks it would wait for the other, and be refused on a CPU
            found["heads"] = torch.distributed.is_initialized()
            step(7)
    found["alone"] = spread()
if place.number == 0:
    Path(sys.argv[1]).write_text(json.dumps(found))
group.barrier()
os._exit(0)
""")
    from perfexp.measuring.ranks import start

    command = [sys.executable, str(script), str(tmp_path / "found.json")]
    code = start.run(command, size=2, port=None, emit=Events(None))
    assert code == 0
    found = json.loads(Path(tmp_path / "found.json").read_text())
    assert found["begin"] == 0
    assert found["shared"] < 1e-9
    assert found["not shared"] > 1e-6
    assert abs(found["alone"] - found["not shared"]) > 1e-6
    assert found["heads"] is False


@pytest.mark.parametrize(("kind", "backend"), [("cuda", "nccl"), ("cpu", "gloo")])
def test_process_group_waits_long_and_records_its_environment(monkeypatch, kind, backend):
    import torch.distributed as dist

    from perfexp.measuring.ranks.group import TorchGroup

    asked = []
    monkeypatch.setattr(
        dist, "init_process_group", lambda *given, **named: asked.append((given, named))
    )
    monkeypatch.setattr(dist, "new_group", lambda **named: asked.append(named))
    monkeypatch.setattr(os, "environ", {"NCCL_NVLS_ENABLE": "0", "ANOTHER": "word"})
    place = Place(number=0, size=2, folder=Path(), per_host=2)
    group = TorchGroup(place, SimpleNamespace(kind=kind, identifier="cuda:1"), threads=1)
    ((given, named), control) = asked
    assert given == (backend,)
    assert str(named["device_id"]) == ("cuda:1" if kind == "cuda" else "None")
    assert named["timeout"] == control["timeout"] >= timedelta(hours=12)
    told = group.facts()
    assert (told["backend"], "ANOTHER" in told["environment"]) == (backend, False)
    assert (
        told["environment"].items()
        >= {"NCCL_NVLS_ENABLE": "0", "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"}.items()
    )


def test_two_runs_take_the_locks_of_their_devices_in_one_order():
    """Whatever CUDA_VISIBLE_DEVICES calls the first: otherwise each could have the one that the other waits for."""
    first, second = SimpleNamespace(lock_name="GPU-1"), SimpleNamespace(lock_name="GPU-2")
    assert (
        rank_process._distinct([first, second])
        == rank_process._distinct([second, first, second])
        == [first, second]
    )


def test_unlike_devices_are_flagged_and_warnings_name_their_rank():
    busy = Diagnostic(code="shared_device", message="busy", help="wait")
    names = [{"name": "A"}, {"name": "B"}]
    found = rank_process._rank_diagnostics([[busy], [busy]], names)
    assert [doubt.code for doubt in found] == ["shared_device", "mixed_devices"]
    assert found[0].message == "rank 1: busy"
    assert rank_process._rank_diagnostics([[], []], [{"name": "A"}] * 2) == []


def test_nodes_that_are_not_alike_are_doubted_by_name():
    first, second = (
        {"host": name, "device": {"driver": driver}} for name, driver in (("a", "1"), ("b", "2"))
    )
    [doubt] = rank_process._host_differences([first, None, second, None])
    assert (doubt.code, "device.driver: 1 and 2 on b" in doubt.message) == ("mixed_devices", True)
    assert (
        rank_process._host_differences([first, first | {"host": "c"}])
        == rank_process._host_differences([None, None])
        == []
    )


def test_out_of_memory_fails_one_point_and_all_ranks_infer(
    tmp_path,
):
    """A batch that no rank can take; both meet the same error, the first one writes it down."""
    folder = tmp_path / "run"
    asked = [
        *MODEL,
        "mode=inference",
        *QUICK,
        "input_size=64",
        "batch_size=[10000000,2]",
        f"output_dir={folder}",
    ]
    ended = perfexp(*asked)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    points = {point.key.batch_size: point for point in Record.load(folder).points}
    assert {size: point.status for size, point in points.items()} == {
        10000000: Status.OOM,
        2: Status.OK,
    }
    values = {metric.name: metric.value for metric in points[2].metrics}
    assert {
        "ranks/samples_per_second",
        "ranks/0/samples_per_second",
        "ranks/1/samples_per_second",
    } <= values.keys()
    assert "ranks/communication_share" not in values


def test_one_device_has_no_scaling_and_says_so():
    asked = [one for one in QUICK if one != "gpu.count=2"]
    found = perfexp(*MODEL, *asked, "probes.scaling=true", "output_dir=run")
    assert found.returncode == 0, found.stderr
    [point] = Record.load(Path("run")).points
    metric = point.metric("ranks/scaling_efficiency")
    assert (metric.value, metric.reason) == (None, "this is one device alone")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["gpu.count=0"], "gpu.count=0: set a number of devices"),
        (
            ["gpu.count=2", "execution.cuda_graph=true", "gpu=auto"],
            "execution.cuda_graph=true is for one device",
        ),
        (["gpu.count=2", "epochs=1", "data.num_samples=8"], "epochs=1 is for one device"),
        (["gpu.count=2", "probes.layers=true"], "probes.layers=true is for one device"),
        (["gpu.count=2", "profiler=torch"], "profiler=torch is for one device"),
        (["gpu.count=2", "gpu.port=99999"], "gpu.port=99999: set a port"),
        (["gpu.nodes=0"], "gpu.nodes=0: set a number of nodes"),
        (
            ["gpu.count=1", "gpu.nodes=2", "probes.energy=true"],
            "probes.energy=true is for one node",
        ),
        (
            ["gpu.nodes=2", "epochs=1", "data.num_samples=8"],
            "is for one device, and gpu.count=2 gpu.nodes=2",
        ),
        (["gpu.nodes=2"], "gpu.nodes=2 needs a job of SLURM with 2 nodes; this is not in a job"),
    ],
)
def test_what_several_ranks_can_not_do_is_refused(run, asked, said):
    code, printed, _ = run(*MODEL, *QUICK, *asked, "output_dir=run")
    assert code == 2
    assert said in " ".join(printed.split())
