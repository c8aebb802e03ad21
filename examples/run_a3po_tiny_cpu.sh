#!/usr/bin/env bash
# A-3PO end to end without a GPU, on two cores: sets up the environment, makes the tiny model, then trains it with four
# Megatron ranks (TP2 x PP2) fed by one SGLang server.
#   examples/run_a3po_tiny_cpu.sh [key=value ...]        for example: max_staleness=0, or proximal=recompute, or seed=1
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash tools/setup_environment.sh cpu
source "${VENV:-.venv}/bin/activate"
export CUDA_VISIBLE_DEVICES="" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export OMP_NUM_THREADS=1        # four ranks and a server share the cores
unset PYTHONDONTWRITEBYTECODE   # else every process compiles the libraries again

[[ " $*" == *" model="* ]] || python tools/make_tiny_model.py
command=(-m megatron_a3po train --config configs/tiny_cpu.yaml)
[[ " $*" == *" run_dir="* ]] || set -- "$@" "run_dir=runs/tiny_cpu/$(date +%Y%m%d-%H%M%S)"
run_dir=$(python "${command[@]}" --print-config "$@" | sed -n 's/^run_dir: //p')

# torchrun's own words go to a file: the rank that failed says on the screen what happened.
mkdir -p "$run_dir/logs"
torchrun --standalone --nproc-per-node 4 "${command[@]}" "$@" 2>> "$run_dir/logs/torchrun.log" &
trap 'kill -TERM $! 2> /dev/null' INT TERM HUP
status=0
wait $! || status=$?
wait $! 2> /dev/null || status=$? # a signal ends the first wait before torchrun has ended
if [ "$status" -ne 0 ]; then
  echo "the run did not finish (exit code $status); how its ranks ended: $run_dir/logs/torchrun.log" >&2
fi
exit "$status"
