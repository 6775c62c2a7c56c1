#!/usr/bin/env bash
# test_locale.sh BUILD_DIR - a locale whose decimals have a comma changes no byte of what a script prints or
# writes. There mawk reads 5.0861 as 5, sort -g reads 1.234 as 1, and printf refuses 0.5. Programs that print
# known numbers take the place of the trainer, profile, PyTorch, gnuplot and the clock, so each script's own
# arithmetic runs.
set -u
. tests/lib.sh
root=$(pwd) build=$(realpath "$1") work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1

has_comma() { [ "$(LC_ALL=$1 bash -c 'printf %.1f 2,5' 2> /dev/null)" = 2,5 ]; } # LOCALE
comma=
for name in $(locale -a 2> /dev/null | grep -iE '^(pl_PL|de_DE|fr_FR|cs_CZ)\.utf-?8$'); do
  ! has_comma "$name" || comma=$name
done
if [ -z "$comma" ] && mkdir locales && localedef -i pl_PL -f UTF-8 locales/pl_PL.UTF-8; then # needs no root
  export LOCPATH=$work/locales
  ! has_comma pl_PL.UTF-8 || comma=pl_PL.UTF-8
fi
if [ -z "$comma" ]; then
  skip "there is no locale with a decimal comma: apt-get install locales"
  closing_line; exit
fi

both() { # PATTERN COMMAND...: it says PATTERN, and says and leaves the same in made/, in either locale
  local pattern=$1 locale; shift
  for locale in C "$comma"; do
    rm -rf made "made.$locale" "$work/clock"; mkdir made
    PATH=$work/stubs:$PATH LC_ALL=$locale timeout 120 "$@" > made/out 2> made/err < /dev/null
    sed -i -E 's/(^|[ (])[0-9]+ (min|s)\b/\1N \2/g' made/out made/err # whole seconds of bash's own clock
    mv made "made.$locale"
  done
  check "$* says $pattern, not $(cat made.C/{out,err} | tail -n 3)" grep -rqE -- "$pattern" made.C
  check "$* with commas: $(diff -r made.C "made.$comma" 2>&1 | head -n 5)" diff -r made.C "made.$comma"
}
stub() { mkdir -p "$(dirname "$1")"; cat > "$1"; chmod +x "$1"; } # FILE

# A clock: the seconds are 1.75, 3.50, 5.25 and so on.
stub stubs/date << SH
#!/bin/sh
case \$* in *%N) ;; *) echo 2026-01-02; exit;; esac
echo >> "$work/clock"
n=\$((\$(wc -l < "$work/clock") * 175))
echo \$((n / 100)).\$((n % 100))
SH
# gnuplot prints what it would draw, its commands and the files in its folder, and leaves empty plots.
stub stubs/gnuplot << 'SH'
#!/bin/sh
commands=$(cat "$@")
echo "$commands"
for f in *; do [ ! -f "$f" ] || cat -- "$f"; done
echo "$commands" | sed -n "s/.*set output '\(.*\)'.*/\1/p" | while read -r f; do : > "$f"; done
SH
stub stubs/nvidia-smi << SH
#!/bin/sh
case \$* in *-lms*) printf '345, 80.5\n1620.5, 690.25\n1641.5, 700.5\n'; touch "$work/watched";; esac
SH
# Each run takes other milliseconds.
stub profile << SH
#!/bin/sh
case \$* in
  *--only-step*) for _ in 1 2 3 4 5 6 7 8 9; do [ -e "$work/watched" ] || sleep 0.2; done
    rm -f "$work/watched"
    case \$* in *fp8*) ms=20.85;; *) ms=28.70;; esac
    echo "{\"ms\": \$ms, \"tokens_per_s\": 1.5, \"arena_bytes\": 4902345678, \"loss\": 5.5}";;
  *) printf '| %s | 1.5 | 2.5 | 3.5 |\n' 'adamw | 64 > 64 | 2 | 0.734' 'linear | 8 > 8 | 4 | 1.234' \
    'linear_backward | 8 > 8 | 4 | 1.9';;
esac
SH
stub python << 'SH'
#!/usr/bin/env bash
[ "$1" != -c ] || exit 0
[[ $1 != *step.py ]] || { echo 10.75; exit; }
cat > "${!#}" << 'JSON'
 "device": "it",
 "pytorch": "9.8+cu7",
 "cuda": "7.6",
   "program": "PyTorch bf16, compiled, graphs",
   "ms": 57.7,
   "mib": 8322.5,
   "case": "tiny",
   "batch": 4,
   "seq_len": 64
JSON
SH
stub cc << 'SH'
#!/usr/bin/env bash
while [ "$1" != -o ]; do shift; done
cat > "$2" << 'PROGRAM'
#!/usr/bin/env bash
echo >> "$0.runs"
times=(9.8 10.7 1.234)
echo "{\"ms\": ${times[$(($(wc -l < "$0.runs") / 3 % 3))]}, "
PROGRAM
chmod +x "$2"
SH
stub train << 'SH'
#!/usr/bin/env bash
while [ $# -gt 1 ]; do case $1 in --*) declare "${1//-/_}=$2";; esac; shift; done
case $__technique in fp8*) loss=5.1043;; *) loss=5.0861;; esac
name=$__results_dir/${__dataset}_$__technique
echo '{}' > "${name}_metrics.json"
printf '{"step": %d, "loss": 5.2, "grad_norm": 1.5, "ms": %s}\n' 1 10.25 2 12.75 > "$name.jsonl"
printf '{"step": 2, "val_loss": %s}\n' $loss >> "$name.jsonl"
SH
tools=$root/tools
both '\| 57.70 \(graphs\) \| 8,727 \| flash \| 28.70 \| 4,902 \| 2.01x \| 56 % \|' \
  env DEVICE=cpu STEPS=4 PROFILE="$work/profile" PYTHON="$work/python" FIGURES=made/figures \
  "$tools/bench.sh" tiny
both 'FP8, flash \| 20.85 \| 4,902 \|$' \
  env DEVICE=cpu STEPS=4 PROFILE="$work/profile" PYTHON=false FIGURES="$work/figures" "$tools/bench.sh" b64
page='<!-- bench:begin -->\n<!-- bench:end -->'
both 'FP8, flash \| 20.85 \| 4,902 \|$' env FIGURES="$work/figures" PAGE=made/page.md \
  sh -c "printf '$page\n' > made/page.md; '$tools/bench.sh' --table"
both 'demo \| busy \| plain_bf16 \| 10 \| 1 \| 11 \|' \
  env CC="$work/cc" REPEATS=3 PYTHON="$work/python" "$tools/bench_cpu.sh" demo
both '\| power, W \| \| \| 695 \|' env DEVICE=cpu PROFILE="$work/profile" "$tools/profile.sh" tiny
echo > text.train.tokens
both '\| tiny \| fp8_flash \| mean \| 5.1043 \| 164.73 \| \+1.84 \(' \
  env DEVICE=cpu TRAIN="$work/train" RESULTS=made/quality SEEDS="0 1" "$tools/quality.sh" text tiny

# In a copy of the tools: experiments, plots and demo, with results that a trainer has left; and the scripts
# that run the tests.
mkdir -p copy/{build,.ci,tests,examples}
suites=$root/examples/assignment
cp -r "$tools" copy; cp -r "$suites" copy/examples; cp "$root/.ci/run" copy/.ci
cp "$root"/tests/{run,lib}.sh copy/tests
touch copy/mtt.h copy/mtt_kernels.cu
ln -s "$build"/{report,prepare} copy/build
sample_text | head -c 40000 > text.txt
small=(--only fp32,bf16_flash,learning --steps 4)
tiny=(-- --layers 1 --d-model 32 --heads 2 --d-ff 64 --seq-len 32)
"$suites/experiments.sh" demo --small --data text.txt "${small[@]}" --trainer "$build/train" \
  --results-dir "$work/known" "${tiny[@]}" > log 2>&1
check "there are results: $(tail -n 1 log)" [ -s known/cpu/results.csv ]
stub copy/build/train << SH
#!/usr/bin/env bash
all=("\$@")
while [ \$# -gt 1 ]; do case \$1 in --*) declare "\${1//-/_}=\$2";; esac; shift; done
[[ ! \${all[*]} =~ --(dry-run|find-max-batch) ]] || exec "$build/train" "\${all[@]}"
cp "$work/known/cpu/\${__dataset}_\$__technique"*.json* "\$__results_dir"
printf '\nzażółć %s\n' "\$(printf 'ł%.0s' {1..60})"
SH
for name in copy/tools/deps.sh stubs/{make,nvcc,git,apt-get,python3}; do stub $name <<< '#!/bin/sh'; done
suite() { both "$1" copy/examples/assignment/experiments.sh demo --small --data text.txt "${small[@]}" \
  --trainer copy/build/train "${@:2}" "${tiny[@]}"; }
suite 'bf16_flash_bs16: [1-9] MiB planned' --dry-run
suite 'bf16_flash_bs16: perplexity [0-9]+\.[0-9]+, [1-9] MiB' --results-dir made
both 'set yrange \[[0-9]\.[0-9]' sh -c "cp known/cpu/*.csv known/cpu/*.json* made; '$suites/plots.sh' made"
cd copy || exit 1
both 'bf16_flash_bs16: perplexity [0-9]+\.[0-9]+, [1-9] MiB' \
  sh -c "rm -rf results; tools/demo.sh '$work/text.txt' ${small[*]} ${tiny[*]}"
check "a line of demo's sample may be cut, but not a letter" iconv -f utf-8 -t utf-8 made.C/out
check "the sample is there" says made.C/out '^  \| zażółć łłł'
for name in $(grep -oE 'test_[a-z_]+\.sh' "$root/tests/run.sh"); do
  stub tests/programs/$name <<< 'echo 3 passed, 0 failed, 0 skipped'
done
stub ../stubs/nproc <<< 'echo 1'
both 'test_train.sh +3 passed, 0 failed, 0 skipped, 1\.8 s' tests/run.sh made
both '^mtt.h: 1\.8 s to compile' .ci/run

closing_line
