"""MLflow: a record, or the summary of a sweep, replayed into a tracking store; MLflow is imported when one is sent."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfexp.errors import PerfexpError

if TYPE_CHECKING:
    from mlflow import MlflowClient
