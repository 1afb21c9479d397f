"""Mistakes that show without the device are found before anything waits for it, most of them by --dry-run."""

import pytest
import torch

from perfexp.algorithms.backends import supports_of
from perfexp.algorithms.forced import FASTEST
from perfexp.cli.composition import compose
from perfexp.devices import auto, lock
from perfexp.errors import UserError
from perfexp.host.installation import conf_dir
from perfexp.plan import config, prerequisites
from perfexp.records.messages import Events
from perfexp.records.paths import RunPaths
from perfexp.worker.workbench import Workbench

pytestmark = pytest.mark.usefixtures("quick_commands")

NO_DEVICE = ("model=resnet18", "input_size=32", "tracking=none", "stopping=fixed", "processes=1")
TRAINS = ("mode=train", "data=synthetic_epoch", "epochs=1")


@pytest.mark.parametrize("device", ["cpu", "auto", "mps"])
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("algorithm=guess", "algorithm=guess needs an NVIDIA GPU"),
        ("algorithm=benchmark", "algorithm=benchmark needs an NVIDIA GPU"),
        ("algorithm.layers={conv1:guess}", "algorithm.layers: guess for conv1 needs an NVIDIA GPU"),
        ("algorithm=gemm algorithm.backend=cudnn", "algorithm.backend=cudnn needs an NVIDIA GPU"),
        (
            "algorithm=winograd algorithm.backend=triton",
            "algorithm.backend=triton needs an NVIDIA GPU",
        ),
        ("algorithm=gemm algorithm.verify=true", "algorithm.verify=true needs an NVIDIA GPU"),
        ("profiler=nsys", "profiler=nsys: nsys, ncu and NVTX need a CUDA device"),
        ("profiler=ncu", "profiler=ncu: nsys, ncu and NVTX need a CUDA device"),
        ("profiler=nvtx", "profiler=nvtx: nsys, ncu and NVTX need a CUDA device"),
        ("execution.cuda_graph=true", "execution.cuda_graph=true needs a CUDA device"),
        ("batch_size=max", "batch_size=max needs a device with a memory of its own"),
    ],
)
def test_settings_of_nvidia_gpus_are_refused_on_a_cpu(
    run, tmp_path, monkeypatch, device, setting, message
):
    if (device, setting) == ("mps", "batch_size=max"):
        pytest.skip("Apple's GPU has a memory to fill")
    monkeypatch.setattr(auto, "predicted_name", lambda index=0: "cpu")
    for flag in ("--dry-run", "device_lock=fail"):
        code, printed, records = run(*NO_DEVICE, f"gpu={device}", *setting.split(), flag)
        assert (code, records) == (2, [])
        assert printed.startswith(f"error: {message}")
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["gpu=mps"], "gpu=mps asks for Apple's GPU, which this machine does not have"),
        (
            ["data=images", "data.root=nowhere"],
            "data.root is not a folder: .*nowhere.* perfexp make-data images DIR",
        ),
        (
            ["data=cifar10", "data.root=nowhere"],
            "data.root is not a folder: .*nowhere.* data.download=true",
        ),
        (
            ["data=clips", "data.root=nowhere"],
            "data.root is not a folder: .*nowhere. Set it to the folder",
        ),
        ([*TRAINS, "mode.train.resume_from=x.pt"], "mode.train.resume_from=x.pt is missing"),
        (["model.weights=x.pt"], "There are no weights x.pt in"),
        (["model.weights_dir=nowhere"], "model.weights_dir is not a folder: nowhere"),
    ],
)
def test_dry_run_finds_a_missing_device_and_missing_files(run, tmp_path, settings, message):
    code, printed, _ = run(*NO_DEVICE, *settings, "--dry-run")
    assert code == 2
    with pytest.raises(UserError, match=message):
        raise UserError(printed.removeprefix("error: "))
    assert not list(tmp_path.iterdir())


def test_dry_run_for_a_cluster_does_not_look_for_files_here(run, monkeypatch):
    monkeypatch.setattr(auto, "predicted_name", lambda index=0: "cpu")
    settings = (
        "gpu=l40s",
        "algorithm=guess",
        "data=images",
        "data.root=/of/the/node",
        "-m",
        "batch_size=1,2",
    )
    code, printed, _ = run(
        *NO_DEVICE, *settings, "hydra/launcher=slurm", "cluster=default", "--dry-run"
    )
    assert code == 0, printed


def test_a_finished_run_needs_no_files(run, monkeypatch):
    settings = ("model=fake", "gpu=fake", "tracking=none", "stopping=fixed", "output_dir=x")
    assert run(*settings)[0] == 0

    def refuse(plan):
        raise UserError("a file is missing")

    monkeypatch.setattr(prerequisites, "check_here", refuse)
    assert run(*settings)[0] == 0
    assert run(*settings, "batch_size=2", "output_dir=y")[0] == 2


@pytest.mark.slow
def test_every_algorithm_that_a_cpu_lacks_is_known_without_torch():
    for file in (conf_dir() / "algorithm").glob("*.yaml"):
        name, is_refused = file.stem, False
        try:
            if name != FASTEST:
                supports_of(name, "auto", torch.device("cpu"), None, {})
        except UserError:
            is_refused = True
        plan = config.typed(compose([*NO_DEVICE, f"algorithm={name}"]))
        try:
            prerequisites.check_kind(plan, "cpu")
        except UserError:
            assert is_refused, name
        else:
            assert not is_refused, name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["algorithm=winograd", "algorithm.on_unsupported=error"],
            "convolutions can't be computed .* conv1",
        ),
        (
            ["algorithm=gemm", "algorithm.workspace_bytes=-1"],
            "algorithm.workspace_bytes=-1: give 0 or more",
        ),
        (
            ["algorithm=winograd", "algorithm.backward_data=x"],
            "no backward_data algorithm of cuDNN's",
        ),
        (
            [*TRAINS, "mode.train.resume_from=weights.pt"],
            "weights.pt is not a checkpoint to resume from",
        ),
    ],
)
def test_a_worker_finds_mistakes_before_it_reserves_the_device(
    tmp_path, monkeypatch, settings, message
):
    monkeypatch.chdir(tmp_path)
    torch.save(torch.nn.Linear(2, 2).state_dict(), "weights.pt")
    plan = config.typed(compose([*NO_DEVICE, "gpu=cpu", "device_lock=fail", *settings]))
    (tmp_path / "run").mkdir()
    bench = Workbench(plan, RunPaths(tmp_path / "run"), Events(None))

    def held(*_, **__):
        raise AssertionError("the device was reserved")

    monkeypatch.setattr(lock, "held", held)
    with pytest.raises(UserError, match=message), bench.opened():
        pass


@pytest.mark.parametrize("flag", ["--dry-run", "device_lock=fail"])
def test_ranks_without_gpus_need_an_explicit_cpu(run, monkeypatch, flag):
    monkeypatch.setattr(auto, "predicted_name", lambda index=0: "cpu")
    code, printed, records = run(*NO_DEVICE, "gpu.count=99", flag)
    assert (code, records) == (2, [])
    assert (
        printed == "error: 99 ranks need GPUs, and torch finds none: add gpu=cpu to share a CPU.\n"
    )
