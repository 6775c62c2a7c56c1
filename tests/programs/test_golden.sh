#!/usr/bin/env bash
# test_golden.sh BUILD_DIR - compares golden.c's checksums with tests/golden/golden.txt. A change of structure
# must keep them. The flags fix how the compiler rounds, and MTT_PORTABLE which products run, so the sums hold
# on every x86-64 machine.
export LC_ALL=C # decimals have a point
build=$1 passed=0 failed=0 skipped=0
if [ "$(uname -m)" != x86_64 ]; then
  printf 'skipped: golden.txt was recorded on x86-64\n0 passed, 0 failed, 1 skipped\n'
  exit 0
fi
if ! ${CC:-cc} -std=c99 -O2 -DMTT_PORTABLE -fopenmp tests/golden/golden.c -o "$build/golden" -lm; then
  echo "0 passed, 1 failed, 0 skipped"
  exit 1
fi
for part in "files tests/golden/files" plans runs; do
  "$build/golden" $part || break
done > "$build/golden.txt"
while IFS= read -r line; do
  if grep -qxF -- "$line" "$build/golden.txt"; then passed=$((passed + 1)); continue; fi
  failed=$((failed + 1))
  echo "FAILED: expected $line"
  read -r kind name _ <<< "$line"
  echo "             got $(grep -F -- "$kind $name " "$build/golden.txt" | head -n 1)"
done < tests/golden/golden.txt
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ] && [ $passed -gt 0 ]
