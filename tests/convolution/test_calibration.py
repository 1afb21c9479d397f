"""`perfexp calibrate kernels`, with a scripted cuDNN whose kernels are known."""

import pytest
import torch

from perfexp import commands
from perfexp.convolution import calibration, families, proof
from perfexp.convolution.coverage import Pass
from perfexp.convolution.cudnn import CODES

ENTRY = {
    "Forward": Pass.forward,
    "BackwardData": Pass.backward_data,
    "BackwardFilter": Pass.backward_filter,
}
SMALL = [
    calibration._of(4, outputs, filter_size, 8, batch=2)
    for outputs in (4, 6)
    for filter_size in (1, 3)
]


@pytest.fixture
def device(monkeypatch, scripted, tmp_path):
    """A cuDNN of another architecture that launches a kernel of its own for each algorithm, and refuses winograd."""
    made = scripted(refuses=lambda which, code, *_: _name(which, code) == "winograd")
    made.kernels = lambda which, code: [
        "void nchwToNhwcKernel<float>(int)",
        f"{_name(which, code)}_of_tomorrow",
    ]
    monkeypatch.setattr(
        proof, "mark", lambda: made.launched.append("void at::cuda::spin_kernel(long)")
    )

    def names(call):
        made.launched.clear()
        call()
        return list(made.launched)

    monkeypatch.setattr(proof, "kernel_names", names)
    monkeypatch.setattr(families, "identity", lambda: ("sm_80", 90000))
    monkeypatch.setattr(calibration, "identity", lambda: ("sm_80", 90000))
    monkeypatch.setattr(calibration, "geometries", lambda: SMALL)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return made


def _name(which, code):
    return next(name for name, number in CODES[ENTRY[which]].items() if number == code)


def test_a_calibrated_device_has_kernels_of_its_own(device):
    assert families.foreign() is not None
    table, path = calibration.calibrate("cpu", 60.0, lambda text: None)
    assert families.current() == table
    assert families.foreign() is None
    assert path == families.calibrated("sm_80", 90000)
    for which in CODES:
        assert set(table.counts[which.value]) == set(CODES[which]) - {"winograd"}
        for algorithm, counts in table.counts[which.value].items():
            assert (
                counts.kernels[f"{algorithm}_of_tomorrow"]
                == counts.kernels["nchwToNhwcKernel"]
                == counts.calls
            )
    assert table.likely(Pass.forward, ["nchwToNhwcKernel", "gemm_of_tomorrow"]) == ["gemm"]
    assert table.likely(Pass.forward, ["nchwToNhwcKernel"]) == []


def test_no_convolution_begins_after_the_time(device):
    _, seen = calibration.learn(SMALL, torch.device("cpu"), -1.0, lambda text: None)
    assert not seen


def test_a_device_without_observed_kernels_leaves_no_table(device, capsys):
    device.kernels = lambda which, code: []
    with pytest.raises(Exception, match="No kernel was observed"):
        calibration.calibrate("cpu", 60.0, lambda text: None)
    assert not families.calibrated("sm_80", 90000).exists()


def test_without_cudnn_the_command_says_so(monkeypatch, capsys):
    monkeypatch.setattr(calibration, "identity", lambda: None)
    assert commands.run(["calibrate", "kernels"]) == 2
    assert "no NVIDIA GPU with cuDNN" in capsys.readouterr().err


def test_calibration_convolutions_are_valid_and_distinct():
    chosen = calibration.geometries()
    assert len(set(chosen)) == len(chosen) > 50
    for x, w, stride, padding, dilation, groups in chosen:
        outputs = torch.nn.functional.conv2d(
            torch.empty(x, device="meta"),
            torch.empty(w, device="meta"),
            None,
            stride,
            padding,
            dilation,
            groups,
        )
        assert min(outputs.shape) > 0
