#!/usr/bin/env bash
''':'
# A-3PO trains Qwen3-8B on DAPO-Math-17k, evaluated on AIME 2024 and MATH-500, as configs/qwen3_8b_dapo_math.yaml says.
# This file is both a shell script and the Python program that it starts, so that torchrun takes it too.
# On one node of 8 GPUs, four train and four serve:
#   bash examples/run_a3po_qwen3_8b.sh [--dry-run] [key=value ...]
#   torchrun --nproc-per-node 4 examples/run_a3po_qwen3_8b.sh [key=value ...]
# On several nodes with shared storage, run this on each of them, with the same secret in A3PO_SERVER_KEY:
#   torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 examples/run_a3po_qwen3_8b.sh
# Where a node's host name resolves to 127.0.1.1, as on Debian, set NODE_ADDRESS to its address in the network.
# With DEVICE=cpu in the environment, each of these commands trains a tiny model without a GPU.
set -euo pipefail
script=$(readlink -f "${BASH_SOURCE[0]}")
cd "$(dirname "$script")/.."
device=${DEVICE:-cuda}
[[ "$device" =~ ^(cpu|cuda)$ ]] || { echo "error: DEVICE=$device; use cpu or cuda" >&2; exit 2; }
has_gpu=$(nvidia-smi -L 2> /dev/null || true)
bash tools/setup_environment.sh "$([ "$device" = cuda ] && [ -n "$has_gpu" ] && echo gpu || echo cpu)"
source "${VENV:-.venv}/bin/activate"
export TOKENIZERS_PARALLELISM=false
if [ "$device" = cpu ]; then
  export CUDA_VISIBLE_DEVICES="" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
  unset PYTHONDONTWRITEBYTECODE   # otherwise every process compiles the libraries again
fi
[[ " $* " != *" --dry-run "* ]] || exec python "$script" "$@"
python "$script" --dry-run "$@" # says what is missing, without torchrun's own report around it
if [ "$device" = cuda ] && [ -z "$has_gpu" ]; then
  echo "error: there is no GPU here; on such a machine DEVICE=cpu trains a tiny model" >&2
  exit 2
fi
exec torchrun --standalone --nproc-per-node 4 "$script" "$@"
# bash reads what follows as a string that it ignores; Python reads what stands above as one.
: <<'# the end' '''# '

import os
import sys
from pathlib import Path

from megatron_a3po.node.run import main

os.chdir(Path(__file__).resolve().parents[1])
main(sys.argv[1:])
# the end
