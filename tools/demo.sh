#!/usr/bin/env bash
# demo.sh [TEXT [OPTION...]] - trains one small model with ten techniques: what does each save, and cost?
# `make demo` calls it in the repository root. The default text is the project's own source, which needs no
# download. Results go to results/demo/NAME, a folder for each text. Options are those of experiments.sh.
set -u -o pipefail
export LC_ALL=C # decimals have a point
[ "${BASH_VERSINFO[0]}" -ge 4 ] || { echo "demo: needs bash 4: brew install bash" >&2; exit 2; }
text=${1:-} name=mtt_source failed=
shift $(($# > 0))
fail() { echo "demo: $*" >&2; exit 1; }
build() { make -s --no-print-directory -o deps -j2 "$@"; } # dependencies were looked for once

if [ -n "$text" ]; then
  [ -f "$text" ] || fail "there is no file $text"
  name=${text##*/} name=${name/#./_} name=${name%.*}
  name=${name//[^A-Za-z0-9_-]/_}
fi
gpu=$(tools/arch.sh gpu)
echo "Ten techniques train one small GPT on ${text:-the source of mtt}: about two minutes on two idle cores."
if [ -n "$gpu" ] && command -v nvcc > /dev/null; then
  echo "Then they train a larger one on the GPU ($gpu); building that takes a minute."
elif [ -n "$gpu" ]; then
  echo "There is a GPU ($gpu), but no nvcc: with the CUDA Toolkit, the demo would use it, too."
  gpu=
fi
mkdir -p build/demo && tools/deps.sh gnuplot || exit 1
echo "building the trainer ..."
build build/train build/report build/prepare || fail "the trainer does not build"
if [ -z "$text" ]; then
  text=build/demo/$name.txt
  cat mtt.h mtt_kernels.cu {examples,tools,tests}/*.[ch] > "$text" || exit 1
fi
out=results/demo/$name

show_sample() { # FILE: bytes that are no text, and control characters, do not reach the terminal
  echo "A sample of what it writes now:"
  tr -d '\000-\010\013-\037\177' < "$1" | cat -s | head -n 24 | cut -b 1-95 | sed 's/^/  | /' |
    iconv -cf utf-8 -t utf-8 # at last: a line may be cut within a letter
}
compare() { # TRAINER DEVICE OPTION...: results of another build are not continued, but moved away
  local train=$1 dir=$out/$2 file; shift
  if [ -e "$dir/experiment_summary.json" ] && [ "$train" -nt "$dir/experiment_summary.json" ]; then
    mv --backup=numbered -T "$dir" "$dir.old" || fail "cannot move $dir away"
    echo "results of another build are now in $dir.old"
  fi
  examples/assignment/experiments.sh demo --trainer "$train" --data "$text" --results-dir "$out" \
    --device "$@" || case $? in 1) failed=1;; *) exit $?;; esac
  for file in "$dir"/*_sample.txt; do [ ! -s "$file" ] || show_sample "$file"; done
  echo
  echo "Every number  $dir/comparison.md, for programs results.csv"
  [ ! -d "$dir/plots" ] || echo "Plots         $dir/plots, memory through a step: timeline_*.png"
  echo "Logs          $dir/*.jsonl, commands and failures: experiment_summary.json"
}

compare build/train cpu --small "$@"
if [ -n "$gpu" ]; then
  echo
  echo "building for the GPU ..."
  if build build/train_cuda; then compare build/train_cuda cuda "$@"
  else echo "demo: the trainer does not build for the GPU" >&2; failed=1; fi
fi
echo "Your text     make demo TEXT=my_text.txt; tools/get_data.sh lists texts"
[ -z "$failed" ] || fail "not everything was trained, see above; the same command tries again"
