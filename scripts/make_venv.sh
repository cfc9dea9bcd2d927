#!/usr/bin/env bash
# Makes a virtual environment with torch in it: make_venv.sh FOLDER TORCH_SPEC [pip arguments for torch].
# Needs Python 3.11 or later ($PYTHON, else the first one found). On Debian and Ubuntu a missing venv module is installed
# when this user may.
set -euo pipefail
venv=$1 torch=$2
shift 2

fail() { echo "error: $*" >&2; exit 1; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  fail "no Python 3.11 or later found${PYTHON:+ at $PYTHON}; install one, or name it: make PYTHON=/path/to/python3.12"
}

install_venv_module() {
  local version=$1 sudo=()
  [ "$(id -u)" = 0 ] || sudo=(sudo -n)
  command -v apt-get >/dev/null && "${sudo[@]}" true 2>/dev/null ||
    fail "Python's venv module is incomplete (no ensurepip): install python$version-venv, then run this again"
  echo "installing python$version-venv with apt-get ..."
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq update >/dev/null || true
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y "python$version-venv" >/dev/null ||
    fail "apt-get could not install python$version-venv; install it, then run this again"
}

python=$(find_python)
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  "$python" -c 'import ensurepip, venv' 2>/dev/null || install_venv_module "$version"
  echo "making $venv with Python $version ..."
  "$python" -m venv --clear "$venv"
fi
if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
  echo "torch is the largest part: minutes on a slow network"
  "$(dirname "$0")/pip_install.sh" "$venv" "$torch" "$torch" "$@"
fi
