#!/usr/bin/env bash
# sanitize.sh BUILD_DIR - the tests under address, undefined-behaviour and leak sanitizers, each tensor in a
# block of its own.
build=$1/sanitize; mkdir -p "$build"
export ASAN_OPTIONS=allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1
passed=0 failed=0 skipped=0
for program in test_tokenizer test_files test_plan test_model; do
  defines=; [ $program = test_model ] && defines=-DMTT_SEPARATE_ALLOCS
  cc -std=gnu99 -O1 -g -march=native -fno-omit-frame-pointer -fsanitize=address,undefined \
    -fno-sanitize-recover=all $defines tests/$program.c -o "$build/$program" -lm ||
    { failed=$((failed + 1)); continue; }
  out=$("$build/$program" 2>&1); status=$?
  printf '%s\n' "$out" | tail -5
  if [ $status = 0 ]; then passed=$((passed + 1)); continue; fi
  failed=$((failed + 1))
  echo "FAILED: $program under the sanitizers"
done
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ]
