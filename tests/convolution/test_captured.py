"""How work is captured and launched; the driver is a script."""

import ctypes
from contextlib import nullcontext

import pytest
import torch

from perfexp.convolution import replays
from perfexp.convolution.replays import CaptureError, GraphLaunch

CUDA = torch.device("cuda")


class Driver:
    """Captures nothing."""

    def __init__(self, refuses=()):
        self.refuses, self.done = refuses, []

    def __getattr__(self, name):
        does = getattr(type(self), f"_{name}", lambda *_: 0)

        def function(*arguments):
            self.done.append(name)
            return 900 if name in self.refuses else does(self, *arguments)

        return function

    def _cuStreamEndCapture(self, stream, graph):
        graph._obj.value = 5
        return 0

    def _cuGraphInstantiateWithFlags(self, graph, of, flags):
        graph._obj.value = of.value + 1
        return 0

    def _cudaGraphLaunch(self, graph, stream):
        self.launched = (graph.value, stream)
        return 0

    def _cuGetErrorName(self, status, name):
        name._obj.value = b"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
        return 0


@pytest.fixture
def driver(monkeypatch):
    def use(*arguments, **named):
        made = Driver(*arguments, **named)
        monkeypatch.setattr(replays, "_driver", lambda: made)
        monkeypatch.setattr(replays, "_runtime", lambda: made)
        monkeypatch.setattr(
            torch.cuda, "Stream", lambda device: type("Stream", (), {"cuda_stream": 7})()
        )
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", torch.cuda.Stream)
        return made

    return use


def test_the_capture_ends_when_the_work_fails(driver):
    made = driver()
    with pytest.raises(ZeroDivisionError):
        GraphLaunch(lambda: 1 / 0, CUDA)
    assert made.done[-2:] == ["cuStreamEndCapture", "cuGraphDestroy"]


def test_a_driver_without_the_functions_is_too_old(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: type("Old", (), {})())
    replays._driver.cache_clear()
    with pytest.raises(CaptureError, match="too old: cuStreamBeginCapture_v2 is missing"):
        replays._driver()


def test_graph_launch_replays_the_capture_on_the_named_stream(driver):
    made = driver()
    ran = []
    launch = GraphLaunch(lambda: ran.append(1), CUDA)
    assert made.done[-2:] == ["cuGraphDestroy", "cuGraphUpload"], (
        "what can be launched is another object"
    )
    launch(77)
    launch(77)
    assert (ran, made.launched) == ([1], (6, 77))
    launch.destroy()
    assert made.done[-1] == "cuGraphExecDestroy"


@pytest.mark.parametrize(
    "refuses",
    [
        "cuStreamBeginCapture_v2",
        "cuStreamEndCapture",
        "cuGraphInstantiateWithFlags",
        "cudaGraphLaunch",
    ],
)
def test_what_can_not_be_launched_is_an_error_with_its_name(driver, refuses):
    driver(refuses=[refuses])
    with pytest.raises(CaptureError, match=r"^STREAM_CAPTURE_UNSUPPORTED$"):
        GraphLaunch(lambda: None, CUDA)(77)


def test_what_the_device_has_no_memory_for_is_given_back(driver):
    made = driver(refuses=["cuGraphUpload"])
    with pytest.raises(CaptureError):
        GraphLaunch(lambda: None, CUDA)
    assert "cuGraphExecDestroy" in made.done


@pytest.mark.parametrize(("version", "tried"), [("99.1", ["libcudart.so.99", "libcudart.so.99.1"])])
def test_without_torchs_runtime_nothing_is_launched(monkeypatch, version, tried):
    names = []

    def load(name):
        names.append(name)
        raise OSError

    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(ctypes, "CDLL", load)
    replays._runtime.cache_clear()
    with pytest.raises(
        CaptureError, match=r"cannot open torch's CUDA runtime: libcudart.so of CUDA 99\.1"
    ):
        replays._runtime()
    assert names == tried, "CUDA 11's has the minor number in its name"
