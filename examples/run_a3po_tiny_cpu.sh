#!/usr/bin/env bash
# A-3PO end to end without a GPU, on two cores: sets up the environment, makes the tiny model, then trains it with four
# Megatron ranks (TP2 x PP2) fed by one SGLang server.
#   examples/run_a3po_tiny_cpu.sh [key=value ...]        for example: max_staleness=0, or proximal=recompute, or seed=1
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

config=configs/tiny_cpu.yaml
bash tools/setup_environment.sh cpu
source "${VENV:-.venv}/bin/activate"
export CUDA_VISIBLE_DEVICES="" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export OMP_NUM_THREADS=1        # four ranks and a server share the cores
export TORCHDYNAMO_DISABLE=1    # compiling Megatron's small fusions takes longer than the run
unset PYTHONDONTWRITEBYTECODE   # every process would compile the libraries again

overrides=("$@")
[[ " $*" == *" run_dir="* ]] || overrides+=("run_dir=runs/tiny_cpu/$(date +%Y%m%d-%H%M%S)")
[[ " $*" == *" model="* ]] || python tools/make_tiny_model.py
python -m megatron_a3po train --config "$config" --check-config "${overrides[@]}"

# torchrun's own words about a failure go to a file: the failed rank has said on the screen what happened.
torchrun_log=$(mktemp)
trap 'rm -f "$torchrun_log"' EXIT
status=0
torchrun --standalone --nproc-per-node 4 -m megatron_a3po train --config "$config" "${overrides[@]}" \
  2> "$torchrun_log" || status=$?
[ "$status" -eq 0 ] || { tail -n 40 "$torchrun_log" >&2; echo "the run failed with exit code $status" >&2; }
exit "$status"
