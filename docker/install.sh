#!/bin/sh
# For the Dockerfile, in a virtual environment that is first on the path:
#   install.sh LOCK...               install the packages of /requirements/LOCK.txt, each with a hash in it
#   install.sh --perfexp FACT...     install perfexp's wheel, and leave facts of the image for its records
# Byte code does not depend on times of files, which a build for a fixed date changes.
set -eu
pip() { python -m pip --no-cache-dir --disable-pip-version-check "$@"; }
compile() { python -m compileall -q -j 0 --invalidation-mode unchecked-hash "$@"; }
packages=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

if [ "$1" = --perfexp ]; then
    shift
    pip install --no-deps --no-index --no-compile /opt/dist/perfexp-*.whl
    compile "$packages/perfexp"
    printf '%s\n' "$@" >/etc/perfexp-image
    install -d -o 10001 -g 10001 /measurements
    exit
fi
# source packages are built with the locked tools; TORCH_SOURCE is empty or has options of pip
pip install --no-compile --require-hashes -r /requirements/build.txt
for lock in "$@"; do
    set -- "$@" -r "/requirements/$lock.txt"
    shift
done
# shellcheck disable=SC2086
pip install --no-compile --require-hashes --no-build-isolation ${TORCH_SOURCE:-} "$@"
compile "$packages" >/dev/null || true # templates, and files for other Pythons, do not compile
