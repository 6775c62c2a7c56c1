#!/usr/bin/env bash
# test_suites.sh BUILD_DIR - what tools/experiments.sh, BUILD_DIR/report and tools/plots.sh promise. On the
# CPU, at a size of seconds.
set -u
. tests/lib.sh
root=$(pwd) train=$(realpath "$1")/train report=$(realpath "$1")/report work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
export OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1
mkdir stubs; ln -s "$(command -v true)" stubs/gnuplot # plots are drawn once, at the end
suite() {
  PATH=$work/stubs:$PATH "$root/tools/experiments.sh" --train "$trainer" "$@" > out 2> err < /dev/null
  code=$?
}
counts() { # WANTED ARGUMENT...: experiments that a dry run lists
  local wanted=$1; shift
  suite "$@" --dry-run
  check "$* lists $(wc -l < out) experiments, not $wanted" [ "$(wc -l < out)" = "$wanted" ]
}
timeless() { # FILE: a table without the columns of time and speed
  awk -F '\t' 'NR == 1 { for (i = 1; i <= NF; i++) drop[i] = $i ~ /time|ms|tokens_per_s|speed|pareto/ }
    { for (i = 1; i <= NF; i++) if (!drop[i]) printf "%s\t", $i; print "" }' "$1"
}
trainer=$train

# which experiments there are
counts 33 a
original='fp32|bf16|bf16_flash|bf16_window16|bf16_window32|fp32_checkpointing'
check "the 18 of the original" [ "$(grep -cE "^text_($original)_bs(32|64|128): " out)" = 18 ]
$(sed -n "1s/^[^:]*: [^:]*: //p" out) --dry-run --json --vocab-size 50257 > plan
check "a plans 28,941,393 parameters" [ "$(field plan parameters)" = 28941393 ]
counts 33 b; check "b's windows" [ "$(grep -cE '_window(64|128)_bs' out)" = 6 ]
counts 24 c --device cuda; check "TF32 is c's baseline on cuda" says out '^text_tf32_bs64: '
counts 36 d; counts 62 e; counts 24 c --small; counts 36 d --small; counts 62 e --memory-budget 2G
counts 25 a --only 'bf16*'; counts 2 a --only bf16_bs32,bf16_flash_bs64; counts 30 a --skip bf16
counts 15 a --batch-size 16; counts 5 a --only fp32 --baseline fp32 --device cuda
printf '#!/bin/sh\necho 1000\n' > "$work/stubs/nvidia-smi"; chmod +x "$work/stubs/nvidia-smi"
counts 34 a --device cuda
check "a batch that a device of 1000 MiB cannot hold" says out '^text_forced_tf32_bs[0-9]+: 10[0-9][0-9] MiB'
rm "$work/stubs/nvidia-smi"
check "a dry run leaves nothing" [ ! -e results ]
suite a --dry-run --sizes; check "an unknown option ends with $code, not 2" [ $code = 2 ]
suite a --dry-run --baseline bf16; check "an odd baseline ends with $code, not 2" [ $code = 2 ]
suite a --dry-run --memory-budget lots; check "an odd budget ends with $code, not 2" [ $code = 2 ]
suite a; check "no data ends with $code, not 2" [ $code = 2 ]

# a suite killed in its middle and continued ends as one that was left alone
sample_text > text.txt
tiny="--layers 1 --d-model 32 --heads 2 --d-ff 64 --seq-len 32 --save-every 20"
some="a --small --data text.txt --batch-size 2,4 --steps 60 --skip bf16_window32"
suite $some --results-dir whole -- $tiny
check "the suite ends with $code, not 0: $(tail -n 1 err)" [ $code = 0 ]
check "16 runs, each with metrics, memory and log" \
  [ "$(ls whole/a/*_metrics.json whole/a/*_memory.json whole/a/*.jsonl | wc -l)" = 48 ]
check "no checkpoint is left" [ -z "$(find whole -name '*.safetensors*')" ]
check "the summary is JSON" is_json whole/a/experiment_summary.json
for key in $(sed -n 's/^    X([A-Z]*, \([a-z_]*\), .*/\1/p' "$root/tools/results.h"); do # one table of keys
  check "the trainer writes $key" says whole/a/text_fp32_bs2_metrics.json "\"$key\": "
  check "the report reads $key" eval "head -n 1 whole/a/results.tsv | grep -qw $key || [ $key = dataset ]"
done
check "progress with an eta" says err '^\[ 3/16\] text_bf16_flash_bs2: perplexity .*eta'
PATH=$work/stubs:$PATH setsid "$root/tools/experiments.sh" --train "$train" $some --results-dir cut -- $tiny \
  > out 2> err < /dev/null & id=$!
log=cut/a/text_bf16_window16_bs2.jsonl
for _ in $(seq 500); do
  [ -s $log ] && [ "$(wc -l < $log)" -ge 30 ] && break
  sleep 0.01
done
{ kill -9 -$id; wait $id; } 2> /dev/null
check "the kill came in the middle" [ "$(ls cut/a/*_metrics.json | wc -l)" -lt 16 ]
touch -d '1 hour ago' cut/a/text_fp32_bs2_metrics.json; old=$(stat -c %Y cut/a/text_fp32_bs2_metrics.json)
suite $some --results-dir cut -- $tiny; check "the continued suite ends with $code, not 0" [ $code = 0 ]
check "what was complete is not run again" [ "$(stat -c %Y cut/a/text_fp32_bs2_metrics.json)" = "$old" ]
check "the tables of both are the same" cmp <(timeless whole/a/results.tsv) <(timeless cut/a/results.tsv)
suite $some --results-dir cut -- $tiny; check "nothing is left to run" says err '16 experiments|, 0 to run'
mkdir other && tac text.txt > other/text.txt
suite ${some/text.txt/other\/text.txt} --results-dir cut --only fp32_bs2 -- $tiny
check "another text of the same name is another experiment" says err ', 1 to run'
suite ${some/60/61} --results-dir cut --only fp32_bs2 -- $tiny
check "another number of steps is another experiment" says cut/a/text_fp32_bs2_metrics.json '"steps": 61'

# failures and refusals
cat > broken << 'TRAIN'
#!/bin/sh
case "$*" in *--find* | *--dry*) ;; *bf16_bs2*) echo 'train: broken "on purpose"' >&2; exit 5;; esac
exec "$TRAIN" "$@"
TRAIN
chmod +x broken; export TRAIN=$train; trainer=./broken
suite $some --results-dir broken_runs --only fp32_bs2,bf16_bs2,bf16_flash_bs2 -- $tiny
check "a failed run makes the suite end with $code, not 1" [ $code = 1 ]
check "the runs after it are there" [ -s broken_runs/a/text_bf16_flash_bs2_metrics.json ]
check "its message is in the summary" \
  says broken_runs/a/experiment_summary.json \
  '"text_bf16_bs2".*"status": "failed", "exit": 5, "message": "broken \\"on purpose\\""'
check "that is JSON" is_json broken_runs/a/experiment_summary.json
check "and in the report" says broken_runs/a/comparison_report.txt 'text_bf16_bs2 failed: broken "on purpose"'
trainer=$train
suite $some --results-dir broken_runs --only fp32_bs2,bf16_bs2,bf16_flash_bs2 -- $tiny
check "the next time it runs" [ $code = 0 ]
(
  ulimit -v 16000000
  suite a --small --data text.txt --batch-size 1000000 --only fp32 --steps 4 --results-dir forced -- $tiny
  echo "exit $code" >> err
  cp err forced
)
check "a batch too large for the machine fails cleanly" \
  says forced/a/experiment_summary.json '_bs1000000".*"failed", "exit": 4, "message": "out of host memory'
check "and the suite ends with 1" says forced/err '^exit 1$'
suite c --small --data text.txt --only refused,largest_fp32 --steps 2 --results-dir largest
check "refusals are answers: $code" [ $code = 0 ]
refusal='"status": "refused", "exit": 4, "message": "a batch of [0-9]* does not fit'
check "8 of them" [ "$(grep -c "$refusal" largest/c/experiment_summary.json)" = 8 ]

# the report, by hand-made numbers
mkdir hand
metrics() { # NAME TECHNIQUE BATCH PERPLEXITY ARENA MS...
  local name=$1 technique=$2 batch=$3 perplexity=$4 arena=$5; shift 5
  {
    printf '{"dataset": "x", "technique": "%s", "batch_size": %d, "seq_len": 100,' "$technique" $batch
    printf ' "steps": 3, "perplexity": %s, "ms_per_step": 50,' $perplexity
    printf ' "tokens_per_s": %d, "arena_bytes": %d, "peak_bytes": %d}\n' $((batch * 2000)) $arena $arena
  } > "hand/${name}_metrics.json"
  for ms in "$@"; do echo "{\"step\": 1, \"loss\": 2, \"ms\": $ms}"; done > "hand/$name.jsonl"
}
metrics x_fp32_bs8 fp32_bs8 8 100.0 104857600 900 20 20.5 19
metrics x_bf16_bs8 bf16_bs8 8 100.4 52428800 10 9 900
metrics x_bf16_flash_bs8 bf16_flash_bs8 8 101.0 41943040 16
metrics x_bf16_window4_bs8 bf16_window4_bs8 8 120.0 41943040 8
"$report" --results-dir hand > out; check "the report of runs without a summary" [ $? = 0 ]
check "a median, not a mean" says out '^\| fp32 .* 20\.2 \| +39506 \| +100 % \| +1\.00x \|$'
check "memory and speed against the baseline" \
  says out '^\| bf16 .* 50\.0 .* 10\.0 \| +80000 \| +50 % \| +2\.0[0-9]x \|$'
check "the Pareto front" says out 'both smaller and faster: bf16_window4 \(40\.0 MiB, 8\.0 ms\)$'
check "exact techniques, the window left out" \
  says out '1 of 2 runs within 0\.5 %.* farthest bf16_flash at batch 8, 1\.00 %'
check "what was saved" says out 'bf16_flash: 60\.0 MiB or 60 % less memory, 1\.27 times the speed'
check "the files" [ -s hand/comparison_report.txt -a -s hand/comparison.md -a -s hand/results.tsv ]
"$report" --results-dir hand --experiments fp32,bf16_flash_bs8 > out
check "--experiments" [ "$(grep -c '^| [bf].*8 |' out)" = 2 ]
echo '{"perplexity": 3' > hand/y_fp32_metrics.json
check "a damaged file does not end it" "$report" --results-dir hand
mkdir two
for text in one other; do
  sed "s/\"x\"/\"$text\"/" hand/x_fp32_bs8_metrics.json > two/${text}_fp32_metrics.json
done
"$report" --results-dir two > out 2> err; code=$?
check "runs of two texts are not compared" \
  eval '[ $code = 2 ] && says err "two has runs of one and of other: choose one with --dataset"'
"$report" --results-dir two --dataset other > out; check "--dataset" [ "$(grep -c '^| fp32' out)" = 1 ]
"$report" --results-dir nowhere > out 2> err; check "an empty folder ends with 3" [ $? = 3 ]

# plots
PATH=nowhere "$BASH" "$root/tools/plots.sh" whole/a > out 2> err
check "without gnuplot the package is named" says err 'gnuplot-nox'
if command -v gnuplot > /dev/null; then
  check "no plot fails" "$root/tools/plots.sh" whole/a
  for name in memory_vs_batch speed_vs_batch memory_speed_tradeoff all_techniques windows memory_saved \
    timeline_fp32 timeline_bf16_flash_chunked_budget; do
    for format in png svg; do check "plot $name.$format" [ -s whole/a/plots/$name.$format ]; done
  done
  check "the page shows them" says whole/a/comparison.md '^!\[windows\]\(plots/windows.png\)$'
else skip "plots, gnuplot is absent"; fi

closing_line
