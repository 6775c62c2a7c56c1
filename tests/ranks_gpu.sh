#!/usr/bin/env bash
# ranks_gpu.sh BUILD_DIR - ranks on GPUs: tests/test_together.c, runs of the trainer with one rank and with
# two, and ranks that are stopped, killed, or hang. They copy from each other's memory; a third of the runs go
# by NCCL. BUILD_DIR has test_together_cuda and train_cuda. NCCL refuses to share a GPU: where there is one
# alone, tests/nccl_fake.c takes its place.
here=$(cd "$(dirname "$0")" && pwd) || exit 1
build=$(cd "$1" && pwd) || exit 1
. "$here/lib.sh"
gpus=$(nvidia-smi -L 2> /dev/null | wc -l)
if [ "$gpus" = 0 ]; then skip "ranks on GPUs: no CUDA device"; closing_line; exit; fi
most=$((gpus < 4 ? gpus : 4))
if [ "$gpus" = 1 ]; then
  most=4
  mkdir -p "$build/nccl"
  [ -f "$build/nccl/libnccl.so.2" ] ||
    gcc -O2 -std=gnu99 -w -shared -fPIC "-I${CUDA_HOME:-/usr/local/cuda}/include" "$here/nccl_fake.c" \
      -o "$build/nccl/libnccl.so.2" "-L${CUDA_HOME:-/usr/local/cuda}/lib64" -lcudart_static -ldl -lrt \
      -lpthread -lm || exit 1
  export LD_LIBRARY_PATH=$build/nccl${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi
"$build/test_together_cuda" quick $most > "$build/together.log" 2>&1
cat "$build/together.log"
check "test_together_cuda" grep -qE '^[1-9][0-9]* passed, 0 failed' "$build/together.log"

out=$(mktemp -d) && cd "$out" || exit 1
trap 'rm -rf "$out"' EXIT
sample_text > text.txt
train=$build/train_cuda
options=(--data text.txt --device cuda --layers 4 --heads 2 --d-model 128 --vocab-size 400 --batch-size 2
  --seq-len 128 --steps 100 --seed 5 --dropout 0.1 --eval-every 50 --save-every 50)
run() { timeout 120 "$train" "${options[@]}" "$@" > out 2> err < /dev/null; } # ARGUMENT...
same() { # NAME WHAT: the file of the run with one rank
  check "$2: $(tail -n 1 err)" cmp results/$1_step100.safetensors results/one_${1#*_}_step100.safetensors
}

# 100 steps of five techniques, all shards
for technique in fp32 bf16_flash bf16_flash_window64 fp16_checkpointing_chunked fp8_flash; do
  run --dataset one --technique $technique --accumulate 2
  for shard in none optimizer gradients; do
    rm -rf results/two_*
    run --dataset two --technique $technique --ranks 2 --shard $shard $([ $shard = optimizer ] && echo --nccl)
    mv results/two_*_step100.safetensors results/two_${technique}_step100.safetensors 2> /dev/null
    same two_$technique "$technique, 2 ranks, shard $shard"
  done
done
for first in 2 1; do # a run goes on with another number of ranks
  rm -rf results/moved_*
  for ranks in $first $((3 - first)); do
    run --dataset moved --technique bf16_flash --ranks $ranks --accumulate $((2 / ranks)) \
      $([ $ranks = $first ] && echo --steps 50 || echo --resume)
  done
  same moved_bf16_flash "from $first to $((3 - first)) ranks"
done

signal() { # SIGNAL WHOM: to rank 0 (parent) or rank 1 (child) of a long run; sets code and took
  local id child start log=results/faults$1$2_fp32.jsonl
  "$train" "${options[@]}" --steps 1000000 --dataset faults$1$2 --ranks 2 > out 2> err < /dev/null & id=$!
  for _ in $(seq 600); do [ "$(cat $log 2> /dev/null | wc -c)" -ge 4096 ] && break; sleep 0.1; done
  child=$(grep -lE "^PPid:[[:space:]]+$id\$" /proc/[0-9]*/status 2> /dev/null | cut -d/ -f3)
  start=$SECONDS
  if [ $2 = parent ]; then kill -$1 $id; else kill -$1 $child; fi
  { wait $id; code=$?; } 2> /dev/null
  took=$((SECONDS - start))
  for _ in $(seq 100); do kill -0 $child 2> /dev/null || break; sleep 0.1; done
  check "a process is left after $1 to the $2" not kill -0 $child
}
signal INT child
check "SIGINT: exit $code, $(tail -n 1 err)" [ $code = 130 ]
signal KILL child
check "a rank's death: exit $code after $took s" [ $code = 7 -a $took -lt 30 ]
check "a rank's death: $(tail -n 1 err)" says err '^train: rank 1 \(host .*\) ended'
signal STOP child
check "a rank that hangs: exit $code after $took s" [ $code = 7 -a $took -lt 30 ]
check "a rank that hangs: $(tail -n 1 err)" says err '^train: rank 1 \(host .*\) has been silent for 20 s'
closing_line
