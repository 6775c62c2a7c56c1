#!/usr/bin/env bash
# fuzz.sh BUILD_DIR [SECONDS [TARGET...]] - fuzzes every reader of foreign bytes with libFuzzer: each target
# of units/fuzz.c for SECONDS (default 60), under the address, undefined-behaviour and leak sanitizers. It
# begins with the inputs of tests/corpus. Inputs that reach new code stay in BUILD_DIR/fuzz/TARGET/found for
# the next call; one that makes a target fail is reported and lies beside them.
export LC_ALL=C # decimals have a point
mkdir -p "$1/fuzz" && build=$(cd "$1/fuzz" && pwd) || exit 1
seconds=${2:-60} corpus=$PWD/tests/corpus passed=0 failed=0
shift $(($# < 2 ? $# : 2))
work=$(mktemp -d -p /dev/shm 2> /dev/null || mktemp -d) # in memory: a target writes files thousands of times
trap 'rm -rf "$work"' EXIT
command -v clang > /dev/null || { echo "fuzz.sh: clang is missing: it brings libFuzzer" >&2; exit 3; }
limits=(-rss_limit_mb=2048 -malloc_limit_mb=512 -timeout=10 -close_fd_mask=3 -print_final_stats=1)
export UBSAN_OPTIONS=print_stacktrace=1 ASAN_OPTIONS=allocator_may_return_null=1

big_seeds() { # TARGET FOLDER: inputs too large for the repository
  case $1 in
    report) for key in plan bytes; do # each level took stack
        printf '0%s\0' "$(printf "{\"$key\":%.0s" {1..60000})" > "$2/nested_$key"
      done;;
    json) printf '[%.0s' {1..60000} > "$2/nested";;
  esac
}
finish() { # TARGET LOG STATUS: prints a target's line, and after a failure how to repeat it; its status
  local runs input
  runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$2" | tail -1)
  printf '%-12s %9s executions, %d findings\n' "$1" "${runs:-0}" $(($3 != 0))
  [ "$3" != 0 ] || return 0
  input=$(grep -oE "(Test unit written to|Running:) .*" "$2" | tail -1 | sed 's/.*: *//; s/.* to //')
  echo "FAILED: $1: (cd $build/$1 && FUZZ_TARGET=$1 $program ${input:-(no input)})"
  grep -E 'does not hold|runtime error|ERROR:|SUMMARY:|^ +#[0-9] ' "$2" | head -12 | cut -c1-160
  return 1
}
fuzz() { # TARGET: with large inputs, once; then with those of the corpus and what it makes of them
  local out=$build/$1 work=$work/$1 longest=8192 status=0 given=()
  [ "$1" != checkpoint ] || longest=20000
  [ ! -d "$corpus/$1" ] || given=("$corpus/$1")
  mkdir -p "$work/seeds" "$out/found" "$out/big" && cd "$work" || exit 1
  export FUZZ_TARGET=$1 FUZZ_SEED=seeds/made
  big_seeds "$1" "$out/big"
  [ -z "$(ls "$out/big")" ] ||
    timeout 300 "$program" "${limits[@]}" "$out/big"/* > "$out/log" 2>&1 || status=$?
  [ $status != 0 ] ||
    timeout $((seconds + 300)) "$program" "${limits[@]}" -max_len=$longest -max_total_time="$seconds" \
      -artifact_prefix="$out/" "$out/found" seeds "${given[@]}" > "$out/log" 2>&1 || status=$?
  cd - > /dev/null || exit 1
  finish "$1" "$out/log" $status
}
room() { while [ "$(jobs -rp | wc -l)" -ge "$(nproc)" ]; do wait -n; done; } # one job a processor
for define in LIBRARY TRAIN REPORT; do
  room
  rm -f "$build/$define"
  clang -std=gnu99 -O1 -g -Wall -Wextra -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all \
    -DFUZZ_$define tests/units/fuzz.c -o "$build/$define" -lm &
done
wait
targets=()
for define in LIBRARY TRAIN REPORT; do
  program=$build/$define
  [ -x "$program" ] || { failed=$((failed + 1)); continue; }
  for target in $(FUZZ_TARGET='' "$program"); do
    [ $# = 0 ] || [[ " $* " = *" $target "* ]] || continue
    room
    { fuzz "$target" > "$work/$target.said" && touch "$work/$target.passed"; } &
    targets+=("$target")
  done
done
wait
for target in "${targets[@]}"; do
  cat "$work/$target.said"
  if [ -e "$work/$target.passed" ]; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
done
echo "$passed passed, $failed failed, 0 skipped"
[ $failed = 0 ] && [ $passed -gt 0 ]
