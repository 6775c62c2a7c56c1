#!/usr/bin/env bash
# ranks_gpu.sh BUILD_DIR [N] - N ranks on GPUs (default: one on each): units/test_together.c, runs of the
# trainer with one rank and with 2, 4, ... N, and ranks that are stopped, killed, or hang. They copy from each
# other's memory; a third of the runs go by NCCL. BUILD_DIR has test_together_cuda and train_cuda. NCCL
# refuses to share a GPU: where there is one alone, platforms/nccl_fake.c takes its place.
export LC_ALL=C # decimals have a point
here=$(cd "$(dirname "$0")" && pwd) || exit 1
build=$(cd "$1" && pwd) || exit 1
. "$here/lib.sh"
gpus=$(nvidia-smi -L 2> /dev/null | wc -l)
if [ "$gpus" = 0 ]; then skip "ranks on GPUs: no CUDA device"; closing_line; exit; fi
most=${2:-$((gpus > 1 ? gpus : 4))}
if [ "$gpus" = 1 ]; then
  mkdir -p "$build/nccl"
  [ -f "$build/nccl/libnccl.so.2" ] ||
    gcc -O2 -std=gnu99 -w -shared -fPIC "-I${CUDA_HOME:-/usr/local/cuda}/include" \
      "$here/platforms/nccl_fake.c" -o "$build/nccl/libnccl.so.2" \
      "-L${CUDA_HOME:-/usr/local/cuda}/lib64" -lcudart_static -ldl -lrt -lpthread -lm || exit 1
  export LD_LIBRARY_PATH=$build/nccl${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi
timeout 600 "$build/test_together_cuda" quick $most > "$build/together.log" 2>&1 & # beside the trainer's runs
together=$!

out=$(mktemp -d) && cd "$out" || exit 1
trap 'rm -rf "$out"' EXIT
sample_text > text.txt
train=$build/train_cuda
options=(--data text.txt --device cuda --layers 4 --heads 2 --d-model 128 --vocab-size 320 --batch-size 2
  --seq-len 128 --steps 50 --seed 5 --dropout 0.1 --eval-every 25 --save-every 25)
run() { timeout 120 "$train" "${options[@]}" "$@" > out 2> err < /dev/null; } # ARGUMENT...
same() { # NAME WHAT: the file of the run with one rank
  check "$2: $(tail -n 1 err)" cmp results/$1_step50.safetensors results/one_${1#*_}_step50.safetensors
}

# 50 steps of each technique, all shards: the bits of one rank, and the planned bytes
for ((ranks = 2; ranks <= most; ranks *= 2)); do
  for technique in fp32 bf16_flash bf16_flash_window64 fp16_checkpointing_chunked fp8_flash; do
    rm -rf results/one_*
    run --dataset one --technique $technique --accumulate $ranks
    for shard in none optimizer gradients; do
      rm -rf results/many_*
      options_of_ranks=(--technique $technique --ranks $ranks --shard $shard)
      run --dataset many "${options_of_ranks[@]}" $([ $shard = optimizer ] && echo --nccl)
      mv results/many_*_step50.safetensors results/many_${technique}_step50.safetensors 2> /dev/null
      same many_$technique "$technique, $ranks ranks, shard $shard"
      taken=$(field out arena_bytes)
      run --dataset many "${options_of_ranks[@]}" --dry-run
      check "$technique, $ranks ranks, shard $shard: $taken bytes taken, $(grep -o 'arena [0-9]*' out)" \
        says out "arena $taken bytes"
    done
  done
done
other=$((most > 3 ? 3 : most - 1)) # a run goes on with another number of ranks, which divides few sizes
for first in $most $other; do
  next=$((most + other - first))
  rm -rf results/one_* results/moved_*
  run --dataset one --technique bf16_flash --accumulate $((most * other))
  for ranks in $first $next; do
    run --dataset moved --technique bf16_flash --ranks $ranks --shard gradients \
      --accumulate $((most * other / ranks)) $([ $ranks = $first ] && echo --steps 25 || echo --resume)
  done
  same moved_bf16_flash "from $first to $next ranks"
done

wait $together
cat "$build/together.log"
check "test_together_cuda" grep -qE '^[1-9][0-9]* passed, 0 failed' "$build/together.log"

last=$((most - 1))
signal() { # SIGNAL [OPTION]: to the last rank of a long run; sets code and took
  local id children start run=faults$1$2
  local log=results/${run}_fp32.jsonl
  "$train" "${options[@]}" --steps 1000000 --dataset $run --ranks $most $2 > out 2> err < /dev/null & id=$!
  for _ in $(seq 600); do [ "$(cat $log 2> /dev/null | wc -c)" -ge 4096 ] && break; sleep 0.1; done
  children=($(grep -lE "^PPid:[[:space:]]+$id\$" /proc/[0-9]*/status 2> /dev/null | cut -d/ -f3 | sort -n))
  check "$1: ${#children[@]} of $last ranks were forked" [ ${#children[@]} = $last ]
  start=$SECONDS
  kill -$1 ${children[-1]}
  { wait $id; code=$?; } 2> /dev/null
  took=$((SECONDS - start))
  for _ in $(seq 100); do kill -0 "${children[@]}" 2> /dev/null || break; sleep 0.1; done
  check "a process is left after $1" not kill -0 "${children[@]}"
}
signal INT
check "SIGINT: exit $code, $(tail -n 1 err)" [ $code = 130 ]
for way in '' --nccl; do
  signal KILL $way
  check "a rank's death $way: exit $code after $took s" [ $code = 7 -a $took -lt 30 ]
  check "a rank's death $way: $(tail -n 1 err)" says err "^train: rank $last \(host .*\) ended"
  signal STOP $way
  check "a rank that hangs $way: exit $code after $took s" [ $code = 7 -a $took -lt 30 ]
  check "a rank that hangs $way: $(tail -n 1 err)" \
    says err "^train: rank $last \(host .*\) has been silent for 20 s"
done
closing_line
