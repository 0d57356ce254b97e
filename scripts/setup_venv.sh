#!/usr/bin/env bash
# Makes the virtual environment VENV with a Python that the lock was tested on: scripts/setup_venv.sh VENV [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/.."

# shellcheck source=scripts/apt.sh
source scripts/apt.sh

venv=$1
python=${2:-}
supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' >/dev/null 2>&1; }

if [[ -z $python ]]; then
    for candidate in python3.11 python3 python3.12; do
        if supported "$candidate"; then
            python=$candidate
            break
        fi
    done
fi
if [[ -z $python ]] || ! supported "$python"; then
    echo "error: no Python 3.11 or 3.12 found${python:+ ($python is neither)}" >&2
    echo "  fix: install python3.11, or name one: make setup PYTHON=/path/to/python3.11" >&2
    exit 3
fi
if ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
    apt_install "$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
fi
"$python" -m venv "$venv"
"$venv/bin/python" -V
