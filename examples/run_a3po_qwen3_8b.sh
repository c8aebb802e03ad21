#!/usr/bin/env bash
''':'
# A-3PO trains Qwen3-8B on DAPO-Math-17k, evaluated on AIME 2024 and MATH-500, as configs/qwen3_8b_dapo_math.yaml says.
# This file is a shell script and the Python program that it starts. On one node of 8 GPUs, four train and four serve:
#   bash examples/run_a3po_qwen3_8b.sh [--dry-run] [key=value ...]
#   torchrun --nproc-per-node 4 examples/run_a3po_qwen3_8b.sh [key=value ...]
# On several nodes with shared storage, on each of them, with the same secret in A3PO_SERVER_KEY:
#   torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 examples/run_a3po_qwen3_8b.sh
# and, where a node's own name resolves to 127.0.1.1 there, as on Debian, with its address in NODE_ADDRESS.
# DEVICE=cpu before any of them: the same with a tiny model, without a GPU.
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
  unset PYTHONDONTWRITEBYTECODE   # else every process compiles the libraries again
fi
[[ " $* " != *" --dry-run "* ]] || exec python "$script" "$@"
python "$script" --dry-run "$@" # says what is missing without torchrun's words around it
if [ "$device" = cuda ] && [ -z "$has_gpu" ]; then
  echo "error: there is no GPU here; on such a machine DEVICE=cpu trains a tiny model" >&2
  exit 2
fi
exec torchrun --standalone --nproc-per-node 4 "$script" "$@"
# To bash, what follows is a text that nobody reads; to Python, what is above.
: <<'# the end' '''# '

import os
import sys
from pathlib import Path

from megatron_a3po.node import Recipe, run_node
from megatron_a3po.runtime.processes import end_process

DATASET = "--repo-type dataset --local-dir"
DOWNLOADS = {
    "models/Qwen3-8B": "hf download Qwen/Qwen3-8B --local-dir models/Qwen3-8B",
    "data/dapo-math-17k.parquet": f"hf download BytedTsinghua-SIA/DAPO-Math-17k data/dapo-math-17k.parquet {DATASET} .",
    "data/aime-2024.parquet": f"hf download BytedTsinghua-SIA/AIME-2024 data/aime-2024.parquet {DATASET} .",
    "data/math500/test.jsonl": f"hf download HuggingFaceH4/MATH-500 test.jsonl {DATASET} data/math500",
}
QWEN3_8B = Recipe(
    config="configs/qwen3_8b_dapo_math.yaml",
    model="models/Qwen3-8B",
    ranks_per_node=4,
    servers_per_node=4,
    downloads=DOWNLOADS,
    made={},
)
TINY = Recipe(
    config="configs/tiny_cpu_dataset.yaml",
    model="models/tiny_qwen3",
    ranks_per_node=4,
    servers_per_node=1,
    downloads={},
    made={
        "models/tiny_qwen3": ["tools/make_tiny_model.py"],
        "data/tiny_words": ["tools/make_tiny_dataset.py"],
    },
)

os.chdir(Path(__file__).resolve().parents[1])
RECIPES = {"cpu": TINY, "cuda": QWEN3_8B}
if (device := os.environ.get("DEVICE", "cuda")) not in RECIPES:
    sys.exit(f"error: DEVICE={device}; use cpu or cuda")
end_process(run_node(RECIPES[device], sys.argv[1:]))
# the end
