"""The CPU as a device."""

import resource
import sys

import numpy as np
import psutil
import pytest

from perfexp.devices.cpu import CpuDevice


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such limit")
def test_allocations_beyond_the_free_memory_fail_in_a_search():
    before = resource.getrlimit(resource.RLIMIT_AS)
    free_bytes = psutil.virtual_memory().available
    with CpuDevice().memory_limited():
        np.empty(free_bytes // 2, np.uint8)  # untouched, so nothing is used
        with pytest.raises(MemoryError):
            np.empty(free_bytes + 2**30, np.uint8)
        assert resource.getrlimit(resource.RLIMIT_AS) != before
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    with pytest.raises(ValueError, match="its own"), CpuDevice().memory_limited():
        raise ValueError("its own")
    assert resource.getrlimit(resource.RLIMIT_AS) == before
