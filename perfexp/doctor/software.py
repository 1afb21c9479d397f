"""Verdicts on Python, the operating system, torch and required packages.

`whole.diagnose` calls `software_findings`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from perfexp.doctor import Choice, Facts, Finding, fail, missing, ok, part, untested, warn

#: Versions that the tests run with, and versions that may work.
_TESTED_PYTHON, _UNTESTED_PYTHON = "3.11", ("3.12", "3.13")
#: Packages with a separate finding.
_OWN_LINE = ("torch", "torchvision", "mlflow")
#: Packages that are always listed with their version.
_NAMED = ("hydra-core", "omegaconf", "msgspec")
#: Remedy for a package with a wrong version.
_INSTALL = 'pip install -c constraints.txt -e ".[dev]"'


def software_findings(facts: Facts, choice: Choice) -> Iterator[Finding]:
    """Yield findings about the software, in the order of the report.

    `whole.diagnose` calls it.
    """
    machine = facts["machine"]
    yield _python(machine)
    yield _system(machine)
    yield from _survey(facts, choice)
    requirements = machine["requirements"] or {}
    yield from _torch(facts, requirements.get("torch", {}))
    yield from _torchvision(facts, requirements.get("torchvision", {}))
    yield _mlflow(machine, requirements.get("mlflow", {}))
    yield from _packages(machine["requirements"])


def build_name(torch: Mapping[str, Any]) -> str:
    """Return torch's build from the survey's facts, for example `CUDA 13.0 build`.

    The doctor names it if torch cannot use the driver's boards.
    """
    names = (
        f"{kind} {torch[key]} build"
        for kind, key in (("ROCm", "rocm"), ("CUDA", "cuda"))
        if torch.get(key)
    )
    return next(names, "CPU build")


def _python(machine: Mapping[str, Any]) -> Finding:
    """Return whether this Python version is supported."""
    version = machine["python"]
    minor = ".".join(version.split(".")[:2])
    if minor == _TESTED_PYTHON:
        return ok("Python", version)
    if minor in _UNTESTED_PYTHON:
        return untested("Python", f"{version}; perfexp is tested with {_TESTED_PYTHON} only")
    return fail(
        "Python", f"{version} is not supported", f"make an environment with Python {_TESTED_PYTHON}"
    )


def _system(machine: Mapping[str, Any]) -> Finding:
    """Return the operating system; all but Linux is untested."""
    observation = f"{machine['os']}, kernel {machine['kernel']}, {machine['machine']}"
    observation += f", in a container ({machine['container']})" if machine.get("container") else ""
    if machine["system"] != "Linux":
        return untested("system", f"{observation}; tested is Linux only")
    return ok("system", observation)


def _survey(facts: Facts, choice: Choice) -> Iterator[Finding]:
    """Yield the failure that ended the survey early; nothing if it is complete.

    A CPU can be measured without the parts about devices.
    """
    failure = facts["survey"]["failure"]
    if not failure:
        return
    remedy = (
        "an error of the driver or of torch: try nvidia-smi, then python -c "
        "'import torch; torch.zeros(1, device=\"cuda\")'; restart the machine if they hang"
    )
    # a run on the CPU does not use the devices that failed
    if failure["during"] in ("cuda", "mps", "clocks") and choice.name in ("cpu", "fake"):
        yield warn("devices", failure["text"], remedy)
    else:
        yield fail("devices", failure["text"], remedy)


def _torch(facts: Facts, required: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield whether torch can be imported and has a required version.

    Args:
        required: see `environment.requirements`; empty if perfexp itself is not installed.
    """
    torch = part(facts, "torch")
    if not torch:  # the survey's own finding has the reason
        return
    if error := torch.get("error"):
        yield fail(
            "torch",
            f"can't be imported: {error}",
            f"https://pytorch.org/get-started/locally, or {_INSTALL}",
        )
        return
    observation = f"{torch['version']}, {build_name(torch)}"
    if required.get("version") and not required["fits"]:
        yield fail("torch", f"{observation}; perfexp needs {required['wanted']}", _INSTALL)
    else:
        yield ok("torch", observation)


def _torchvision(facts: Facts, required: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield whether torchvision can be imported and fits torch."""
    torchvision = part(facts, "torchvision")
    if not torchvision or part(facts, "torch").get("error"):
        return
    if error := torchvision.get("error"):
        yield fail(
            "torchvision",
            f"can't be imported: {error}",
            f"install the one that fits torch: {_INSTALL}",
        )
    elif required.get("version") and not required["fits"]:
        yield fail(
            "torchvision", f"{required['version']}; perfexp needs {required['wanted']}", _INSTALL
        )
    elif not torchvision["torchvision_compiled_operators"]:
        yield warn(
            "torchvision",
            f"{torchvision['torchvision']}, built for another torch: "
            "its compiled operators are not there",
            "classification works; for the operators install the build that fits torch",
        )
    else:
        yield ok("torchvision", torchvision["torchvision"])


def _mlflow(machine: Mapping[str, Any], required: Mapping[str, Any]) -> Finding:
    """Return whether MLflow is installed, completely and in a required version."""
    version, skinny = (machine["packages"].get(name) for name in ("mlflow", "mlflow-skinny"))
    if version and not required.get("fits", True):
        return warn(
            "MLflow",
            f"{version}; perfexp needs {required['wanted']}",
            f"{_INSTALL}, or tracking=none",
        )
    if version:
        return ok("MLflow", f"{version}, the full package")
    if skinny:
        observation = f"mlflow-skinny {skinny}: it sends records, but has no user interface"
        return warn("MLflow", observation, "pip install mlflow")
    return missing(
        "MLflow", "not installed: records stay on disk", "pip install mlflow, or tracking=none"
    )


def _packages(requirements: Mapping[str, Any] | None) -> Iterator[Finding]:
    """Yield packages with a wrong version, or that all others fit.

    Args:
        requirements: see `environment.requirements`.
    """
    if requirements is None:
        yield warn(
            "packages", "perfexp itself is not installed: its requirements are unknown", _INSTALL
        )
        return
    optional = {
        name: requirement for name, requirement in requirements.items() if name not in _OWN_LINE
    }
    for name, requirement in optional.items():
        if not requirement["fits"]:
            version = requirement["version"] or "not installed"
            observation = f"{version}; perfexp needs {requirement['wanted'] or 'it'}"
            yield fail(name, observation, f"{_INSTALL}, or pip install '{name}'")
    if all(requirement["fits"] for requirement in optional.values()):
        named = [f"{name} {optional[name]['version']}" for name in _NAMED if name in optional]
        yield ok(
            "packages", ", ".join([*named, f"{len(optional) - len(named)} others"]) + ": all fit"
        )
