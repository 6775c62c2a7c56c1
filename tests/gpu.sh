#!/usr/bin/env bash
# gpu.sh PROGRAM JSON [PART PARTS] - runs the GPU tests, or one part of them, and records what they proved, on
#                                    which GPU and for which sources; JSON.log keeps the output
# gpu.sh PROGRAM JSON beside PARTS - all parts: the first, then the others side by side. Where there are two
#                                    GPUs, the first has one, and the others have the other at the same time
# gpu.sh join JSON RECORD...       - joins the records of all parts, which must be of the same sources
#
# The first of several parts needs a GPU alone. The others are faster side by side, since the CPU's share of
# the work is the larger one:
#
#   make build/test_cuda && tests/gpu.sh build/test_cuda tests/gpu_last_run.json beside 8
#
# Where a command may not take that long, parts go in commands of their own, as in tests/gpu.sh
# build/test_cuda "$OUT/part1.json" 1 8, on one machine or on several. Where the records are: tests/gpu.sh
# join tests/gpu_last_run.json part*.json. A part that is missing or has not ended, as after a time-out, makes
# a record incomplete, which it says.
set -u
export LC_ALL=C # decimals have a point
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive} # parts have more threads than there are cores
record() { # RECORD...: prints the record of all their parts
  local lines all part line p f s passed=0 failed=0 skipped=0 list='' missing='' complete=true
  if [ "$(grep -h '"sources"' "$@" | sort -u | wc -l)" != 1 ]; then
    echo "gpu.sh: the records are of different sources: run the parts again with the same" >&2
    return 1
  fi
  lines=$(grep -hE '^ +\{"part"' "$@" | sed 's/}.*/}/')
  all=$(sed 's,.*"part": "[0-9]*/\([0-9]*\)".*,\1,' <<< "$lines" | sort -u)
  [[ $all =~ ^[0-9]+$ ]] || { echo "gpu.sh: these are parts of" $all "parts: choose one" >&2; return 1; }
  for ((part = 1; part <= all; part++)); do
    line=$(grep "\"part\": \"$part/" <<< "$lines" | tail -1)
    list+=${line:+${list:+,$'\n'}$line}
    if [[ $line != *'"ended": true'* ]]; then complete=false missing+=${missing:+, }$part; continue; fi
    read -r p f s <<< "$(sed 's/.*"passed"//; s/[^0-9]\+/ /g' <<< "$line")"
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
  done
  printf '{"complete": %s, "missing": [%s], ' $complete "$missing"
  printf '"passed": %d, "failed": %d, "skipped": %d,\n' $passed $failed $skipped
  printf '%s\n "parts": [\n%s]}\n' "$(grep -h '"sources"' "$1")" "$list"
}
if [ "$1" = join ]; then
  json=$2; shift 2
  text=$(record "$@") || exit 1
  printf '%s\n' "$text" > "$json.tmp" && mv -f "$json.tmp" "$json"
  printf '%s\n' "${text%%$'\n'*}"
  exit
fi
program=$1 json=$2 part=${3:-1} parts=${4:-1}
if [ "$part" = beside ]; then
  threads=$(($(nproc) / parts)) records=("$json.1")
  if [ "$(nvidia-smi -L 2> /dev/null | wc -l)" -gt 1 ]; then
    CUDA_VISIBLE_DEVICES=0 "$0" "$program" "$json.1" 1 "$parts" &
    export CUDA_VISIBLE_DEVICES=1
  else
    "$0" "$program" "$json.1" 1 "$parts"; status=$?
    [ -f "$json.1" ] || exit $status # no GPU
  fi
  for ((part = 2; part <= parts; part++)); do
    records+=("$json.$part")
    OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads + 1))} \
      "$0" "$program" "$json.$part" $part "$parts" > "$json.$part.out" & # $json.$part.log has the same
  done
  wait
  cat "${records[@]/%/.log}" > "$json.log"
  grep '^FAILED' "$json.log"
  "$0" join "$json" "${records[@]}" || exit 1
  rm -f "${records[@]}" "${records[@]/%/.log}" "${records[@]/%/.out}"
  grep -q '"complete": true.*"failed": 0,' "$json"
  exit
fi
query() { nvidia-smi --query-gpu="$1" --format=csv,noheader 2> /dev/null | head -1; }
blob() { { printf 'blob %d\0' "$(wc -c < "$1")"; cat "$1"; } | sha1sum | cut -d' ' -f1; } # as git hash-object
hash() { printf '"%s": "%s"' "$1" "$(blob "$1")"; }
sources="$(hash mtt.h), $(hash mtt_kernels.cu), $(hash tests/test_cuda.c)" # of the beginning
cuda=$(nvidia-smi 2> /dev/null | grep -oE 'CUDA Version: [0-9.]+' | grep -oE '[0-9.]+')
gpu=$(query name) driver=$(query driver_version)
write() { # ENDED PASSED FAILED SKIPPED
  {
    printf ' "sources": {%s},\n' "$sources"
    printf '  {"part": "%d/%d", "ended": %s, "date": "%s", "gpu": "%s", "driver": "%s", "cuda": "%s",' \
      $part $parts $1 "$(date -u +%Y-%m-%d)" "$gpu" "$driver" "$cuda"
    printf ' "seconds": %d, "passed": %d, "failed": %d, "skipped": %d}\n' $SECONDS $2 $3 $4
  } > "$json.part"
  record "$json.part" > "$json.tmp" && mv -f "$json.tmp" "$json" && rm "$json.part"
}
[ -z "$gpu" ] || write false 0 0 0
"$program" part $part $parts 2>&1 | tee "$json.log"; status=${PIPESTATUS[0]}
[ -n "$gpu" ] || exit $status # no GPU: nothing to write down
line=$(grep -E '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' "$json.log" | tail -1)
read -r passed _ failed _ skipped _ <<< "${line:-0 passed, 1 failed, 0 skipped}"
[ $status = 0 ] || [ "$failed" != 0 ] || failed=1
write "$([ -n "$line" ] && echo true || echo false)" "$passed" "$failed" "$skipped"
exit $status
