"""Fixtures: a cuDNN that computes on the processor, in place of torch's."""

from functools import partial

import pytest

from tests.convolution.scripted_cudnn import in_place


@pytest.fixture
def scripted(monkeypatch):
    """A function that puts a cuDNN of that script in torch's place."""
    return partial(in_place, monkeypatch)
