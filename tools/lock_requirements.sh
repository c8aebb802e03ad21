#!/usr/bin/env bash
# Rewrites requirements/{gpu,cpu,docs}.lock from the .in files. Versions already in the locks stay; pass --upgrade to move them.
#
#   tools/lock_requirements.sh [--upgrade | --upgrade-package NAME]...
#
# cpu.lock is constrained by gpu.lock, so a package that is in both has one version. docs.lock is an environment of its
# own, for any machine with Python 3.11 or newer.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../requirements"
uv="${UV:-$(command -v uv || echo ../.uv/bin/uv)}"

compile() {
  "$uv" pip compile --quiet --no-header --generate-hashes --python-version 3.12 --python-platform x86_64-manylinux_2_34 \
    --overrides overrides.txt --excludes excludes-bridge.txt "$@"
}

compile "$@" gpu.in dev.in -o gpu.lock
compile "$@" --excludes excludes-cpu.txt -c gpu.lock cpu.in dev.in -o cpu.lock
"$uv" pip compile --quiet --no-header --generate-hashes --universal --python-version 3.11 "$@" docs.in -o docs.lock

# A lock must install from whatever index its user has configured.
if grep -nE '://|--index|--extra-index|--find-links' gpu.lock cpu.lock docs.lock; then
  echo "error: a lock names an index. remedy: remove the index from the .in files and lock again." >&2
  exit 1
fi
