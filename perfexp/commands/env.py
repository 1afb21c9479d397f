"""perfexp env: print the facts of this machine that a record would contain, for bug reports."""

from __future__ import annotations

import json

from perfexp.commands.app import app
from perfexp.commands.output import echo
from perfexp.diagnosis import environment


@app.command()
def env() -> None:
    """Print the facts of this machine and its software as JSON."""
    echo(json.dumps(environment.collect(), indent=1))
