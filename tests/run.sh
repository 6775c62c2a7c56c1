#!/usr/bin/env bash
# run.sh BUILD_DIR PROGRAM... - runs the test programs and the tests of the trainer and the tools, and adds up
# their closing lines.
build=$1; shift
passed=0 failed=0 skipped=0
for program in "$@" test_golden.sh test_tools_data.sh test_train.sh test_suites.sh; do
  start=$(date +%s.%N)
  case $program in
    *.sh) out=$(bash "tests/$program" "$build" 2>&1);;
    test_cuda) out=$(tests/gpu.sh "$build/$program" tests/gpu_last_run.json 2>&1);;
    *) out=$("$build/$program" 2>&1);; esac
  status=$?
  line=$(printf '%s\n' "$out" | grep -E '^[0-9]+ passed, [0-9]+ failed$' | tail -1)
  printf '%s\n' "$out" | grep -vE '^[0-9]+ passed, [0-9]+ failed$'
  if [ -z "$line" ]; then
    line="0 passed, 1 failed"
    echo "FAILED: $program ended with status $status and no closing line"
  elif [ $status != 0 ] && [ "${line#*, }" = "0 failed" ]; then
    line="${line%% *} passed, 1 failed"
    echo "FAILED: $program ended with status $status"
  fi
  skipped=$((skipped + $(printf '%s\n' "$out" | grep -c '^skipped: ')))
  printf '%-18s %s, %.1f s\n' "$program" "$line" "$(echo "$(date +%s.%N) $start" | awk '{print $1 - $2}')"
  read -r p _ f _ <<< "$line"
  passed=$((passed + p)) failed=$((failed + f))
done
[ $skipped = 0 ] || echo "$skipped skipped"
echo "$passed passed, $failed failed"
[ $failed = 0 ] && [ $passed -gt 0 ]
