#!/usr/bin/env bash
# run.sh BUILD_DIR PROGRAM... - runs the test programs and the tests of the trainer and the tools, three
# beside each other where there are two cores, since some wait more than they compute, and adds up their
# closing lines. BUILD_DIR/logs keeps what each said.
export LC_ALL=C # decimals have a point
build=$1 logs=$1/logs; shift
passed=0 failed=0 skipped=0 closing='^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$'
jobs=$(nproc 2> /dev/null); [ "${jobs:-1}" -lt 2 ] || jobs=3
rm -rf "$logs"; mkdir -p "$logs"
test_one() { # PROGRAM: leaves its output, and then its figures
  local program=$1 command status line p f s start
  start=$(date +%s.%N)
  case $program in
    *.sh) command=(bash "tests/programs/$program" "$build");;
    test_cuda) command=(tests/gpu.sh "$build/$program" tests/gpu_last_run.json);;
    *) command=("$build/$program");; esac
  "${command[@]}" > "$logs/$program" 2>&1; status=$?
  line=$(grep -E "$closing" "$logs/$program" | tail -1)
  read -r p _ f _ s _ <<< "${line:-0 passed, 0 failed, 0 skipped}"
  if [ -z "$line" ] || { [ $status != 0 ] && [ $f = 0 ]; }; then
    f=1
    echo "FAILED: $program ended with status $status, closing line: ${line:-none}" >> "$logs/$program"
  fi
  echo $p $f $s "$(echo "$(date +%s.%N) $start" | awk '{print $1 - $2}')" > "$logs/$program.figures"
}
show() { # prints what has ended since the last call
  local program p f s seconds
  for program in "${all[@]}"; do
    [ -s "$logs/$program.figures" ] || continue
    read -r p f s seconds < "$logs/$program.figures"
    mv "$logs/$program.figures" "$logs/$program.shown"
    grep -vE "$closing" "$logs/$program"
    printf '%-18s %d passed, %d failed, %d skipped, %.1f s\n' "$program" $p $f $s $seconds
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
  done
}
all=(test_train.sh test_suites.sh test_tools_data.sh test_convert.sh "$@" test_golden.sh test_explorer.sh
  test_locale.sh test_learn.sh test_generate.sh) # the longest first
for program in "${all[@]}"; do
  [ $program != test_cuda ] || wait # it has the machine for itself
  while [ "$(jobs -rp | wc -l)" -ge ${jobs:-1} ]; do wait -n; done
  show
  test_one $program &
  [ $program != test_cuda ] || wait
done
while [ "$(jobs -rp | wc -l)" -gt 0 ]; do wait -n; show; done
show
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ] && [ $passed -gt 0 ]
