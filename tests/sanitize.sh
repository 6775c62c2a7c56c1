#!/usr/bin/env bash
# sanitize.sh BUILD_DIR [JOB...] - tests, and short runs of train, prepare and report, under sanitizers. Jobs:
# address (with undefined behaviour, leaks, and a block of its own for each tensor), memory (unset values),
# thread (with LLVM's archer, which knows the barriers of OpenMP), valgrind.
. tests/lib.sh
build=$(mkdir -p "$1/sanitize" && cd "$1/sanitize" && pwd) || exit 1
shift
export ASAN_OPTIONS=allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 OMP_WAIT_POLICY=passive
export MSAN_OPTIONS=allocator_may_return_null=1 TSAN_OPTIONS=ignore_noninstrumented_modules=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
sample_text | head -c 30000 | fold -w 600 | sed G > "$work/text"

compile() { # SOURCE: for the job
  local sanitizer=(-fsanitize=$job -fno-sanitize-recover=all) compiler=clang defines=-DMTT_DOCUMENT_BYTES=512
  case $job in
    address) compiler=cc sanitizer=(-fsanitize=address,undefined -fno-sanitize-recover=all -march=native);;
    thread) sanitizer+=(-fopenmp);;
    valgrind) compiler=cc sanitizer=();;
  esac
  case $1 in
    tests/test_model.c) defines=-DMTT_SEPARATE_ALLOCS;;
    tests/*) defines=;;
  esac
  # shellcheck disable=SC2086
  $compiler -std=gnu99 -O1 -g -fno-omit-frame-pointer "${sanitizer[@]}" $defines "$1" \
    -o "$build/$(basename "$1" .c)" -lm
}
room() { while [ "$(jobs -rp | wc -l)" -ge "$(nproc)" ]; do wait -n; done; } # one job a processor
compile_all() { # SOURCE... If one does not compile, its program is missing
  local source
  for source; do
    room
    rm -f "$build/$(basename "$source" .c)"
    compile "$source" &
  done
  wait
}
compiled() { # SOURCE
  [ -x "$build/$(basename "$1" .c)" ] || { fail "$1 does not compile for $job"; return 1; }
}
under() { # COMMAND...: with three threads, under valgrind where that is the job
  local before=()
  [ "$job" != valgrind ] || before=(valgrind -q --error-exitcode=9 --leak-check=full)
  OMP_NUM_THREADS=3 "${before[@]}" "$@"
}
shorten() { # what a failure is about
  grep -E 'FAILED|ERROR|WARNING|runtime error|SUMMARY|==[0-9]+== [A-Z]|^ +#[0-4] ' "$1" | head -30 |
    cut -c1-200
}
try() { # NAME COMMAND...
  local name=$1 start=$SECONDS log=$work/$1.log status; shift
  under "$@" > "$log" 2>&1; status=$?
  if [ $status = 0 ]; then pass; printf '%-8s %s, %d s\n' $job "$name" $((SECONDS - start)); return; fi
  fail "$name under $job, status $status"
  shorten "$log"
  tail -3 "$log"
}
try_beside() { # NAME COMMAND...: beside others; leaves NAME.passed if it passes
  room
  { failed=0; try "$@" > "$work/$1.said"; [ $failed = 0 ] && touch "$work/$1.passed"; } &
}
programs() { # a dataset with each tokenizer, a run, its continuation, other techniques, the report; a folder
  # and a file of a model, and their texts
  local source technique out=$work/$job
  local small=(--layers 1 --heads 2 --d-model 16 --d-ff 16 --batch-size 2 --seq-len 16 --eval-batches 2)
  for source in $programs; do compiled $source || return; done
  mkdir -p "$out"
  try "prepare" "$build/prepare" --input "$work/text" --output "$out/d" --vocab-size 280
  try "prepare, wordpiece" "$build/prepare" --input - --output "$out/w" --tokenizer wordpiece \
    --vocab-size 100 < "$work/text"
  small+=(--data "$out/d" --results-dir "$out/runs")
  try "train" "$build/train" "${small[@]}" --steps 3 --save-every 2 --eval-every 2 --sample 5
  try "train --resume" "$build/train" "${small[@]}" --steps 5 --resume
  for technique in bf16_flash_window4_chunked fp16_selective_compact fp32_checkpointing fp32_flash \
    bf16_segments_compact fp8_flash_segments; do
    try "train $technique" "$build/train" "${small[@]}" --layers 3 --steps 2 --dropout 0.1 --accumulate 2 \
      --technique $technique
  done
  try "train --dry-run" "$build/train" "${small[@]}" --dry-run --json
  try "report" "$build/report" --results-dir "$out/runs"
  try "train, Llama" "$build/train" "${small[@]}" --steps 1 --dataset llama --positions rotary --norm rms \
    --mlp swiglu --no-biases
  try "convert" "$build/convert" "$out/runs/llama_fp32_best.safetensors" "$out/folder"
  try "convert, the same folder" "$build/convert" "$out/runs/llama_fp32_best.safetensors" "$out/folder"
  printf '{"eos_token_id": [2, 0]}' > "$out/folder/generation_config.json"
  printf '{"eos_token": "!", "chat_template": "a\\nb"}' > "$out/folder/tokenizer_config.json"
  try "convert, a folder" "$build/convert" "$out/folder" "$out/again"
  try "convert, GGUF" "$build/convert" "$out/folder" "$out/model.gguf" --type q8_0
  try "convert, no tokenizer" "$build/convert" "$out/folder" "$out/bare" --tokenizer none
  try "generate" "$build/generate" "$out/folder" --count 5 --stop x
}
programs="tools/prepare.c examples/train.c tools/report.c tools/convert.c examples/generate.c"
for job in ${*:-address memory thread valgrind}; do
  case $job in
    address) tests="test_model test_together test_plan test_files test_ranks test_tokenizer test_models";;
    memory) tests=test_files;;
    *) tests=;;
  esac
  # shellcheck disable=SC2086
  compile_all ${tests:+$(printf 'tests/%s.c ' $tests)} $programs
  begun=
  for test in $tests; do
    compiled tests/$test.c || continue
    try_beside $test "$build/$test" $([[ $test != test_@(model|together) ]] || echo quick)
    begun+=" $test"
  done
  wait
  for test in $begun; do
    cat "$work/$test.said"
    if [ -e "$work/$test.passed" ]; then pass; else failed=$((failed + 1)); fi
  done
  rm -f "$work"/*.passed
  programs
done
echo "$passed passed, $failed failed, 0 skipped"
[ $failed = 0 ] && [ $passed -gt 0 ]
