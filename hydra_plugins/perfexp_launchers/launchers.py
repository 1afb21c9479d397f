"""Launchers that compose the runs of a sweep; perfexp hands them to jobs or GPUs after the last one is composed.

Hydra imports this module at each start, and refuses a key that the option's file does not have.
"""

from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher


class SlurmLauncher(BasicLauncher):
    """Composes every run here, one by one; `perfexp.run.cluster.campaign` reads its settings."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.settings = settings


class LocalLauncher(SlurmLauncher):
    """Composes every run here, one by one; `perfexp.run.cluster.local_queue` reads its settings."""
