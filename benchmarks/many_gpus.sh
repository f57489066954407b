#!/usr/bin/env bash
# Everything that only a host with 4 or 8 GPUs can show, each step with a deadline:
#
#     benchmarks/many_gpus.sh FOLDER [NUM_GPUS]
#
# The steps' output goes to files in FOLDER; a line for each step, with its exit status, to stdout.
# A step that fails or is late does not stop the others; the script then ends with 1.
set -uo pipefail
cd "$(dirname "$0")/.."
if [ $# -lt 1 ]; then
  sed -n '2,7s/^# \{0,1\}//p' "$0"
  exit 2
fi
folder=$1
count=${2:-8}
half=$((count / 2))
python=${PYTHON:-python3}
# A failed attempt at multicast can put the GPUs of a host out of service.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
mkdir -p "$folder"
worst=0

step() { # NAME SECONDS COMMAND...
  local name=$1 limit=$2 started=$SECONDS status
  shift 2
  timeout --kill-after 10 "$limit" "$@" >"$folder/$name.txt" 2>&1
  status=$?
  [ $status -eq 0 ] || worst=1
  printf '%-24s exit %-3d %4d s\n' "$name" $status $((SECONDS - started))
}
vcli() { step "$1" "$2" "$python" -m vcli.cli "${@:3}"; }
offline() { vcli "$1" "$2" bench offline --workload all --repeat 2 --json "${@:3}"; }

vcli topo-tp 10 topo -tp "$count"
vcli topo-dp 10 topo -tp "$half" -dp 2
vcli doctor 60 doctor -tp "$count"
step all-reduce 60 "$python" benchmarks/gpu_all_reduce.py --devices "$(seq -s, 0 $((count - 1)))"
step all-reduce-half 60 "$python" benchmarks/gpu_all_reduce.py --devices "$(seq -s, 0 $((half - 1)))"
offline 8b-half 120 --shape llama8b -tp "$half" --rpc-calls 300
offline 8b 120 --shape llama8b -tp "$count" --rpc-calls 300
offline moe-ep 240 --shape qwen30b_moe -tp "$count" --enable-expert-parallel
step tests-doctor 180 "$python" -m pytest -q tests/gpu/test_doctor_gpu.py
step tests-symmetric 300 "$python" -m pytest -q tests/gpu/test_symmetric.py
step tests-logits 300 "$python" -m pytest -q tests/gpu/test_logits.py -k "$half or $count"
step tests-kill 300 "$python" -m pytest -q tests/gpu/test_serve_gpu.py
exit $worst
