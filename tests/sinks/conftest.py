"""Fixtures for the tests of the sinks."""

from __future__ import annotations

import pytest
from builders import Builder


@pytest.fixture
def build() -> Builder:
    return Builder()
