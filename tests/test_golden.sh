#!/usr/bin/env bash
# test_golden.sh BUILD_DIR - compares golden.c's checksums with tests/golden/golden.txt, which a change of structure must keep.
# The flags fix how the compiler rounds, so the sums hold on every x86-64 machine.
build=$1 passed=0 failed=0
[ "$(uname -m)" = x86_64 ] || { echo "skipped: golden.txt was recorded on x86-64"; echo "1 passed, 0 failed"; exit 0; }
${CC:-cc} -std=c99 -O2 -fopenmp tests/golden/golden.c -o "$build/golden" -lm || { echo "0 passed, 1 failed"; exit 1; }
{ "$build/golden" files tests/golden/files && "$build/golden" plans && "$build/golden" runs; } > "$build/golden.txt"
while IFS= read -r line; do
  if grep -qxF -- "$line" "$build/golden.txt"; then passed=$((passed + 1)); continue; fi
  failed=$((failed + 1))
  echo "FAILED: expected $line"
  echo "             got $(grep -F -- "${line%%[0-9] *}" "$build/golden.txt" | head -n 1)"
done < tests/golden/golden.txt
echo "$passed passed, $failed failed"
[ $failed = 0 ] && [ $passed -gt 0 ]
