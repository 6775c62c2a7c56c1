#!/usr/bin/env bash
# kills.sh BUILD_DIR [COUNT [saving|ranks]] - kills train COUNT times (kill -9) at random moments, from the
# preparation of the text to the last evaluation. With `saving`, runs save after each step. With `ranks`, runs
# have 1 to 4 ranks, a random one is killed, and the others must end within 30 s and name it. Then, in ten
# runs, a rank that does not save hangs at a random moment, which the others must find in the same way.
# After each kill the run continues with --resume, or starts from the text if there is no checkpoint yet.
# Nothing may be lost: the newest step never falls, every start succeeds, and a run that ends has the bits of
# one that was never killed.
. tests/lib.sh
train=$(realpath "$1")/train count=${2:-100} mode=${3:-all}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
sample_text | head -c 200000 > text
export OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1
options=(--data text --layers 1 --heads 2 --d-model 32 --batch-size 4 --seq-len 32 --vocab-size 300
  --dropout 0.1 --steps 60 --save-every 5 --eval-every 20 --eval-batches 20)
[ "$mode" != saving ] || options+=(--d-model 192 --steps 30 --save-every 1)
run=text_fp32
[ "$mode" != ranks ] || { run+=_zero2; options+=(--batch-size 1 --accumulate 12 --shard gradients); }
start=$(date +%s%N)
"$train" "${options[@]}" --results-dir whole > /dev/null 2>&1 || fail "the run that is never killed: exit $?"
span=$((($(date +%s%N) - start) / 1000000)) # ms
newest() { # step
  ls runs 2> /dev/null | sed -n "s/^${run}_step\([0-9]*\)\.safetensors\$/\1/p" | sort -n | tail -1
}
ended() { # what a run that came to its end must have
  local last; last=${run}_step$(newest).safetensors
  check "the last weights" cmp "runs/$last" "whole/$last"
  check "the best weights" cmp runs/${run}_best.safetensors whole/${run}_best.safetensors
  check "the log" [ "$(cut -d, -f1-4 runs/$run.jsonl)" = "$(cut -d, -f1-4 whole/$run.jsonl)" ]
  check "the loss" [ "$(field runs/${run}_metrics.json val_loss)" = \
    "$(field whole/${run}_metrics.json val_loss)" ]
  ends=$((ends + 1))
  rm -rf runs
}
seed=1
random() { # LIMIT: sets `drawn` to a number below it
  seed=$(((seed * 1103515245 + 12345) % 2147483648))
  drawn=$((seed / 65536 * $1 / 32768))
}
choose_ranks() { # so many that each has as many of the 12 micro-batches
  [ "$mode" = ranks ] || return
  random 4
  ranks=$((drawn + 1)) how=(--ranks $((drawn + 1)) --accumulate $((12 / (drawn + 1))))
}
family() { # PID: it, and its children
  echo "$1" $(grep -lE "^PPid:[[:space:]]+$1\$" /proc/[0-9]*/status 2> /dev/null | cut -d/ -f3)
}
left() { # PID...: are some of them there, and no zombies?
  local id
  for id in "$@"; do grep -q '^State:[[:space:]]*[^ZX]' /proc/$id/status 2> /dev/null && return; done
  return 1
}
await() { # SINCE PID...: until they have ended, for at most 30 s from a time in ns
  local start=$1; shift
  while left "$@" && [ $(($(date +%s%N) - start)) -lt 30000000000 ]; do sleep 0.02; done
  took=$((($(date +%s%N) - start) / 1000000))
  [ $took -le $slowest ] || slowest=$took
  check "processes are left 30 s after a rank's end" not left "$@"
}
kills=0 saving=0 ends=0 before=0 slowest=0 how=() ranks=1
while [ $kills -lt "$count" ]; do
  choose_ranks
  resume=; [ -z "$(newest)" ] || resume=--resume
  "$train" "${options[@]}" "${how[@]}" $resume --results-dir runs > out 2> err < /dev/null & id=$!
  random $span
  sleep "$(awk -v ms=$drawn 'BEGIN { print ms / 1000 }')"
  all=($(family $id)) victim=$id
  if [ $ranks -gt 1 ]; then random ${#all[@]}; victim=${all[drawn]}; fi
  kill -9 "$victim" 2> /dev/null
  { [ $ranks = 1 ] || await "$(date +%s%N)" "${all[@]}"; wait $id; } 2> /dev/null
  code=$?
  case $code in
    137 | 7)
      kills=$((kills + 1))
      [ $code != 7 ] ||
        check "a rank's death: $(tail -n 1 err)" says err '^train: rank [1-9] \(host .*\) ended'
      ! ls -A runs 2> /dev/null | grep -q 'safetensors\.tmp$' || saving=$((saving + 1));;
    0) ended; before=0; continue;;
    *) fail "a start after $kills kills: exit $code, $(tail -n 1 err)"; rm -rf runs; before=0;;
  esac
  now=$(newest)
  check "the newest step fell from $before to ${now:-none}" [ "${now:-0}" -ge "$before" ]
  before=${now:-0}
done
echo "$kills kills, $saving of them during a save, $ends runs to the end"
[ "$mode" = ranks ] || check "kills during a save" [ $saving -gt 0 ]
check "runs to the end" [ $ends -gt 0 ]
if [ "$mode" = ranks ]; then
  echo "after a kill, the other ranks ended within $slowest ms"
  slowest=0 hung=() families=() stopped=()
  for i in {0..9}; do
    "$train" "${options[@]}" --ranks 3 --accumulate 4 --steps 100000 --save-every $((i % 2 * 4 + 1)) \
      --results-dir hang$i > out$i 2> err$i & id=$!
    until [ -s hang$i/$run.jsonl ] || ! left $id; do sleep 0.02; done
    random 300
    sleep "$(awk -v ms=$drawn 'BEGIN { print ms / 1000 }')"
    all=($(family $id)) hung+=($id) families+=("$(family $id)")
    random 2
    kill -STOP "${all[1 + drawn]}"
    stopped+=("$(date +%s%N)")
  done
  for i in "${!hung[@]}"; do
    await "${stopped[i]}" ${families[i]}
    ! left ${families[i]} || kill -9 ${families[i]}
    wait "${hung[i]}"; code=$?
    check "a rank that hangs: exit $code, $(tail -n 1 err$i)" [ $code = 7 ]
    check "a rank that hangs is named: $(tail -n 1 err$i)" \
      says err$i '^train: rank [12] \(host .*\) has been silent for 20 seconds'
  done
  echo "after a rank hung, the others ended within $slowest ms"
fi
closing_line
