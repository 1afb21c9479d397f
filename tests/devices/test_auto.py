"""gpu=auto: which device it is."""

from types import SimpleNamespace

import pytest
import torch

from perfexp.devices import auto, cuda
from perfexp.devices.cpu import CpuDevice
from perfexp.devices.meters import DeviceMeters, none_because
from perfexp.errors import DeviceMismatch


@pytest.fixture
def two(monkeypatch):
    """A torch with two CUDA devices."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(cuda, "CudaDevice", lambda index: f"cuda:{index}")


@pytest.mark.parametrize("index", [0, 1])
def test_a_cuda_device_of_that_number_is_taken(two, index):
    assert auto.open_device(index=index, name="auto") == f"cuda:{index}"


@pytest.mark.parametrize("index", [2, -1])
def test_a_number_that_no_cuda_device_has_is_not_the_processor(two, index):
    with pytest.raises(DeviceMismatch, match=f"gpu.index={index} does not exist .* from 0 to 1"):
        auto.open_device(index=index)


def test_without_cuda_every_rank_has_the_processor(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert isinstance(auto.open_device(index=3), CpuDevice)


def raising(error):
    def raises():
        raise error

    return raises


@pytest.mark.parametrize(
    ("built", "names", "index", "found"),
    [
        ({"cuda"}, lambda: ["NVIDIA H100", "NVIDIA A100"], 1, "NVIDIA A100"),
        ({"cuda"}, lambda: ["NVIDIA H100"], 1, None),  # refused when it is opened
        ({"cuda"}, list, 0, "cpu"),
        ({"cuda"}, lambda: None, 0, None),
        ({"cuda"}, raising(OSError("no driver")), 0, "cpu"),
        ({"cuda"}, raising(ImportError()), 0, None),
        (set(), lambda: ["NVIDIA H100"], 0, "cpu"),
        ({"hip"}, list, 0, None),
        (None, lambda: ["NVIDIA H100"], 0, None),
    ],
)
def test_what_auto_is_going_to_find_is_told_without_torch(monkeypatch, built, names, index, found):
    auto.predicted_name.cache_clear()
    monkeypatch.setattr(auto, "_built_for", lambda: built)
    monkeypatch.setattr(auto.nvml, "visible_names", names)
    assert auto.predicted_name(index) == found
    auto.predicted_name.cache_clear()


def test_what_torch_was_built_for_is_read_from_its_files():
    version = torch.version
    assert auto._built_for() == {name for name in ("cuda", "hip") if getattr(version, name)}


@pytest.mark.parametrize(
    ("name", "product", "boards", "indices", "reason"),
    [
        ("cpu", None, raising(OSError()), [0], "no zones"),
        ("auto", "cpu", raising(OSError()), [0], "no zones"),
        ("auto", "NVIDIA H100", lambda: [{"uuid": "GPU-0"}], [0], ""),
        (
            "h100",
            None,
            lambda: [{"uuid": "GPU-0"}, {"uuid": "MIG-1"}],
            [0, 1],
            "no counter of MIG-1",
        ),
        ("h100", None, lambda: [{"uuid": "GPU-0"}], [1], None),  # refused when it is opened
        ("h100", None, raising(OSError("no driver")), [0], None),
        ("h100", None, lambda: None, [0], None),
    ],
)
def test_meters_are_found_without_torch_where_that_is_possible(
    monkeypatch, name, product, boards, indices, reason
):
    def of_board(uuid):
        return (
            DeviceMeters(meters=(SimpleNamespace(name=uuid),))
            if uuid.startswith("GPU")
            else none_because(f"no counter of {uuid}")
        )

    monkeypatch.setattr(auto, "predicted_name", lambda index: product)
    monkeypatch.setattr(auto.nvml, "visible_boards", boards)
    monkeypatch.setattr(auto, "find_nvidia", of_board)
    monkeypatch.setattr(auto.rapl, "find", lambda: none_because("no zones"))
    found = auto.predicted_meters(name, indices)
    assert (found and found.reason.removeprefix("no meter: ")) == reason
