#!/usr/bin/env bash
# Installs the distribution's packages that sandboxes, vLLM and DeepSpeed need, and only the missing ones.
# With the second argument `browser`, also what tests of pages need. As root it installs them (Debian, Ubuntu); otherwise it prints the one command to run and exits 3.
set -euo pipefail
cd "$(dirname "$0")/.."

# shellcheck source=scripts/apt.sh
source scripts/apt.sh

python=${1:-python3}
missing=()
need() { # need PACKAGE COMMAND...: the package is missing when COMMAND fails
    local package=$1
    shift
    "$@" >/dev/null 2>&1 || missing+=("$package")
}
has() { command -v "$1" || PATH="$PATH:/usr/sbin:/sbin" command -v "$1"; }
library() { ldconfig -p 2>/dev/null | grep -q "$1" || PATH="$PATH:/usr/sbin:/sbin" ldconfig -p | grep -q "$1"; }
headers() { "$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))'; }

need docker.io has dockerd       # sandboxes, first choice
need bubblewrap has bwrap        # sandboxes, second choice
need crun has crun               # starts a container with a third of the CPU time of runc
need mmdebstrap has mmdebstrap   # builds the sandbox image without a registry
need g++ has g++                 # torch and DeepSpeed compile small CPU kernels at first use
need ninja-build has ninja        # ... with ninja, which is looked for on PATH
need python3-dev headers         # ... against Python's headers
need libnuma1 library libnuma.so.1  # vLLM's CPU build links to it
need libgomp1 library libgomp.so.1
need procps has ps
need iproute2 has ip             # network namespaces: make cluster-demo, and tests of runs on several hosts
if [[ ${2:-} == browser ]]; then
    need chromium has chromium  # tests of the pages of agentrl view
fi
need redis-tools has redis-check-rdb  # the program of redis-server, without its service: a run starts its own server

if ((${#missing[@]} == 0)); then
    exit 0
fi
apt_install "${missing[@]}"
echo "system packages: installed ${missing[*]}"
