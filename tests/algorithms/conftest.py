"""Fixtures: a cuDNN that computes on the processor, in place of torch's."""

import pytest

from perfexp.algorithms import backends, fastest, forced, replays
from perfexp.algorithms import cudnn as library
from perfexp.algorithms import plan as plans
from perfexp.algorithms.captured import CaptureError
from tests.algorithms.scripted_cudnn import ScriptedCudnn


@pytest.fixture
def scripted(monkeypatch):
    """A function that puts a cuDNN of that script in torch's place."""

    def use(**script):
        replays.forget()
        made = ScriptedCudnn(**script)
        loaded = library.Library(made)
        monkeypatch.setattr(plans, "library", lambda: loaded)
        monkeypatch.setattr(plans, "_plans", {})
        monkeypatch.setattr(replays, "Launch", _refuses)
        for module in (library, plans):
            monkeypatch.setattr(module, "current_stream", lambda device: 77)
        for module in (backends, fastest, forced):
            monkeypatch.setattr(module, "why_no_cudnn", lambda device: None)
        return made

    return use


def _refuses(enqueue, device):
    raise CaptureError("there is no driver")
