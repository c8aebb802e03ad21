#!/usr/bin/env bash
# Make the project's Python environment from a hashed lock, or update an older one.
#
#   tools/setup_environment.sh [cpu|gpu|auto]
#
# auto (the default) keeps the kind of an existing environment; otherwise it means gpu if there are a GPU and the CUDA
# toolkit, and cpu if not. The script may be interrupted, repeated, and started twice at once. Environment variables:
#
#   VENV           where the environment goes (default: .venv in this checkout)
#   PYTHON         the Python 3.12 to use (default: the first that works)
#   UV             the uv to use (default: the one on PATH, else installed into .uv)
#   UV_CACHE_DIR   where uv keeps its downloads (uv's own variable; its index and proxy variables work too)
#   MIN_FREE_GB    refuse to build an environment with less free disk (default: 9; 16 for gpu)
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$(realpath -m "${VENV:-$root/.venv}")"
state_file="$venv/.megatron_a3po"   # "building", or what the finished environment was made from
cache="${UV_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/uv}"
log="$venv.log"                     # uv's own output
uv_version=0.13.9
uv_job=""

say() { echo "[setup] $*" >&2; }
fail() {
  printf 'error: %s\nremedy: %s\n' "$1" "$2" >&2
  exit 1
}
trap '[ -z "$uv_job" ] || kill "$uv_job" 2>/dev/null; exit 130' INT TERM

choose_mode() {
  local mode="${1:-auto}" existing
  case "$mode" in
    cpu | gpu) ;;
    auto)
      existing="$(cut -d' ' -f1 "$state_file" 2>/dev/null || true)"
      if [ "$existing" = cpu ] || [ "$existing" = gpu ]; then
        mode="$existing"
      elif nvidia-smi -L >/dev/null 2>&1 && has_cuda_toolkit; then
        mode=gpu
      else
        mode=cpu
      fi ;;
    *) fail "unknown kind of environment '$mode'." "use cpu, gpu or auto." ;;
  esac
  echo "$mode"
}

has_cuda_toolkit() { command -v nvcc >/dev/null || [ -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ]; }

# Prints the base interpreter if $1 runs and is a Python 3.12 with C headers. Asked by running it: pyenv puts a
# python3.12 on PATH that exits 127 while another version is active.
python312() {
  "$1" -c '
import os, sys, sysconfig
headers = os.path.join(sysconfig.get_path("include"), "Python.h")
if sys.version_info[:2] != (3, 12) or not os.path.exists(headers):
    sys.exit(1)
print(getattr(sys, "_base_executable", None) or sys.executable)' 2>/dev/null
}

find_python() {
  local candidate
  if [ -n "${PYTHON:-}" ]; then
    python312 "$PYTHON" || fail "PYTHON=$PYTHON is not a working Python 3.12 with its C headers." "name another, or unset PYTHON."
    return
  fi
  for candidate in $(type -aP python3.12 python3 python) "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12.*/bin/python3.12; do
    python312 "$candidate" && return
  done
  return 0
}

# What the environment is made from: it is up to date when its state file says the same.
wanted_state() { echo "$mode $(cat "$root/requirements/$mode.lock" "$root/setup.py" | sha256sum | cut -d' ' -f1) $root $venv"; }
state() { cat "$state_file" 2>/dev/null || true; }
up_to_date() { [ "$(state)" = "$wanted" ] && python312 "$venv/bin/python" >/dev/null; }

check_machine() {
  [ "$(uname -sm)" = "Linux x86_64" ] \
    || fail "this is $(uname -sm); the locked packages are for Linux x86_64." "use such a machine or container."
  local glibc
  glibc="$(getconf GNU_LIBC_VERSION 2>/dev/null | cut -d' ' -f2)" || true
  [ -n "$glibc" ] && [ "$(printf '%s\n' 2.34 "$glibc" | sort -V | head -1)" = 2.34 ] \
    || fail "the C library is ${glibc:-not glibc}; the locked packages need glibc 2.34 or newer." \
            "use Debian 12, Ubuntu 22.04, RHEL 9 or newer, or a container."
  command -v "${CC:-cc}" >/dev/null || command -v gcc >/dev/null || command -v clang >/dev/null \
    || fail "no C compiler (one dependency, pycosat, is compiled here)." "apt-get install gcc libc6-dev, or dnf install gcc."
  [ "$mode" = cpu ] || has_cuda_toolkit \
    || fail "no CUDA toolkit (nvcc), with which transformer-engine-torch is compiled." "install CUDA 13, or run: $0 cpu"
}

free_mb() { # of the disk where this directory is or would be
  local dir="$1"
  while [ ! -d "$dir" ]; do dir="$(dirname "$dir")"; done
  df -Pk "$dir" | awk 'NR == 2 {print int($4 * 1.024 / 1000)}'
}

check_disk() { # directory, the variable that moves it
  local needed="${MIN_FREE_GB:-$([ "$mode" = gpu ] && echo 16 || echo 9)}" free
  free=$(($(free_mb "$1") / 1000))
  [ "$free" -ge "$needed" ] \
    || fail "$free GB free on the disk of $1, and the set-up needs $needed GB." \
            "free some, or point $2 at a directory on a larger disk. MIN_FREE_GB=0 tries all the same."
}

pip_setting() { sed -nE "s/^(global|install)\\.$2='(.*)'\$/\\2/p" <<<"$1" | head -1; }

# uv does not read pip's configuration, so a machine set up for pip alone hands its index and certificates over.
# Certificates otherwise come from the system, where a company's own are.
configure_uv() {
  local settings index cert
  settings="$("${python:-python3}" -m pip config list 2>/dev/null)" || true
  if [ -z "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}" ]; then
    index="${PIP_INDEX_URL:-$(pip_setting "$settings" index-url)}"
    [ -z "$index" ] || export UV_DEFAULT_INDEX="$index"
  fi
  if [ -z "${SSL_CERT_FILE:-}" ]; then
    cert="${PIP_CERT:-$(pip_setting "$settings" cert)}"
    if [ -n "$cert" ]; then
      export SSL_CERT_FILE="$cert"
    elif [ -e /etc/ssl/certs/ca-certificates.crt ] || [ -e /etc/pki/tls/certs/ca-bundle.crt ]; then
      export UV_SYSTEM_CERTS=1
    fi
  fi
  export UV_HTTP_TIMEOUT="${UV_HTTP_TIMEOUT:-180}"
}

install_uv() {
  uv="${UV:-$(command -v uv || echo "$root/.uv/bin/uv")}"
  command -v "$uv" >/dev/null && return
  [ -z "${UV:-}" ] || fail "UV=$UV does not exist." "unset UV, and a uv is installed."
  say "installing uv $uv_version into .uv"
  local unpacked
  unpacked="$(mktemp -d "$root/.uv.XXXXXX")"
  "${python:-python3}" -m pip install --target "$unpacked" "uv==$uv_version" >>"$log" 2>&1 \
    || curl -LsSf "https://astral.sh/uv/$uv_version/install.sh" 2>>"$log" | env UV_UNMANAGED_INSTALL="$unpacked/bin" sh >>"$log" 2>&1 \
    || true
  mkdir -p "$root/.uv/bin"
  mv "$unpacked/bin/uv" "$uv" 2>/dev/null || true
  rm -rf "$unpacked"
  [ -x "$uv" ] || fail "uv could not be installed, with pip or with its installer ($log)." \
                       "check the network, or install uv (https://docs.astral.sh/uv) so that it is on PATH."
}

# Runs uv with its output in the log and tells every 10 s that it is still at work.
run_uv() {
  local ticks=0 status=0 free_before
  free_before="$(free_mb "$cache")"
  "$uv" "$@" </dev/null >>"$log" 2>&1 &
  uv_job=$!
  while kill -0 "$uv_job" 2>/dev/null; do
    sleep 0.1
    ticks=$((ticks + 1))
    [ $((ticks % 100)) -ne 0 ] || say "  $((ticks / 10)) s, $((free_before - $(free_mb "$cache"))) MB of disk used"
  done
  wait "$uv_job" || status=$?
  uv_job=""
  return "$status"
}

explain_failure() { # from uv's last words: a line "error: ..." followed by "cause: ..." lines
  local words cause
  words="$(grep -E '^(error| +cause| +Caused by): ' "$log")" || true
  cause="$(sed -E 's/^(error| +cause| +Caused by): //' <<<"$words" | head -2 | sed ':all; N; s/\n/: /; t all' | cut -c-300)"
  if grep -qE 'No space left|os error 28' "$log"; then
    fail "the disk is full ($log)." "free some, or point VENV and UV_CACHE_DIR at directories on a larger disk, and run again."
  elif grep -qiE 'sending request|dns|connect|timed out|timeout|certificate|tunnel' <<<"$words"; then
    echo "$state_before" >"$state_file"   # uv fetches everything before it changes anything: an older environment still works
    fail "the package index cannot be reached: $cause ($log)." \
         "check the network; behind a proxy or with a mirror set HTTPS_PROXY, UV_DEFAULT_INDEX, SSL_CERT_FILE. Then run again: it resumes."
  fi
  fail "uv failed: ${cause:-no message} ($log)." "read the end of that log; remove the cause, and run again."
}

make_venv() {
  if [ -n "$python" ]; then
    say "Python 3.12: $python"
    run_uv venv --allow-existing --no-python-downloads --python "$python" "$venv" || explain_failure
  else
    say "Python 3.12: none here with its C headers; uv fetches one"
    run_uv venv --allow-existing --managed-python --python 3.12 "$venv" \
      || fail "there is no Python 3.12 with its C headers here, and uv could not fetch one ($log)." \
              "install one (apt-get install python3.12-dev, pyenv install 3.12, conda create python=3.12), or name it: PYTHON=/path/to/python3.12 $0"
  fi
}

install_packages() {
  local lock="$root/requirements/$mode.lock"
  if [ "$mode" = gpu ]; then
    # transformer-engine-torch imports torch while it is compiled: everything else first, then this one without isolation.
    local te='^transformer-engine-torch=='
    awk -v te="$te" '/^[a-zA-Z0-9]/ {is_te = $0 ~ te} !is_te' "$lock" >"$venv/without_te.lock"
    awk -v te="$te" '/^[a-zA-Z0-9]/ {is_te = $0 ~ te} is_te' "$lock" >"$venv/te.lock"
    run_uv pip sync --compile-bytecode --python "$venv/bin/python" --require-hashes "$venv/without_te.lock" || explain_failure
    say "compiling transformer-engine-torch (minutes)"
    NVTE_FRAMEWORK=pytorch MAX_JOBS="${MAX_JOBS:-16}" run_uv pip install --python "$venv/bin/python" --no-deps \
      --no-build-isolation --require-hashes -r "$venv/te.lock" || explain_failure
  else
    run_uv pip sync --compile-bytecode --python "$venv/bin/python" --require-hashes "$lock" || explain_failure
  fi
  run_uv pip install --python "$venv/bin/python" --no-deps --no-build-isolation -e "$root" || explain_failure
}

mode="$(choose_mode "${1:-}")"
wanted="$(wanted_state)"
up_to_date && exit 0

{ mkdir -p "$(dirname "$venv")" && exec 9>>"$venv.lock"; } 2>/dev/null \
  || fail "cannot write to $(dirname "$venv")." "point VENV at a directory that you may write to."
if ! flock -n 9; then
  say "another set-up of $venv is at work; waiting for it"
  flock 9
  ! up_to_date || exit 0
fi

started=$SECONDS
: >"$log"
check_machine
python="$(find_python)"

# A finished environment of this place is brought up to date; anything less is made anew from uv's cache.
if [[ "$(state)" == *" $root $venv" ]] && python312 "$venv/bin/python" >/dev/null; then
  say "bringing $venv ($mode) up to date"
else
  [ -z "$(ls -A "$venv" 2>/dev/null)" ] || [ -f "$state_file" ] \
    || fail "$venv exists, and was not made by this script." "move it away, or point VENV elsewhere."
  # Inside this checkout it can only be ours, from before the checkout was moved.
  [[ "$venv" == "$root"/* || "$(state)" =~ ^(building)?$ || "$(state)" == *" $root $venv" ]] \
    || fail "$venv is the environment of another checkout." "point VENV elsewhere, or remove it."
  check_disk "$venv" VENV
  check_disk "$cache" UV_CACHE_DIR
  say "building $venv ($mode): the first time about 3.5 GB of download, 7 GB of disk and 2 to 3 minutes"
  mkdir -p "$venv"
  echo building >"$state_file"
  find "$venv" -mindepth 1 ! -path "$state_file" -delete
fi
install_uv
configure_uv
state_before="$(state)"
echo building >"$state_file"
[ -x "$venv/bin/python" ] || make_venv
install_packages
echo "$wanted" >"$state_file"
say "ready ($mode) after $((SECONDS - started)) s; to enter it: source $venv/bin/activate"
