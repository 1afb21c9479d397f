"""Container engines: the command that runs perfexp in an image named by the user.

`perfexp reproduce --image` calls it. Images are not trusted: a container sees few files, and no
network.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from perfexp.doctor.environment import IMAGE_VARIABLE
from perfexp.errors import UserError
from perfexp.host import locks

ENGINES = ("docker", "podman")
#: Limit for one engine query.
_QUERY_SECONDS = 60.0
#: Limits for containers with GPUs: page-locked memory for transfers, and NCCL's thread stacks.
_LIMITS = ("--ulimit=memlock=-1", "--ulimit=stack=67108864")


def engine_path(name: str | None) -> str:
    """Return the path of a container engine, by default the first that is installed.

    `perfexp reproduce` calls it.

    Args:
        name: `docker` or `podman`; None for any.

    Raises:
        UserError: no engine is installed.
    """
    names = (name,) if name else ENGINES
    engine = next((path for candidate in names if (path := shutil.which(candidate))), None)
    if engine is None:
        raise UserError(
            f"No container engine found ({', '.join(names)}). Install one, or name it with "
            "--engine."
        )
    return engine


def image_digest(engine: str, image: str) -> str:
    """Return the digest of a local image.

    The container runs this image, whatever its name means later.

    Raises:
        UserError: this machine has no such image.
    """
    if image.startswith("-"):
        raise UserError(
            f"--image {image}: this is an option of the engine, not the name of an image."
        )
    query = [engine, "image", "inspect", "--format", "{{.Id}}", image]
    try:
        answer = subprocess.run(
            query, capture_output=True, text=True, timeout=_QUERY_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{engine} does not answer: {error}.") from error
    if answer.returncode or not answer.stdout.strip():
        why = (answer.stderr.strip().splitlines() or ["no answer"])[-1]
        raise UserError(f"--image {image}: {why}. Pull or build the image first.")
    digest = answer.stdout.strip().splitlines()[-1]
    if ":" in digest:
        return digest
    return f"sha256:{digest}"


def command(
    engine: str,
    image: str,
    digest: str,
    arguments: Sequence[str],
    *,
    writable: Path,
    readable: Sequence[Path],
    has_gpus: bool,
) -> list[str]:
    """Return the command that runs perfexp with some arguments in an image.

    The container has the user's rights and no network. It sees `writable` and `readable` under
    their own paths, and the device locks, which keep measurements apart; it sees no other host
    files.

    Args:
        engine: path of the engine.
        image: name of the image, which is recorded with the digest.
        arguments: words after `perfexp`.
        has_gpus: whether the container needs the host's GPUs.
    """
    is_podman = Path(engine).name == "podman"
    gpus = list[str]()
    if has_gpus:
        gpus = ["--device=nvidia.com/gpu=all" if is_podman else "--gpus=all", *_LIMITS]
    user_option = f"--user={os.getuid()}:{os.getgid()}"
    if is_podman and os.getuid():
        user_option = "--userns=keep-id"
    mounts = [_mount(writable), _mount(locks.private_folder())]
    mounts += [_mount(path, ",readonly") for path in readable]
    environment = [f"--env={IMAGE_VARIABLE}={image}@{digest}", "--env=HOME=/tmp"]
    command = [engine, "run", "--rm", "--network=none", "--ipc=host", *gpus, user_option, *mounts]
    command += [*environment, "--entrypoint=perfexp", digest]
    return [*command, *arguments]


def run(argv: Sequence[str]) -> int:
    """Run a command on this process's terminal and return its exit code.

    `perfexp reproduce` calls it.

    Raises:
        UserError: its program cannot be started.
    """
    try:
        return subprocess.run(list(argv), check=False).returncode
    except OSError as error:
        raise UserError(f"{argv[0]} can't be started: {error.strerror}.") from error


def _mount(path: Path, access: str = "") -> str:
    """Return the engine's option for a folder that the container sees under its own path.

    Raises:
        UserError: the path has a character that engines cannot mount.
    """
    absolute = path.absolute()
    if "," in str(absolute) or '"' in str(absolute):
        raise UserError(
            f"{absolute}: an engine cannot mount a path with a comma or a quotation mark. "
            "Rename it."
        )
    return f"--mount=type=bind,source={absolute},target={absolute}{access}"
