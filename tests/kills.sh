#!/usr/bin/env bash
# kills.sh BUILD_DIR [COUNT [saving]] - kills train COUNT times (kill -9) at random moments, from the
# preparation of the text to the last evaluation. With `saving`, runs save after each step. After each kill
# the run continues with --resume, or starts from the text if there is no checkpoint yet. Nothing may be lost:
# the newest step never falls, every start succeeds, and a run that ends has the bits of one that was never
# killed.
. tests/lib.sh
train=$(realpath "$1")/train count=${2:-100} mode=${3:-all}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
sample_text | head -c 200000 > text
export OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1
options=(--data text --layers 1 --heads 2 --d-model 32 --batch-size 4 --seq-len 32 --vocab-size 300
  --dropout 0.1 --steps 60 --save-every 5 --eval-every 20 --eval-batches 20)
[ "$mode" = all ] || options+=(--d-model 192 --steps 30 --save-every 1)
start=$(date +%s%N)
"$train" "${options[@]}" --results-dir whole > /dev/null 2>&1 || fail "the run that is never killed: exit $?"
span=$((($(date +%s%N) - start) / 1000000)) # ms
newest() { # step
  ls runs 2> /dev/null | sed -n 's/^text_fp32_step\([0-9]*\)\.safetensors$/\1/p' | sort -n | tail -1
}
ended() { # what a run that came to its end must have
  local last; last=text_fp32_step$(newest).safetensors
  check "the last weights" cmp "runs/$last" "whole/$last"
  check "the best weights" cmp runs/text_fp32_best.safetensors whole/text_fp32_best.safetensors
  check "the log" [ "$(cut -d, -f1-4 runs/text_fp32.jsonl)" = "$(cut -d, -f1-4 whole/text_fp32.jsonl)" ]
  check "the loss" [ "$(field runs/text_fp32_metrics.json val_loss)" = \
    "$(field whole/text_fp32_metrics.json val_loss)" ]
  ends=$((ends + 1))
  rm -rf runs
}
kills=0 saving=0 ends=0 before=0 seed=1
while [ $kills -lt "$count" ]; do
  resume=; [ -z "$(newest)" ] || resume=--resume
  "$train" "${options[@]}" $resume --results-dir runs > out 2> err < /dev/null & id=$!
  seed=$(((seed * 1103515245 + 12345) % 2147483648))
  sleep "$(awk -v r=$((seed / 65536)) -v span=$span 'BEGIN { print r / 32768 * span / 1000 }')"
  kill -9 $id 2> /dev/null
  { wait $id; } 2> /dev/null
  code=$?
  case $code in
    137)
      kills=$((kills + 1))
      ! ls -A runs 2> /dev/null | grep -q 'safetensors\.tmp$' || saving=$((saving + 1));;
    0) ended; before=0; continue;;
    *) fail "a start after $kills kills: exit $code, $(tail -n 1 err)"; rm -rf runs; before=0;;
  esac
  now=$(newest)
  check "the newest step fell from $before to ${now:-none}" [ "${now:-0}" -ge "$before" ]
  before=${now:-0}
done
echo "$kills kills, $saving of them during a save, $ends runs to the end"
check "kills during a save" [ $saving -gt 0 ]
check "runs to the end" [ $ends -gt 0 ]
closing_line
