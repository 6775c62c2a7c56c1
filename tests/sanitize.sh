#!/usr/bin/env bash
# sanitize.sh BUILD_DIR [JOB...] - test programs, and calls of every program, under sanitizers. Jobs:
#   address     all calls of tests/platforms/sanitize.txt: also undefined behaviour, by gcc, and leaks
#   memory      a part of them: unset values; undefined behaviour, by clang, which also knows NULL + 1
#   thread      a part of them, with three threads and LLVM's archer, which knows the barriers of OpenMP
#   valgrind    a part of them
#   address_tests, memory_tests     the test programs; test_model has a block of its own for each tensor
# A job makes its calls one after the other, in a folder of its own. Jobs and tests run beside each other.
. tests/lib.sh
build=$(mkdir -p "$1/sanitize" && cd "$1/sanitize" && pwd) || exit 1
shift
jobs=${*:-address_tests address memory_tests memory thread valgrind} # the longest first
# 99 is an exit code that no program has.
export ASAN_OPTIONS=allocator_may_return_null=1:exitcode=99 LSAN_OPTIONS=exitcode=99
export MSAN_OPTIONS=allocator_may_return_null=1:exitcode=99 UBSAN_OPTIONS=print_stacktrace=1
export TSAN_OPTIONS=ignore_noninstrumented_modules=1:exitcode=99 OMP_WAIT_POLICY=passive OMP_NUM_THREADS=3
programs=$(basename -s .c {examples{,/assignment},tools}/*.c | # as make says
  sed "s/^train$/tiny/; s/^trainer$/train/")
address_tests="test_model test_together test_plan test_files test_structs test_ranks test_tokenizer \
  test_models"
memory_tests=test_files
wrapped=$(sed -n 's/^WRAP([^,]*, \([a-z_]*\),.*/-Wl,--wrap=\1/p' tests/platforms/sanitize.c)
corpus=$PWD/tests/corpus calls=$PWD/tests/platforms/sanitize.txt work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
sample_text | head -c 30000 | fold -w 600 | sed G > "$work/text"

# ---- building: the implementation once for all programs of a job

compile() { # JOB OUTPUT ARGUMENT...
  local job=${1%_tests} output=$build/$1/$2 sanitizer=(-fsanitize=${1%_tests} -fno-sanitize-recover=all)
  local compiler=clang
  case $job in
    memory) sanitizer=(-fsanitize=memory,undefined -fno-sanitize-recover=all);;
    address) compiler=cc sanitizer=(-fsanitize=address,undefined -fno-sanitize-recover=all -march=native);;
    thread) sanitizer+=(-fopenmp);;
    valgrind) compiler=cc sanitizer=();;
  esac
  mkdir -p "$build/$1"
  rm -f "$output" # if it does not compile, its program is missing
  $compiler -std=gnu99 -O1 -g -fno-omit-frame-pointer "${sanitizer[@]}" -o "$output" "${@:3}"
}
room() { while [ "$(jobs -rp | wc -l)" -ge "$(nproc)" ]; do wait -n; done; } # one job a processor
compile_beside() { room; compile "$@" & }
compile_all() {
  local job name source
  printf '#define MTT_IMPLEMENTATION\n#include "mtt.h"\n#include "tools/wordpiece.h"\n' > "$build/mtt.c"
  for name in $programs; do # hello takes a minute; three steps call all that it has
    case $name in train) source=trainer;; tiny) source=train;; *) source=$name;; esac
    sed 's/^#define MTT_IMPLEMENTATION$//; s/STEPS = 600/STEPS = 3/' \
      {examples{,/assignment},tools}/$source.c 2> /dev/null > "$build/$name.c"
  done
  for job in $jobs; do
    case $job in
      *_tests) for name in ${!job}; do
          compile_beside $job $name tests/units/$name.c \
            $([ $name != test_model ] || echo -DMTT_SEPARATE_ALLOCS) -lm
        done;;
      *) compile_beside $job mtt.o -c "$build/mtt.c" -I. -DMTT_DOCUMENT_BYTES=512
        compile_beside $job sanitize.o -c tests/platforms/sanitize.c;;
    esac
  done
  wait
  for job in $jobs; do
    [[ $job != *_tests ]] || continue
    for name in $programs; do
      compile_beside $job $name -iquote examples/assignment -iquote tools "$build/$name.c" \
        "$build/$job"/*.o $wrapped -lm
    done
  done
  wait
}

# ---- running

# A report of a sanitizer, also of a process that another one has forked.
report='(ERROR|WARNING): [A-Za-z]+Sanitizer:|runtime error: |^==[0-9]+== '
shorten() { # what a failure is about
  grep -E "FAILED|$report|SUMMARY|^ +#[0-9] |^==[0-9]+== +(at|by)" "$1" | head -30 | cut -c1-200
}
try() { # CODE NAME COMMAND...: what fails says why
  local code=$1 name=$2 status; shift 2
  "$@" > log 2>&1 < /dev/null; status=$?
  if [ $status = $code ] && ! grep -qE "$report" log; then pass; return; fi
  fail "$job: $name: exit $status, expected $code"
  shorten log
  tail -3 log
}
under() { "${before[@]}" "$build/$job/$1" "${@:2}"; } # PROGRAM ARGUMENT...
failing() { # PROGRAM ARGUMENT...: in each run the next allocation fails. Programs end with 0 to 7
  local n code
  for ((n = 1; n < 1000; n++)); do
    rm -f failed
    FAIL_AT=$n FAIL_MARK=failed under "$@"; code=$?
    [ -e failed ] || return $((n > 5 ? code : 98))
    [ $code -le 7 ] || break
  done
  echo "FAILED: allocation $n"
  return 98
}
stopped() { # FILE PROGRAM ARGUMENT...: SIGTERM when the file has something
  "${before[@]}" "$build/$job/$2" "${@:3}" & local id=$!
  for _ in {1..600}; do [ ! -s "$1" ] || break; sleep 0.1; done
  kill $id
  wait $id
}
make_calls() { # JOB
  local job=$1 name code call letters before=()
  local name200 long small_plan tiny small llama deep_steps deep base64
  [ $job != valgrind ] || before=(valgrind -q --error-exitcode=99 --leak-check=full)
  for name in $programs; do
    [ -x "$build/$job/$name" ] || { fail "$name does not compile for $job"; return; }
    eval "$name() { under $name \"\$@\"; }"
  done
  cp "$work/text" . || return
  name200=$(printf 'n%.0s' {1..200}) long=$(printf 'letters/%.0s' {1..700})
  small_plan="--layers 1 --heads 2 --d-model 16 --d-ff 16 --batch-size 2 --seq-len 16"
  tiny="$small_plan --vocab-size 300"
  small="$small_plan --eval-batches 2" llama="--norm rms --mlp swiglu --positions rotary --no-head-bias"
  deep_steps="--batch-size 2 --seq-len 16 --eval-batches 2 --steps 2 --dropout 0.1 --accumulate 2"
  deep="$small $deep_steps --layers 3"
  base64=$(printf %s {A..Z} {a..z} {0..9} + /)
  while read -r letters code call; do
    case $letters in '' | '#'*) continue;; esac
    [[ $letters != *${job:0:1}* ]] || try $code "$call" eval "$call"
  done < "$calls"
}
one_test() { # JOB TEST
  local job=$1 quick=
  [[ $2 != test_@(model|together|plan) ]] || quick=quick
  [ $2 != test_structs ] || ln -s "$OLDPWD/mtt.h" . # which it reads
  if [ -x "$build/$job/$2" ]; then try 0 $2 "$build/$job/$2" $quick
  else fail "$2 does not compile for $job"; fi
}
units=
beside() { # NAME COMMAND...: in a folder of its own; what it says is read later
  room
  units+=" $1"
  mkdir "$work/$1"
  {
    cd "$work/$1" || exit 1
    passed=0 failed=0 start=$SECONDS
    "${@:2}" > said
    echo $passed $failed $((SECONDS - start)) > counts
  } &
}
compile_all
for job in $jobs; do
  case $job in
    *_tests) for name in ${!job}; do beside ${job%_tests}_$name one_test $job $name; done;;
    *) beside $job make_calls $job;;
  esac
done
wait
for unit in $units; do
  read -r p f seconds < "$work/$unit/counts" || { p=0 f=1 seconds=?; }
  cat "$work/$unit/said"
  printf '%-22s %3d passed, %d failed, %s s\n' $unit $p $f $seconds
  passed=$((passed + p)) failed=$((failed + f))
done
echo "$passed passed, $failed failed, 0 skipped"
[ $failed = 0 ] && [ $passed -gt 0 ]
