#!/usr/bin/env bash
# A-3PO end to end without a GPU, on two cores: sets up the environment, makes the tiny model, then trains it with four
# Megatron ranks (TP2 x PP2) fed by one SGLang server.
#   examples/run_a3po_tiny_cpu.sh [key=value ...]        for example: max_staleness=0, or proximal=recompute, or seed=1
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

trap 'exit 130' INT   # until torchrun runs: a program that swallows Ctrl-C must not make the script go on
bash tools/setup_environment.sh cpu
source "${VENV:-.venv}/bin/activate"
export CUDA_VISIBLE_DEVICES="" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export OMP_NUM_THREADS=1        # four ranks and a server share the cores
unset PYTHONDONTWRITEBYTECODE   # else every process compiles the libraries again

[[ " $*" == *" model="* || -e models/tiny_qwen3/.warm_start.json ]] || python tools/make_tiny_model.py
[[ " $*" == *" run_dir="* ]] || set -- "$@" "run_dir=runs/tiny_cpu/$(date +%Y%m%d-%H%M%S)"
for argument in "$@"; do
  case $argument in run_dir=*) run_dir=${argument#run_dir=} ;; esac
done
command=(-m megatron_a3po train --config configs/tiny_cpu.yaml "$@")
WORLD_SIZE=4 python "${command[@]}" --print-config > /dev/null

# torchrun's own words go to a file: the rank that failed says on the screen what happened.
mkdir -p "$run_dir/logs"
log=$run_dir/logs/torchrun.log
earlier=$(stat -c %s "$log" 2> /dev/null || echo 0)
setpriv --pdeathsig TERM torchrun --standalone --nproc-per-node 4 --log-dir "$run_dir/logs" "${command[@]}" 2>> "$log" &
torchrun=$!
trap 'kill -TERM $torchrun 2> /dev/null' INT TERM HUP
status=0
while kill -0 $torchrun 2> /dev/null; do # a signal ends a wait before torchrun has ended
  status=0
  wait $torchrun || status=$?
done
if [ "$status" -ne 0 ]; then
  tail -c +$((earlier + 1)) "$log" | grep -oE 'failed \(exitcode: -?[0-9]+\) local_rank: [0-9]+' >&2 || true
  echo "the run did not finish (exit code $status); torchrun's log: $log; to go on: the same with run_dir=$run_dir" >&2
fi
exit "$status"
