"""gpu=auto: which device it is."""

import pytest
import torch

from perfexp.devices import auto, cuda
from perfexp.devices.cpu import CpuDevice
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
    with pytest.raises(DeviceMismatch, match=f"gpu.index={index} names no CUDA device .* from 0 to 1"):
        auto.open_device(index=index)


def test_without_cuda_every_rank_has_the_processor(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert isinstance(auto.open_device(index=3), CpuDevice)
