#!/usr/bin/env bash
# run.sh BUILD_DIR PROGRAM... - runs the test programs and the tests of the trainer and the tools, and adds up
# their closing lines.
build=$1; shift
passed=0 failed=0 skipped=0 closing='^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$'
for program in "$@" test_golden.sh test_tools_data.sh test_convert.sh test_explorer.sh test_train.sh \
  test_generate.sh test_suites.sh; do
  start=$(date +%s.%N)
  case $program in
    *.sh) command=(bash "tests/$program" "$build");;
    test_cuda) command=(tests/gpu.sh "$build/$program" tests/gpu_last_run.json);;
    *) command=("$build/$program");; esac
  "${command[@]}" 2>&1 | tee "$build/test.log" | grep -vE --line-buffered "$closing"
  status=${PIPESTATUS[0]}
  line=$(grep -E "$closing" "$build/test.log" | tail -1)
  read -r p _ f _ s _ <<< "${line:-0 passed, 0 failed, 0 skipped}"
  if [ -z "$line" ] || { [ $status != 0 ] && [ $f = 0 ]; }; then
    f=1
    echo "FAILED: $program ended with status $status, closing line: ${line:-none}"
  fi
  printf '%-18s %d passed, %d failed, %d skipped, %.1f s\n' "$program" $p $f $s \
    "$(echo "$(date +%s.%N) $start" | awk '{print $1 - $2}')"
  passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
done
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ] && [ $passed -gt 0 ]
