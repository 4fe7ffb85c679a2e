#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Set up what the Makefile's targets need. A second call finds it done.
#
#   tools/setup.sh           .venv: the packages of requirements.txt, and this project
#                            with its C++ extension, built in place
#   tools/setup.sh classic   .venv-classic: this project with its extra "classic"
#
# PYTHON=/path/to/python3.12 chooses the interpreter. pip's own settings (PIP_...)
# hold as usual. Everything else on the machine stays as it is, but for the system
# packages in the list below: those are installed with apt if they are missing.
set -eu
cd "$(dirname "$0")/.."

profile=${1:-}
case $profile in
"")
    venv=.venv
    inputs="requirements.txt tools/setup.sh setup.py pyproject.toml"
    inputs="$inputs $(ls csrc/*.h csrc/*.cc)"  # Edited? Then it is built again.
    ;;
classic) venv=.venv-classic inputs="requirements.txt tools/setup.sh setup.py" ;;
*) echo "usage: tools/setup.sh [classic]" >&2; exit 2 ;;
esac
stamp=$venv/setup.stamp
log=$venv/setup.log
missing=""  # System packages to install, by their names in Debian and Ubuntu.

say() { echo "setup: $*"; }
fail() { echo "setup: error: $*" >&2; exit 1; }

# The list of system packages: what to install when a command does not succeed.
find_missing_packages() {
    # "Python 3.12.1" -> python3.12-venv
    need "$(echo "$version" | sed -E 's/Python ([0-9]+\.[0-9]+).*/python\1-venv/')" \
        "$python" -c "import ensurepip, venv"
    need g++ command -v c++
    if [ "$profile" = "" ]; then  # libtorchbeast.
        need "$(echo "$version" | sed -E 's/Python ([0-9]+\.[0-9]+).*/python\1-dev/')" \
            "$python" -c "import os, sysconfig; paths = sysconfig.get_paths(); \
os.stat(paths['include'] + '/Python.h')"
        need pkg-config command -v pkg-config
        need libgrpc++-dev pkg-config --exists grpc++
    else  # atari-py is compiled from source.
        need cmake command -v cmake
        need zlib1g-dev test -e /usr/include/zlib.h
    fi
}

need() {
    package=$1
    shift
    "$@" >/dev/null 2>&1 || missing="$missing $package"
}

install_missing_packages() {
    [ -n "$missing" ] || return 0
    command -v apt-get >/dev/null || fail "this machine lacks what Debian" \
        "calls$missing: install it with the system's package manager, then try again."
    sudo=""
    if [ "$(id -u)" != 0 ]; then
        command -v sudo >/dev/null || fail "system packages are missing and there is" \
            "no sudo: as root, run: apt-get install$missing"
        sudo=sudo
    fi
    say "installing system packages: $sudo apt-get install$missing"
    $sudo apt-get -qq update || say "apt-get update failed; going on without it"
    # shellcheck disable=SC2086  # A list of packages.
    $sudo apt-get -qq install -y $missing || fail "apt-get could not install$missing" \
        "(see above). No network? Then connect, or install them by hand; try again."
}

supported() {
    case $1 in
    "Python 3.1"[0-3].*) ;;
    *) return 1 ;;
    esac
}

# Sets $python, and $version to what it calls itself, such as "Python 3.12.1".
find_python() {
    if [ -n "${PYTHON:-}" ]; then
        set -- "$PYTHON"
    else
        set -- python3 python3.13 python3.12 python3.11 python3.10
    fi
    found=""
    for python in "$@"; do
        version=$("$python" -V 2>&1) || continue
        if supported "$version"; then return; fi
        found="$found $python ($version)"
    done
    fail "needs Python 3.10, 3.11, 3.12 or 3.13; found:${found:- none that runs}." \
        "Install one, or name one: make setup PYTHON=/path/to/python3.12"
}

# True if $venv works and is made of a Python as wanted. Sets $python and $version.
venv_is_usable() {
    python=$venv/bin/python
    version=$("$python" -V 2>&1) && supported "$version" || return 1
    "$python" -c "import pip" 2>/dev/null || return 1
    [ -z "${PYTHON:-}" ] || [ "$version" = "$("$PYTHON" -V 2>&1)" ]
}

pip_install() {
    if "$venv/bin/python" -m pip --disable-pip-version-check install --no-input \
        "$@" 2>"$log"; then
        return
    fi
    if grep -qiE "connection broken|name resolution|unreachable|timed out|max retries" \
        "$log"; then
        fail "pip cannot reach its package index. No network? Connect (behind a proxy:" \
            "set HTTPS_PROXY), then run the same command again. pip's words: $log"
    fi
    grep -i "^ *error" "$log" >&2 || true
    fail "pip failed: the reason is above, all of its words in $log. Remove the cause," \
        "then run the same command again."
}

# What the result depends on. The stamp is a copy of it.
describe() {
    # shellcheck disable=SC2086  # A list of files.
    "$venv/bin/python" -V 2>&1 && cat $inputs
}

is_done() {
    [ -f "$stamp" ] && [ "$(describe)" = "$(cat "$stamp")" ] || return 1
    [ -z "${PYTHON:-}" ] || [ "$("$PYTHON" -V 2>&1)" = "$(head -n 1 "$stamp")" ]
}

if is_done; then exit 0; fi

venv_is_usable || find_python
find_missing_packages
install_missing_packages
if [ "$python" != "$venv/bin/python" ]; then
    say "making $venv with $version"
    rm -rf "$venv"
    "$python" -m venv "$venv" || fail "$python cannot make a virtual environment (see above)"
fi
rm -f "$stamp"
if [ "$profile" = classic ]; then
    say "installing this project and classic gym into $venv; compiling atari-py"
    # Classic gym is older than numpy 2, and [classic] says which numpy it takes.
    grep -v "^numpy==" requirements.txt >"$venv/constraints.txt"
    pip_install -c "$venv/constraints.txt" -e ".[classic]" pytest pytest-timeout
else
    say "installing requirements.txt into $venv (PyTorch's CUDA build is some GB)"
    pip_install -r requirements.txt
    say "building the C++ extension"
    # With what is installed already: nothing is downloaded to build it.
    TORCHBEAST_REQUIRE_EXTENSION=1 pip_install --no-build-isolation --no-deps -e .
fi
describe >"$stamp"
say "done: $venv"
