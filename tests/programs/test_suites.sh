#!/usr/bin/env bash
# test_suites.sh BUILD_DIR - what experiments.sh, BUILD_DIR/report and plots.sh promise. On the
# CPU, at a size of seconds.
set -u
. tests/lib.sh
root=$(pwd) assignment=$PWD/examples/assignment train=$(realpath "$1")/train
report=$(realpath "$1")/report work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
export OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1
mkdir stubs; ln -s "$(command -v true)" stubs/gnuplot # plots are drawn once, at the end
suite() {
  PATH=$work/stubs:$PATH "$assignment/experiments.sh" --trainer "$trainer" "$@" > out 2> err < /dev/null
  code=$?
}
counts() { # WANTED ARGUMENT...: experiments that a dry run lists
  local wanted=$1; shift
  suite "$@" --dry-run
  check "$* lists $(wc -l < out) experiments, not $wanted" [ "$(wc -l < out)" = "$wanted" ]
}
timeless() { # FILE: a table without the columns of time and speed
  awk -F , 'NR == 1 { for (i = 1; i <= NF; i++) drop[i] = $i ~ /time|ms|tokens_per_s|speed|pareto/ }
    { for (i = 1; i <= NF; i++) if (!drop[i]) printf "%s\t", $i; print "" }' "$1"
}
trainer=$train

# which experiments there are
counts 38 a
original='fp32|bf16|bf16_flash|bf16_window16|bf16_window32|fp32_checkpointing'
check "the 18 of the original" [ "$(grep -cE "^text_($original)_bs(32|64|128): " out)" = 18 ]
$(sed -n "1s/^[^:]*: [^:]*: //p" out) --dry-run --json --vocab-size 50257 > plan
check "a plans 28,941,393 parameters" [ "$(field plan parameters)" = 28941393 ]
counts 38 b; check "b's windows" [ "$(grep -cE '_window(64|128)_bs' out)" = 6 ]
counts 27 c --device cuda; check "TF32 is c's baseline on cuda" says out '^text_tf32_bs64: '
counts 39 d; counts 81 e; counts 27 c --small; counts 39 d --small; counts 81 e --memory-budget 2G
counts 25 a --only 'bf16*'; counts 2 a --only bf16_bs32,bf16_flash_bs64; counts 35 a --skip bf16
counts 18 a --batch-size 16; counts 5 a --only fp32 --baseline fp32 --device cuda
printf '#!/bin/sh\necho 1000\n' > "$work/stubs/nvidia-smi"; chmod +x "$work/stubs/nvidia-smi"
counts 39 a --device cuda
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
check "18 runs, each with metrics, memory and log" \
  [ "$(ls whole/a/*_metrics.json whole/a/*_memory.json whole/a/*.jsonl | wc -l)" = 54 ]
check "no checkpoint is left" [ -z "$(find whole -name '*.safetensors*')" ]
check "the summary is JSON" is_json whole/a/experiment_summary.json
for key in $(sed -n 's/^    X([A-Z]*, \([a-z_]*\), .*/\1/p' "$root/tools/results.h"); do # one table of keys
  check "the trainer writes $key" says whole/a/text_fp32_bs2_metrics.json "\"$key\": "
  check "the report reads $key" eval "head -n 1 whole/a/results.csv | grep -qw $key || [ $key = dataset ]"
done
check "progress, and the time left" \
  says err '^\[ 3/18\] bf16_flash_bs2: perplexity [0-9.]+, [0-9]+ MiB; [0-9]+ s, about [0-9 min]+ s left$'
suite $some --results-dir whole --batch-size 2 --only fp32 -- $tiny
check "a part of it again leaves all 18 in the report" [ "$(grep -c . whole/a/results.csv)" = 19 ]
check "with their names" says whole/a/results.csv '_bs4,batch,bf16_flash_chunked_budget,'
PATH=$work/stubs:$PATH \
  setsid "$assignment/experiments.sh" --trainer "$train" $some --results-dir cut -- $tiny \
  > out 2> err < /dev/null & id=$!
log=cut/a/text_bf16_window16_bs2.jsonl
for _ in $(seq 500); do
  [ -s $log ] && [ "$(wc -l < $log)" -ge 30 ] && break
  sleep 0.01
done
{ kill -9 -$id; wait $id; } 2> /dev/null
check "the kill came in the middle" [ "$(ls cut/a/*_metrics.json | wc -l)" -lt 18 ]
touch -d '1 hour ago' cut/a/text_fp32_bs2_metrics.json; old=$(stat -c %Y cut/a/text_fp32_bs2_metrics.json)
suite $some --results-dir cut -- $tiny; check "the continued suite ends with $code, not 0" [ $code = 0 ]
check "what was complete is not run again" [ "$(stat -c %Y cut/a/text_fp32_bs2_metrics.json)" = "$old" ]
check "the tables of both are the same" cmp <(timeless whole/a/results.csv) <(timeless cut/a/results.csv)
suite $some --results-dir cut -- $tiny; check "nothing is left to run" says err ', 0 to run'
mkdir other && tac text.txt > other/text.txt
suite ${some/text.txt/other\/text.txt} --results-dir cut --only fp32_bs2 -- $tiny
check "another text of the same name is another experiment" says err ', 1 to run'
suite ${some/60/61} --results-dir cut --only fp32_bs2 -- $tiny
check "another number of steps is another experiment" says cut/a/text_fp32_bs2_metrics.json '"steps": 61'
check "runs of the first text are not compared with it" \
  [ "$(grep -c '^text_' cut/a/results.csv)" = 1 -a -e cut/a/text_bf16_bs4.old/text_bf16_bs4_metrics.json ]

# a disk without locks
printf '#!/bin/sh\nexit 71\n' > stubs/flock; chmod +x stubs/flock # as flock ends where the call gives ENOLCK
suite a --small --data text.txt --only fp32_bs2 --batch-size 2 --steps 4 --results-dir lockless -- $tiny
check "a suite runs on a disk without locks, and says so" eval '[ $code = 0 ] && not says err waiting &&
  says err "^suite a: this disk has no locks: do not start it twice"'
rm stubs/flock

# the tiny trainer: the same metrics, to the digit, but for times
trainer=$(dirname "$train")/tiny
suite $some --results-dir tiny -- $tiny
check "the tiny trainer's suite ends with $code, not 0: $(tail -n 1 err)" [ $code = 0 ]
digits() { sed -E 's/"(training_time|ms_per_step|tokens_per_s)": [0-9.]+/\1/g' "$1" | tr ',' '\n' | sort; }
for metrics in whole/a/*_metrics.json; do
  check "the tiny trainer's $(basename "$metrics") differs" \
    [ "$(digits "$metrics")" = "$(digits tiny/a/"$(basename "$metrics")")" ]
  memory=${metrics%_metrics.json}_memory.json
  check "its $(basename "$memory") differs" cmp -s "$memory" "tiny/a/$(basename "$memory")"
done
ln -s victim tiny/linked_fp32_metrics.json; ln -s victim tiny/linked_fp32_memory.json
tokens=$(ls whole/data/*.train.tokens)
"$trainer" --data ${tokens%.train.tokens} --dataset linked --results-dir tiny --steps 1 --no-checkpoint \
  $tiny > out 2> err
check "links in the place of its results are replaced, not followed: $(tail -n 1 err)" \
  eval '[ -s tiny/linked_fp32_metrics.json -a ! -L tiny/linked_fp32_metrics.json -a ! -e tiny/victim ]'
check "no checkpoint of it is left" [ -z "$(find tiny -name '*.safetensors*')" ]
trainer=$train

# failures and refusals
cat > broken << 'TRAIN'
#!/bin/sh
case "$*" in *--find* | *--dry*) ;; *bf16_bs2*) echo 'train: broken "on purpose"' >&2; exit 6;; esac
exec "$TRAIN" "$@"
TRAIN
chmod +x broken; export TRAIN=$train; trainer=./broken
suite $some --results-dir broken_runs --only fp32_bs2,bf16_bs2,bf16_flash_bs2 -- $tiny
check "a failed run makes the suite end with $code, not 1" [ $code = 1 ]
check "the runs after it are there" [ -s broken_runs/a/text_bf16_flash_bs2_metrics.json ]
check "its message is in the summary" \
  says broken_runs/a/experiment_summary.json \
  '"text_bf16_bs2".*"status": "failed", "exit": 6, "message": "broken \\"on purpose\\""'
check "that is JSON" is_json broken_runs/a/experiment_summary.json
check "and in the report" says broken_runs/a/comparison_report.txt 'text_bf16_bs2 failed: broken "on purpose"'
trainer=$train
suite $some --results-dir broken_runs --only fp32_bs2,bf16_bs2,bf16_flash_bs2 -- $tiny
check "the next time it runs" [ $code = 0 ]
sed -i 's/bf16_bs2.*;; esac/fp8_flash_bs2*) echo "train: $OLD" >\&2; exit 2;; esac/' broken
check "mtt_kernels.cu says what the suites know" \
  grep -q 'precision %s needs compute capability %d' "$root/mtt_kernels.cu"
export OLD='precision fp8 needs compute capability 8.9'; trainer=./broken
suite $some --results-dir old_gpu --only fp32_bs2,fp8_flash_bs2 -- $tiny
check "FP8 on an older GPU is refused, and the suite ends with $code, not 0" [ $code = 0 ]
check "the report has the library's message" \
  says old_gpu/a/comparison_report.txt 'fp8_flash_bs2 refused: precision fp8 needs compute capability 8\.9'
trainer=$train
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
check "9 of them" [ "$(grep -c "$refusal" largest/c/experiment_summary.json)" = 9 ]

# checkpoints, and what becomes of them: a trainer of no steps writes the files and ends as $FAKE says
cat > fake << 'FAKE'
#!/usr/bin/env bash
case "$*" in *--find-max* | *--dry-run*) exec "$TRAIN" "$@";; esac
words=" $* "
for ((i = 1; i < $#; i++)); do
  next=$((i + 1))
  case ${!i} in
    --dataset) dataset=${!next};; --technique) technique=${!next};; --results-dir) folder=${!next};;
  esac
done
run=$folder/${dataset}_$technique perplexity=100
case $words in *' --resume '*) echo "$technique resumed";; *) echo "$technique new";; esac >> calls
case $FAKE in
  full | refuse) echo "train: $FAKE" >&2;;
  diverge) perplexity=null;;
esac
[ $FAKE = refuse ] || touch "$run"_step{20,40}.safetensors "${run}_best.safetensors"
case $FAKE in full | refuse) exit 3;; esac
{
  printf '{"dataset": "%s", "technique": "%s", "batch_size": 2, "steps": 3,' "$dataset" "$technique"
  printf ' "seq_len": 32, "perplexity": %s, "ms_per_step": 5, "tokens_per_s": 640,' $perplexity
  printf ' "arena_bytes": 99999999}\n'
} > "${run}_metrics.json"
[ $FAKE != diverge ] || { echo 'train: the loss is not finite' >&2; exit 5; }
FAKE
chmod +x fake; trainer=./fake
fake() { # MODE ARGUMENT...: one experiment; sets code
  export FAKE=$1; shift
  rm -f calls
  suite $some --results-dir fakes --only fp32_bs2 "$@" -- $tiny
}
stem=fakes/a/text_fp32_bs2
fake full
check "a trainer whose disk is full makes the suite end with $code, not 1" [ $code = 1 ]
check "its checkpoints stay" [ "$(ls fakes/a/*.safetensors | wc -l)" = 3 ]
fake refuse
check "a checkpoint without metrics is resumed, and never trained from the start" \
  [ "$(cat calls)" = 'fp32_bs2 resumed' ]
check "the message says how to start over" says fakes/a/experiment_summary.json \
  '"failed", "exit": 3, "message": "refuse; to start over, move the checkpoints of text_fp32_bs2 away"'
check "what can be continued stays" [ "$(ls fakes/a/*.safetensors | wc -l)" = 3 ]
rm ${stem}_step*
fake refuse; check "the best checkpoint alone is not resumed" [ "$(cat calls)" = 'fp32_bs2 new' ]
touch ${stem}_step20.safetensors
fake done
check "the resumed run ends with $code, not 0" eval '[ $code = 0 ] && [ "$(cat calls)" = "fp32_bs2 resumed" ]'
check "its metrics are there, its checkpoints are not" \
  [ -s ${stem}_metrics.json -a -z "$(find fakes -name '*.safetensors*')" ]
fake done; check "it is not run again" [ $code = 0 -a ! -e calls ]
for run in 1 2; do
  fake diverge --steps $((80 + run))
  check "a diverged run makes the suite end with $code, not 1" [ $code = 1 ]
done
check "the files of other settings are kept" \
  [ -s $stem.old/text_fp32_bs2_metrics.json -a -e $stem.old2/text_fp32_bs2_step40.safetensors ]
check "it is new, with other settings" [ "$(cat calls)" = 'fp32_bs2 new' ]
for run in 1 2; do
  check "the summary calls it diverged" \
    says fakes/a/experiment_summary.json '"text_fp32_bs2".*"status": "diverged", "exit": 5'
  check "as does the report" says fakes/a/comparison.md '^- text_fp32_bs2 diverged: its perplexity is not'
  fake diverge --steps 82; check "it is not run again, and ends with $code, not 1" [ $code = 1 -a ! -e calls ]
done
fake done --steps 83 --keep-checkpoints
check "kept checkpoints" [ "$(ls fakes/a/checkpoints | wc -l)" = 3 ]
fake done --steps 84 --keep-checkpoints
check "those of other settings are not replaced" [ "$(ls fakes/a/checkpoints | wc -l)" = 6 ]

# the demo, as make calls it, with a small model; make itself only builds the trainer for the GPU, a fake
mkdir -p demo/build fake_bin
ln -s "$root"/{mtt.h,mtt_kernels.cu,tools,examples,tests} demo
for program in train report prepare; do ln -s "$(dirname "$train")/$program" demo/build; done
cat > fake_bin/make << 'MAKE'
#!/usr/bin/env bash
case "$*" in *train_cuda*) ;; *) exit 0;; esac
[ -z "${NO_CUDA:-}" ] || exit 2
printf '#!/usr/bin/env bash\nexec build/train "${@/#cuda/cpu}"\n' > build/train_cuda
chmod +x build/train_cuda
MAKE
chmod +x fake_bin/make
demo() { # TEXT OPTION...: sets code
  (cd demo && PATH=$work/fake_bin:$work/stubs:$PATH tools/demo.sh "$@" -- $tiny --warmup-steps 1) \
    > out 2>&1 < /dev/null
  code=$?
}
here=demo/results/demo
cp text.txt demo/my.text.txt; cp other/text.txt demo/other.txt
demo my.text.txt --steps 6 --batch-size 2
check "the demo ends with $code, not 0: $(tail -n 1 out)" [ $code = 0 ]
check "a line for each step of its plan" \
  [ "$(grep -cE '^\[ ?[0-9]+/14\] .* [0-9]+ s, about [0-9 min]+ s left$' out)" = 14 ]
check "a table of ten techniques" [ "$(grep -cE '^(fp32|bf16|fp8)[a-z0-9_]* .*%' out)" = 10 ]
wide=$(awk 'length > 100' out); check "nothing wider than 100 columns: $wide" [ -z "$wide" ]
check "each technique has its words" not says out '^(fp32|bf16|fp8)[a-z0-9_]* +\+? +[0-9.]+ '
check "the learning curve" says out 'Its perplexity was [0-9]+ at the'
check "a sample" says out '^  \| .*[a-z]'
for file in comparison.md results.csv experiment_summary.json; do
  check "it names $file" says out $file
  check "$file is there" [ -s $here/my_text/cpu/$file ]
done
check "the write-ups are not mentioned" not says out 'write-up|original|assignment'
demo my.text.txt --steps 6 --batch-size 2
check "nothing runs twice" eval 'says out ", 0 to run" && says out "^fp32_checkpointing .* same"'
check "the sample is there again" says out '^  \| .*[a-z]'
demo other.txt --steps 6 --batch-size 2 --only fp32
check "another text has another folder" [ $code = 0 -a "$(grep -c , $here/other/cpu/results.csv)" = 5 ]
check "the first one's is as it was" [ "$(grep -c , $here/my_text/cpu/results.csv)" = 42 ]
rm demo/build/train # or the link's target would be written
cat > demo/build/train << TRAIN
#!/bin/sh
case "\$*" in *--find* | *--dry*) ;; *bf16_bs2*) echo 'train: broken by intention' >&2; exit 6;; esac
exec $train "\$@"
TRAIN
chmod +x demo/build/train; touch -d 'now + 1 hour' demo/build/train
demo my.text.txt --steps 6 --batch-size 2 --only fp32,bf16
check "a failed technique makes it end with $code, not 1" [ $code = 1 ]
check "its line of progress says why" says out '^\[ 2/5\] bf16_bs2: FAILED \(6\): broken by intention; '
check "the report says it, too, and the table has the other one" \
  eval 'says out "my.text_bf16_bs2 failed: broken by" && says out "^fp32 .* 100 %"'
check "the last line says that something failed" eval 'tail -n 1 out | grep -q "^demo: not everything"'
check "results of another build are kept apart" [ -s $here/my_text/cpu.old/results.csv ]
rm demo/build/train; ln -s "$train" demo/build
demo nowhere.txt; check "a text that is not there" says out '^demo: there is no file nowhere.txt$'

# the demo with a GPU
fake_smi() { # COMMANDS: what nvidia-smi says where it is asked for GPUs
  printf '#!/bin/sh\ncase "$*" in *compute_cap* | -L) %s;; *) echo 1000;; esac\n' "$1" > fake_bin/nvidia-smi
  chmod +x fake_bin/nvidia-smi
}
fake_smi 'echo "8.9, Fake 9"'
printf '#!/bin/sh\n' > fake_bin/nvcc
chmod +x fake_bin/nv*
demo other.txt --steps 6 --batch-size 2 --only tf32,fp32,bf16
check "the demo with a GPU ends with $code, not 0: $(tail -n 1 out)" [ $code = 0 ]
check "it says so first" eval 'head -n 2 out | grep -q "the GPU (Fake 9); "'
check "results of both devices" [ -s $here/other/cpu/results.csv -a -s $here/other/cuda/results.csv ]
check "TF32 is the GPU's baseline" says $here/other/cuda/results.csv ',batch,tf32,'
export NO_CUDA=1; demo other.txt --steps 6 --batch-size 2 --only tf32,fp32,bf16; unset NO_CUDA
check "without the GPU's trainer it ends with $code, not 1, after the CPU's part" \
  eval '[ $code = 1 ] && says out "does not build for the GPU" && says out "^fp32 "'
rm fake_bin/nvcc
no_nvcc=$(tr : '\n' <<< "$PATH" | while read -r dir; do [ -x "$dir/nvcc" ] || echo "$dir"; done | paste -sd :)
PATH=$no_nvcc demo other.txt --steps 6 --batch-size 2 --only tf32,fp32,bf16
check "without nvcc the demo ends with $code, not 0, and names what is missing" \
  eval '[ $code = 0 ] && says out "but no nvcc" && ! says out "building for the GPU"'

# GPUs that are too old, and a driver that is missing: the CPU does it, and it is said
printf '#!/bin/sh\n' > fake_bin/nvcc; chmod +x fake_bin/nvcc
arch() { PATH=$work/fake_bin:$PATH "$root/tools/arch.sh" "$@" 2> err; }
real_make=$(command -v make) # not the one in fake_bin
tests_of_make() { # its variables
  (cd "$root" && PATH=$work/fake_bin:$PATH "$real_make" -pn) > make_says 2> /dev/null
  grep -q "^CUDA :=" make_says
}
unusable() { # NAME COMMANDS PATTERN
  fake_smi "$2"
  rm -f demo/build/train_cuda
  demo other.txt --steps 6 --batch-size 2 --only fp32
  check "$1: the demo ends with $code, not 0" [ $code = 0 ]
  check "$1: it says so" says out "$3"
  check "$1: it promises nothing on the GPU" not says out 'Then they train|building for the GPU'
  check "$1: no GPU is named" [ -z "$(arch gpu)" ]
  check "$1: the reason is" says err "$3"
  check "$1: make builds no test for it" eval \
    'tests_of_make && ! grep -q "^CUDA.*test_cuda" make_says'
}
unusable "a V100" 'echo "7.0, Tesla V100"' 'V100. has compute capability 7.0, below 7.5: the CPU is used'
unusable "no driver" 'echo "NVIDIA-SMI has failed because it could not communicate with the driver"; exit 9' \
  'is its driver loaded, and new enough\? The CPU is used'
unusable "an old driver" 'echo "Field compute_cap is not valid"; exit 2' 'is its driver loaded'
unusable "no device" 'echo "No devices were found"; exit 6' 'is its driver loaded'
made() { # OPTION CAPABILITY...: nvcc's option
  local option=$1; shift
  fake_smi "printf '%s, GPU\\n' $*"
  check "capabilities $*: $(arch), not $option" [ "$(arch)" = "$option" ]
}
made -arch=native 8.0; made -arch=native 8.0 9.0; made -arch=native 12.0; made -arch=sm_86 7.0 8.6
made -arch=native 7.5; made -arch=native 7.5 8.6; made -arch=sm_75 6.1 7.5
made -arch=sm_100 10.0 7.0; made -gencode=arch=compute_90a,code=sm_90a 9.0
made -gencode=arch=compute_90a,code=sm_90a 9.0 7.0
printf '#!/bin/sh\necho "Cuda compilation tools, release 12.1, V12.1.105"\n' > fake_bin/nvcc
made -arch=sm_90 9.0; made -arch=native 8.0
fake_smi 'echo "7.0, Old"; echo "8.9, New"'
check "a usable one is named beside an old one" [ "$(arch gpu)" = New ]
check "it trains in $(arch half), not bf16" [ "$(arch half)" = bf16 ]
fake_smi 'echo "7.5, Tesla T4"'
check "a T4 is named" [ "$(arch gpu)" = "Tesla T4" ]
check "a T4 trains in $(arch half), not fp16" [ "$(arch half)" = fp16 ]
for suite in a e demo; do
  PATH=$work/fake_bin:$PATH suite $suite --device cuda --data text.txt --dry-run --results-dir on_t4
  check "suite $suite has fp16 on a T4, and nothing that it refuses but fp8" eval \
    '[ $code = 0 ] && says out fp16_flash && ! says out "bf16|tf32"'
done
fake_smi 'echo "8.0, A100"'
PATH=$work/fake_bin:$PATH suite a --device cuda --data text.txt --dry-run --results-dir on_a100
check "it has bf16 and tf32 on an A100" eval 'says out tf32 && says out bf16_flash'
check "make builds tests for a usable GPU" eval 'tests_of_make && grep -q "^CUDA.*test_cuda" make_says'
rm fake_bin/nv*
check "make CFLAGS=-O1 keeps the other flags" eval \
  '(cd "$root" && make -Bn CFLAGS=-O1 build/schedule) | grep -q -- "-O1 -std=gnu99 -Wall -Wextra -fopenmp"'

# the notebook, cell by cell, on the CPU
if command -v python3 > /dev/null && command -v git > /dev/null; then
  mkdir notebook
  (cd "$root" && cp -r Makefile mtt.h mtt_kernels.cu examples tools tests "$work/notebook") && (cd notebook &&
    git init -q && git add -A &&
    git -c user.name=mtt -c user.email=mtt@localhost commit -qm notebook) > out 2>&1
  mkdir open
  cells() { python3 "$root/tests/oracles/notebook.py" "$root/examples/colab.ipynb" "$@"; }
  (cd open && CFLAGS=-O1 PATH=$work/stubs:$PATH cells REPOSITORY="$work/notebook" \
    OPTIONS="--steps 4 --batch-size 2 --only fp32,bf16_flash") > out 2>&1
  code=$?
  check "the notebook's cells end with $code, not 0: $(tail -n 1 out)" [ $code = 0 ]
  check "it says what the plan is" says out '^parameters 28941393, arena [0-9]+ bytes'
  check "it shows the table" says out '^\| bf16_flash +\|'
  mkdir closed; (cd closed && cells) > out 2>&1
  check "the notebook as it is asks for REPOSITORY" says out '^set REPOSITORY in the first cell'
  (cd closed && cells REPOSITORY=/nowhere) > out 2>&1
  check "and where it cannot be cloned" says out '^cannot clone /nowhere: check REPOSITORY'
  command=$(grep -o 'build/train --dry-run[^"]*' "$root/examples/colab.ipynb")
  arena() { grep -oE 'arena [0-9]+ bytes' out; }
  "$train" ${command#* } > out 2>&1; planned=$(arena)
  "$train" --dry-run --device cuda --preset a --batch-size 128 --vocab-size 50257 \
    $(device=cuda; eval "$(sed -n '/^full()/,/^}/p' "$assignment/suites.sh")"; full fp16_flash) \
    --technique fp16_flash > out 2>&1
  check "its plan is that of the suite's row: $planned" [ -n "$planned" -a "$planned" = "$(arena)" ]
else skip "the notebook: no python3 or no git"; fi

# packages: installed where that needs no password, named otherwise
mkdir bare
printf '#!/bin/sh\nexit 1\n' > bare/cc
printf '#!/bin/sh\necho 1000\n' > bare/id
printf '#!/bin/sh\n[ -z "$NO_SUDO" ] && shift && exec "$@"\n' > bare/sudo
printf '#!/bin/sh\necho "$@" >> %s/apt\nexit $APT\n' "$work" > bare/apt-get
printf '#!/bin/sh\n' > bare/true
chmod +x bare/*
sh=$(command -v sh); ln -s "$sh" bare/sh
deps() { # VARIABLE=VALUE... -- ARGUMENT...
  local -a settings=()
  while [ "$1" != -- ]; do settings+=("$1"); shift; done; shift
  rm -f apt
  env PATH="$work/bare" CC=cc NO_SUDO= APT=0 "${settings[@]}" "$BASH" "$root/tools/deps.sh" "$@" > out 2>&1
  code=$?
}
deps -- gnuplot
check "it says what it installs, in one line, before" \
  eval '[ $code = 0 -a "$(wc -l < out)" = 1 ] && says out "^installing libstb-dev .* gnuplot-nox with apt"'
check "and installs it" says apt '^install -y libstb-dev libopenblas-openmp-dev gnuplot-nox$'
deps -- ; check "gnuplot is for the demo alone" not says apt gnuplot
deps NO_SUDO=1 -- gnuplot
check "without rights it prints one line to paste" eval '[ "$(wc -l < out)" = 1 ] &&
  says out "run: sudo apt-get install -y libstb-dev libopenblas-openmp-dev gnuplot-nox$"'
check "ends with $code, not 1: stb is missing" [ $code = 1 ]
check "and has not called apt-get" [ ! -e apt ]
deps APT=100 --
check "what fails is said" eval '[ $code = 1 ] && says out "^apt-get failed; .*sudo apt-get update"'
trainer=$train

# names of texts and folders are data: nothing in them runs
canary=$work/canary
no_canary() { [ ! -e "$canary" ]; }
number=0
for name in $'new\nline' 'quote"s' "it's" 'back\slash' '$(touch canary)' '`touch canary`' '; touch canary' \
  -dash .hidden 'a b' żółw $'\377' '*' '$((x[$(touch canary)]))'; do
  number=$((number + 1))
  cp text.txt "$name.txt" 2> /dev/null || cp text.txt "./$name.txt"
  suite a --small --data "$name.txt" --only fp32_bs2 --batch-size 2 --steps 4 --results-dir "$name" -- $tiny
  check "a text named $name ends with $code, not 0" [ $code = 0 ]
  summary=./$name/a/experiment_summary.json
  check "its summary is JSON" is_json "$summary"
  check "its runs have names of A-Za-z0-9_.-" says "$summary" '^."name": "[A-Za-z0-9_][A-Za-z0-9_.-]*", '
  check "its results are in its folder" [ -s "./$name/a"/*_metrics.json ]
  rm -rf "./$name"
done
check "nothing ran" no_canary
trainer=$train

# make passes its variables on as they are
unset MAKEFLAGS MAKELEVEL # of the make that runs this test
mkdir -p made/tools made/build; cp "$root/Makefile" made
printf '#!/bin/sh\nprintf "<%%s>" "$@"\n' > made/echo; chmod +x made/echo
for name in tools/{demo,bench,deps,profile}.sh build/{hello,profile}; do cp made/echo made/$name; done
for text in '`touch canary`x' '$(touch canary)x' '$(shell touch canary)x' "it's a" '"; touch canary; "' '#x' \
  '$$x' $'new\nline'; do
  for target in demo hello; do
    check "make $target TEXT='$text'" \
      eval '(cd made && make -s -o build/hello $target TEXT="$text" ARGS="") 2> /dev/null |
        grep -qzF "<$text>"'
  done
  check "make demo with TEXT in the environment" \
    eval '(cd made && TEXT=$text make -s demo) 2> /dev/null | grep -qzF "<$text>"'
done
for words in '; touch canary' '$(touch canary)' '`touch canary`' '--only *_bs2' '$(shell touch canary)'; do
  for target in "bench BENCH" "profile ARGS" "demo ARGS"; do
    check "make $target='$words'" eval \
      '(cd made && make -s ${target% *} ${target#* }="$words" TEXT=) | grep -qF "<${words// /><}>"'
  done
done
check "make ran nothing" eval '[ ! -e made/canary ] && [ ! -e canary ]'

# the report, by hand-made numbers
folder=hand; mkdir hand
json_text() { # TEXT: as a JSON string
  local t=${1//\\/\\\\}
  t=${t//\"/\\\"}
  printf '"%s"' "${t//$'\n'/\\n}"
}
metrics() { # NAME TECHNIQUE BATCH PERPLEXITY ARENA MS...
  local name=$1 technique=$2 batch=$3 perplexity=$4 arena=$5; shift 5
  {
    printf '{"dataset": "x", "technique": %s, "batch_size": %d,' "$(json_text "$technique")" $batch
    printf ' "seq_len": 100, "steps": 3, "perplexity": %s, "ms_per_step": 50,' $perplexity
    printf ' "tokens_per_s": %d, "arena_bytes": %d, "peak_bytes": %d}\n' $((batch * 2000)) $arena $arena
  } > "$folder/${name}_metrics.json"
  for ms in "$@"; do echo "{\"step\": 1, \"loss\": 2, \"ms\": $ms}"; done > "$folder/$name.jsonl"
}
metrics x_fp32_bs8 fp32_bs8 8 100.0 104857600 900 20 20.5 19
metrics x_bf16_bs8 bf16_bs8 8 100.4 52428800 10 9 900
metrics x_bf16_flash_bs8 bf16_flash_bs8 8 102.0 41943040 16
metrics x_bf16_window4_bs8 bf16_window4_bs8 8 120.0 41943040 8
"$report" --results-dir hand > out; check "the report of runs without a summary" [ $? = 0 ]
check "a median, not a mean" says out '^\| fp32 .* 20\.2 \| +39506 \| +100 % \| +1\.00x \|$'
check "memory and speed against the baseline" \
  says out '^\| bf16 .* 50\.0 .* 10\.0 \| +80000 \| +50 % \| +2\.0[0-9]x \|$'
check "the Pareto front" says out 'both smaller and faster: bf16_window4 \(40\.0 MiB, 8\.0 ms\)$'
check "exact techniques, the window left out" \
  says out '1 of 2 runs within 0\.5 %.* farthest bf16_flash at batch 8, 2\.00 %'
check "what was saved" says out 'bf16_flash: 60\.0 MiB or 60 % less memory, 1\.27 times the speed'
check "the files" [ -s hand/comparison_report.txt -a -s hand/comparison.md -a -s hand/results.csv ]
check "a narrow table" says hand/table.md '^\| bf16_flash \| 8 \| 40\.0 \| 40 \| 0\.0160 \| 102\.00 \|$'
check "in CSV" says hand/table.csv '^batch,fp32,8,100,,3,100\.0,100,,0\.0203,,100\.00$'
check "its titles" says hand/table.csv '^group,technique,.*,largest batch,s/step,total s,perplexity$'
check "in LaTeX" says hand/table.tex '^bf16\\_window4 & 8 & 40\.0 & 40 & 0\.0080 & 120\.00 \\\\$'
check "whose columns are counted" says hand/table.tex '^.begin.tabular..l\*\{5\}\{r\}\}$'
cp -r hand cpu; sed -i 's/_bs8",/_bs8", "training_time": 7.5,/' cpu/*_metrics.json
{
  printf '{"suite": "a, small", "device": "cpu", "vocabulary": 2000, "original_vocabulary": 50257, '
  printf '"experiments": [{"name": "x_bf16_window4_bs8", "group": "batch", "technique": "bf16_window128"}]}\n'
} > cpu/experiment_summary.json
"$report" --results-dir cpu > out
check "a CPU's times are left out" not says out 'ms/step|total s|fastest|Pareto|the speed'
check "which it says" says out '^Times are left out: a CPU .* results\.csv has them\.$'
check "but CSV has them" says cpu/table.csv '^batch,bf16,8,100,,3,50\.0,50,,0\.0100,7\.5,100\.40$'
check "a small vocabulary is named" says out '^The vocabulary has 2000 ids here, 50257 in .* the chunked loss'
check "longer sequences are suggested" \
  says out '^Scores take T x T: .* --results-dir results512 -- --seq-len 512'
check "equal rows are named" says out '^- bf16_window128 is full attention here: .* It equals bf16_flash,'
sed -i 's/"seq_len": 100/"seq_len": 50/' cpu/x_bf16_bs8_metrics.json
"$report" --results-dir cpu > out
check "a run of other sequences has no baseline" says out '^\| bf16  .* \|        - \|$'
sed -i 's/"cpu"/"cuda"/' cpu/experiment_summary.json
"$report" --results-dir cpu > out
check "on a GPU, times have their columns" says out 'ms/step \|  total s \| tokens/s'
"$report" --results-dir hand --experiments fp32,bf16_flash_bs8 > out
check "--experiments" [ "$(grep -c '^| [bf].*8 |' out)" = 2 ]
echo victim > victim; ln -sf ../victim hand/comparison.md
echo '{"perplexity": 3' > hand/y_fp32_metrics.json
"$report" --results-dir hand > out 2> err; code=$?
check "a damaged file is named, the others are compared, and it ends with $code, not 3" \
  eval '[ $code = 3 ] && says err "hand/y_fp32_metrics.json: expected a comma" && says out "^. bf16_flash "'
check "what is damaged is listed" says out '^- y_fp32 lost: its metrics are damaged$'
check "a link in the place of the report is not followed" [ "$(cat victim)" = victim ]
rm hand/y_fp32_metrics.json; mkfifo hand/z_fp32_metrics.json
timeout 10 "$report" --results-dir hand > out 2> err
check "a pipe does not block it" says err 'z_fp32_metrics.json: expected a file'
rm hand/z_fp32_metrics.json
metrics x_fp16_bs8 fp16_bs8 8 null 52428800 10
printf '{"step": %s}\n' '1, "ms": 40' '2, "grad_norm": inf, "ms": 1' '3, "loss": nan, "ms": 1' \
  '4, "grad_norm": null, "ms": 44' > hand/x_bf16_bs8.jsonl
check "numbers may be null" "$report" --results-dir hand
"$report" --results-dir hand > out 2> err
check "a null perplexity is a diverged run" says out '^- x_fp16_bs8 diverged: '
check "which is in no table" not says out '^\| fp16 '
check "inf in a log is reported with its line" says err 'hand/x_bf16_bs8.jsonl: expected a value in line 2$'
check "the median is that of the other lines" says out '^\| bf16 .* 42\.0 \|'
mkdir deep; printf '{"plan":%.0s' $(seq 52692) > deep/x_metrics.json
"$report" --results-dir deep > out 2> err; code=$?
check "nested objects end it with $code, not 3" eval '[ $code = 3 ] && says err "deep/x_metrics.json: "'
printf '{"bytes": {"weights": 1%.0s' $(seq 2000) > deep/x_metrics.json
printf '}%.0s' $(seq 4000) >> deep/x_metrics.json
"$report" --results-dir deep > out 2> err; check "also those that end" [ $? = 3 ]
long=$(printf 'd%.0s' {1..200}); mkdir -p $long/$long/$long/$long
"$report" --results-dir $long/$long/$long/$long 2> err; code=$?
check "a path that does not fit ends it with $code, not 2" [ $code = 2 ]

# rounds: a difference counts if it is larger than the rounds differ, and 3 %
folder=rounds; mkdir rounds
rounds() { # TECHNIQUE PERPLEXITY MIB MS...: a run, and one for each round
  local technique=$1 perplexity=$2 bytes=$(($3 << 20)) ms round=0; shift 3
  metrics x_${technique}_bs8 ${technique}_bs8 8 $perplexity $bytes 1000 # the time of this one does not count
  printf '{"name": "x_%s_bs8", "group": "batch", "technique": "%s"},' $technique $technique >> names
  for ms in "$@"; do
    round=$((round + 1))
    metrics x_round${round}_${technique}_bs8 ${technique}_bs8 8 $perplexity $bytes $ms
    printf '{"name": "x_round%d_%s_bs8", "group": "round%d", "technique": "%s"},' $round $technique $round \
      $technique >> names
  done
}
rounds fp32 100.0 100 20 30 25
rounds bf16 100.9 50 10 15 12.5                       # the baseline varies, the ratio does not
rounds bf16_flash 102.1 40 16 36 25                   # 1.25, 0.83, 1.00
rounds bf16_window4 99.5 40 20.4 30.6 25.5            # always 2 % slower
rounds bf16_chunked 100.0 30 13.33 23.08 17.86        # 1.5, 1.3, 1.4
rounds bf16_chunked_compact 100.0 20 15 30 20         # 1.33, 1.00, 1.25
printf '{"suite": "demo, small", "device": "cpu", "budget": "64M", "experiments": [%s]}' \
  "$(sed 's/,$//' names)" > rounds/experiment_summary.json
"$report" --results-dir rounds --brief > out; check "the report of rounds" [ $? = 0 ]
cell() { awk -v t="$1" -v k="$2" '$1 == t { print $(NF - k) }' out; } # TECHNIQUE COLUMN, from the right
while read -r technique speed perplexity; do
  check "$technique: speed $(cell $technique 1), not $speed" [ "$(cell $technique 1)" = "$speed" ]
  check "$technique: perplexity $(cell $technique 0), not $perplexity" \
    [ "$(cell $technique 0)" = "$perplexity" ]
done << 'CELLS'
fp32 1.00x 100.0
bf16 2.00x same
bf16_flash same 102.1
bf16_window4 same same
bf16_chunked 1.40x same
bf16_chunked_compact same same
CELLS
check "nobody is named the fastest" not says out 'fastest'
check "it says how noisy the times are" says out 'took 20 to 30 ms, 40 % apart by chance\. .* 2 of the'
cp -r rounds slow; sed -i 's/"ms": \([0-9.]*\)/"ms": \1e2/' slow/x_round*_fp32_bs8.jsonl
"$report" --results-dir slow --brief > slow.out
check "long times have no exponent" says slow.out "took 2000 to 3000 ms, "
check "the smallest" says out '^- bf16_chunked_compact trains the same model in 20 of 100 MiB'
check "100 columns" [ -z "$(awk 'length > 100' out)" ]
check "in the whole report, too" says rounds/comparison.md '^- bf16_flash: .* the same speed'
check "the fastest one is fastest beyond the noise" \
  says rounds/comparison.md '^- fastest: bf16, 12\.5 ms a step, [0-9]* tokens/s$'
rm rounds/x_round[123]_bf16_bs8* names
"$report" --results-dir rounds > /dev/null 2>&1
check "those as fast, as far as the rounds tell" \
  says rounds/comparison.md '^- fastest: bf16_chunked, .*as fast, .*: .*bf16_chunked_compact, 20\.0 ms'
check "findings of suite d are not the demo's" not says rounds/comparison.md 'original experiment'

# names from results files and folders are data: nothing in them runs
hostile=('y$(touch '"$canary"')' 'y`touch '"$canary"'`' "x'; system('touch $canary'); set title '" a/../../b
  $'a\nb' -x .x 'a b' "\"; system(\"touch $canary\"); \"" "y;touch $canary" 'ż' "$long$long"
  "$(printf 'x%.0s' {1..3000})")
folder=foreign; mkdir foreign
metrics x_fp32_bs8 fp32_bs8 8 100.0 104857600 20
metrics x_bf16_bs8 bf16_bs8 8 100.4 52428800 10
for technique in "${hostile[@]}"; do
  metrics x_odd_bs8 "$technique" 8 101.0 41943040 16
  "$report" --results-dir foreign > out 2> err; code=$?
  check "$technique ends with $code, not 3, and its file is named" \
    eval '[ $code = 3 ] && says err "foreign/x_odd_bs8_metrics.json: .* is no technique"'
  check "$technique is not in the tables" \
    eval '[ "$(grep -c "^| [bf]" out)" = 2 ] && [ "$(wc -l < foreign/results.csv)" = 3 ]'
  PATH=$work/stubs:$PATH "$assignment/plots.sh" foreign > out 2> err; check "the others are drawn" [ $? = 0 ]
done
rm foreign/x_odd*
while IFS='>' read -r change fault; do # values that no run has
  metrics x_odd_bs8 fp16_bs8 8 101.0 41943040 16
  sed -i "$change" foreign/x_odd_bs8_metrics.json
  "$report" --results-dir foreign > out 2> err; code=$?
  check "$change ends with $code, not 3: $fault" eval \
    '[ $code = 3 ] && says err "x_odd_bs8_metrics.json: .*$fault" && [ "$(grep -c "^| [bf]" out)" = 2 ]'
done << 'VALUES'
s/"technique": "[^"]*"/"technique": ""/>"" is no technique
s/"technique": "[^"]*"/"technique": 5/>technique must be a text
s/"technique": "[^"]*"/"technique": ["a"]/>technique must be a number or a text
s/"technique": "[^"]*", //>names no technique
s/"dataset": "[^"]*", //>no dataset
s/"dataset": "[^"]*"/"dataset": ""/>"" is no dataset
s/"arena_bytes": [0-9]*/"arena_bytes": -1/>arena_bytes is below 0
s/"arena_bytes": [0-9]*/"arena_bytes": "41943040"/>arena_bytes must be a number
s/"arena_bytes": [0-9]*/"arena_bytes": true/>arena_bytes must be a number
s/"ms_per_step": [0-9.]*/"ms_per_step": -3/>ms_per_step is below 0
VALUES
rm foreign/x_odd*
for suite in 'a<script>' 'a|b' '](x)' 'a`b'; do
  printf '{"suite": "%s", "experiments": []}' "$suite" > foreign/experiment_summary.json
  "$report" --results-dir foreign > out 2> err; code=$?
  check "the suite $suite ends with $code, not 3" \
    eval '[ $code = 3 ] && says err "experiment_summary.json: suite has characters" && [ ! -s out ]'
done
rm foreign/experiment_summary.json
for key in dataset name group status; do # the first of a file, those of the summary
  printf '{"suite": "a", "experiments": [{"name": "x_fp32_bs8", "group": "batch", "technique": "fp32"}]}' |
    sed "s/\"group\"/\"$key\": \"\$(touch x)\", \"group\"/" > foreign/experiment_summary.json
  "$report" --results-dir foreign > out 2> err; code=$?
  check "an odd $key of the summary ends it with $code, not 3" \
    eval '[ $code = 3 ] && says err "experiment_summary.json: .* is no $key" && [ ! -s out ]'
done
rm foreign/experiment_summary.json
cp foreign/x_fp32_bs8_metrics.json 'foreign/x$(touch x)_metrics.json'
"$report" --results-dir foreign > out 2> err; code=$?
check "an odd name of a file ends it with $code, not 3" \
  eval '[ $code = 3 ] && says err "touch x._metrics.json: its name has characters"'
rm 'foreign/x$(touch x)_metrics.json'
check "nothing ran in the report" no_canary
if command -v gnuplot > /dev/null; then
  for name in "it's" -dash $'new\nline' 'a b' "\$(touch canary)" "x'; system('touch $PWD'); '" ż; do
    mkdir -p -- "$work/odd/$name"; cp foreign/*.json "$work/odd/$name"
    (cd odd && "$report" --results-dir "$name" && "$assignment/plots.sh" "$name") > out 2> err
    check "plots in the folder $name" [ -s "odd/$name/plots/all_techniques.png" ]
  done
  for table in results timeline; do
    for technique in "${hostile[@]::3}" 'a/b' 'a b'; do
      "$report" --results-dir foreign > out 2>&1
      printf 'x,batch,%s,%s,8,8,8,8,8\n' "$technique" "$technique" >> foreign/$table.csv
      "$assignment/plots.sh" foreign > out 2> err; code=$?
      check "plots.sh ends with $code, not 3, with $technique in $table.csv" \
        eval '[ $code = 3 ] && says err "foreign/$table.csv has more in it than names and numbers"'
    done
  done
  "$report" --results-dir foreign > out 2>&1
  sed -i 's/52428800/1e400/g' foreign/results.csv
  timeout 20 "$assignment/plots.sh" foreign > out 2> err
  check "an infinite number ends, too" [ $? != 124 ]
  mkdir elsewhere; touch elsewhere/mine.png; rm -rf foreign/plots; ln -s ../elsewhere foreign/plots
  "$assignment/plots.sh" foreign > out 2> err; check "a link in the place of plots/ is refused" [ $? = 3 ]
  check "and not followed" [ "$(ls elsewhere)" = mine.png ]
else skip "plots of foreign names, gnuplot is missing: apt-get install gnuplot-nox"; fi
check "nothing ran in the plots" eval 'no_canary && [ ! -e odd/canary ]'
folder=hand
mkdir two
for text in one other; do
  sed "s/\"x\"/\"$text\"/" hand/x_fp32_bs8_metrics.json > two/${text}_fp32_metrics.json
done
"$report" --results-dir two > out 2> err; code=$?
check "runs of two texts are not compared" \
  eval '[ $code = 2 ] && says err "two has runs of one and of other: choose one with --dataset"'
"$report" --results-dir two --dataset other > out; check "--dataset" [ "$(grep -c '^| fp32' out)" = 1 ]
state=$(sum two/*)
(ulimit -f 0; trap '' XFSZ; "$report" --results-dir two --dataset other > /dev/null 2> err); code=$?
check "a report that cannot be written ends with $code, not 3, and leaves the old one" \
  [ $code = 3 -a "$(sum two/*)" = "$state" ]
"$report" --results-dir nowhere > out 2> err; check "an empty folder ends with 3" [ $? = 3 ]

# plots
PATH=nowhere "$BASH" "$assignment/plots.sh" whole/a > out 2> err
check "without gnuplot the package is named" says err 'gnuplot-nox'
drawn() { # PLOT TEXT...: it is there in both formats, small, and says all texts
  local plot=$1 text; shift
  check "$plot.png is there, and small" [ "$(stat -c %s "$plot.png")" -lt 100000 ]
  for text; do check "$plot says $text" grep -qF ">$text<" "$plot.svg"; done
}
areas=$(sed -n 's/^array area\[8\] = \[\(.*\)\].*/\1/p' "$assignment/plots.sh")
check "areas that touch differ in brightness" awk -v areas="$areas" 'BEGIN {
  n = split(areas, area, ", ")
  for (i = 1; i <= n; i++) {
    for (k = 0; k < 3; k++) rgb[k] = 16 * digit(3 + 2 * k) + digit(4 + 2 * k)
    light = (299 * rgb[0] + 587 * rgb[1] + 114 * rgb[2]) / 255000
    if (i > 1 && (light - last) ^ 2 < 0.08 ^ 2) exit 1
    last = light
  }
  exit n != 8
}
function digit(at) { return index("0123456789abcdef", substr(area[i], at, 1)) - 1 }'
again=$(grep -c '"layer": 0, "recomputed": 1,' whole/a/text_fp32_checkpointing_bs4_memory.json)
check "the timeline has layers, and the $again recomputed operations" \
  [ "$again" -gt 0 -a "$again" = "$(grep -c '^fp32_checkpointing,.*,0,1$' whole/a/timeline.csv)" ]
folder=gpu; mkdir gpu
metrics x_tf32_bs4 tf32_bs4 4 100 104857600 20 21 20
metrics x_tf32_bs8 tf32_bs8 8 100 209715200 40 41 40
metrics x_bf16_bs4 bf16_bs4 4 101 52428800 10 10 11
metrics x_bf16_bs8 bf16_bs8 8 101 104857600 20 20 21
{
  printf '{"suite": "a", "dataset": "x", "device": "cuda", "baseline": "tf32", "budget": "32000000000", '
  printf '"experiments": [\n'
  for run in tf32_bs4 tf32_bs8 bf16_bs4 bf16_bs8; do
    printf '{"name": "x_%s", "group": "batch", "technique": "%s", "largest_batch": 9},\n' $run ${run%_*}
  done | sed '$s/,$//'
  echo ']}'
} > gpu/experiment_summary.json
if command -v gnuplot > /dev/null; then
  check "no plot fails" "$assignment/plots.sh" whole/a
  plots=whole/a/plots place='suite a, small, on a CPU, text text, 4 sequences of 32 tokens'
  drawn $plots/all_techniques "$place" 'memory, MiB' 'planned in 256M' bf16_flash
  check "without times" not says $plots/all_techniques.svg 'time of a step'
  drawn $plots/memory_vs_batch 'Memory over batch' 'batch, sequences' bf16_window16
  loss=$(printf %.2f "$(field whole/a/text_fp32_bs4_metrics.json val_loss)")
  drawn $plots/loss_vs_steps "$place; dotted: training loss of the baseline" 'optimizer step' bf16 "$loss"
  drawn $plots/memory_saved "$place" 'saved, %' 'saved, MiB' fp32_checkpointing
  drawn $plots/windows_compared 'bf16_flash (all 32)' bf16_window16 'memory, MiB'
  drawn $plots/lines_memory_vs_batch 'Memory over batch, all techniques' bf16_flash fp32
  drawn $plots/lines_loss_vs_steps 'Training loss, all techniques' bf16_flash_chunked fp32
  drawn $plots/timeline_fp32 "$place" forward backward optimizer layer head weights logits
  check "without recomputation nothing is shaded" not says $plots/timeline_fp32.svg '>recomputed<'
  drawn $plots/timeline_fp32_checkpointing "$place" recomputed 'peak of fp32'
  drawn $plots/timeline_bf16_flash_chunked_budget weights
  check "the baseline's own picture has no line for it" not says $plots/timeline_fp32.svg 'peak of'
  check "on a CPU, speeds are not drawn" [ -z "$(ls $plots | grep -E 'speed|time\.')" ]
  for plot in all_techniques memory_vs_batch loss_vs_steps; do
    check "a technique has its colour in $plot" says $plots/$plot.svg 'rgb\( *204, *121, *167\)'
  done
  check "the page shows them" says whole/a/comparison.md '^!\[.*\]\(plots/loss_vs_steps.png\)$'
  check "with captions" says whole/a/comparison.md '^\*Figure 1\. What each technique takes\.\*$'
  "$assignment/plots.sh" whole/a 2> err
  state=$(sum whole/a/comparison.md $plots/*)
  mkdir full; printf '#!/bin/sh\n[ $# != 2 ] || printf x > "$2"\nexit 1\n' > full/cp; chmod +x full/cp
  PATH=$work/full:$PATH "$assignment/plots.sh" whole/a 2> err; code=$?
  check "plots that do not fit on the disk end with $code, not 3, and leave the old ones" \
    [ $code = 3 -a "$(sum whole/a/comparison.md $plots/*)" = "$state" ]
  check "drawn again, a plot is there once" \
    [ "$(grep -c '^\*Figure' whole/a/comparison.md)" = "$(ls $plots/*.png | wc -l)" ]
  printf '{"step": 4, %s}\n' '"loss": null' '"loss": 1e999, "ms": 1e999' '"val_loss": nan, "ms": "' \
    >> gpu/x_tf32_bs8.jsonl
  echo "'; system('touch $canary'); \`touch $canary\`" >> gpu/x_bf16_bs8.jsonl
  "$report" --results-dir gpu > out 2> err
  check "odd logs, equal losses" "$assignment/plots.sh" gpu
  check "nothing ran in them" no_canary
  drawn gpu/plots/loss_vs_steps tf32 bf16
  drawn gpu/plots/loss_vs_time 'seconds of training'
  drawn gpu/plots/speed_vs_batch 'thousand tokens/s' \
    'suite a, on a GPU, text x, sequences of 100 tokens; dotted: the baseline'
  drawn gpu/plots/memory_speed_tradeoff tf32 'bf16 *' # the front
  drawn gpu/plots/all_techniques '100 (50 %)'
  mkdir wide; long=bf16_flash_chunked_selective_segments_compact folder=wide
  metrics x_tf32_bs8 tf32_bs8 8 100 209715200 3400 3500 3600
  metrics x_${long}_bs8 ${long}_bs8 8 100 104857600 40 41 40
  "$report" --results-dir wide > out 2> err
  check "techniques of long names are drawn" "$assignment/plots.sh" wide
  at=$(grep -B1 ">$long<" wide/plots/all_techniques.svg | sed -n 's/.*translate(\([0-9]*\).*/\1/p')
  check "a name of ${#long} letters has $at pixels" [ "${at:-0}" -ge $((8 * ${#long})) ]
  drawn wide/plots/all_techniques 3500
  cp -r wide few
  for run in tf32 $long; do
    sed 's/bs8/bs4/; s/"batch_size": 8/"batch_size": 4/' wide/x_${run}_bs8_metrics.json \
      > few/x_${run}_bs4_metrics.json
  done
  rm few/x_${long}_bs8*
  "$report" --results-dir few > out 2> err
  check "a technique with one batch is drawn beside one with two" "$assignment/plots.sh" few
  check "in a figure of its own" [ -s few/plots/memory_vs_batch.png ]
  check "a panel of equal bars is left out" not says gpu/plots/all_techniques.svg 'perplexity|planned'
  echo tf32,forward,1e400,0,0,0,0,0,0,0,0,0 >> gpu/timeline.csv
  timeout 20 "$assignment/plots.sh" gpu > out 2> err; check "endless memory ends" [ $? != 124 ]
  sed -i 's/,layer,recomputed$//' gpu/timeline.csv
  "$assignment/plots.sh" gpu > out 2> err; code=$?
  check "an old timeline ends with $code, not 3" eval '[ $code = 3 ] && says err "build/report .* makes them"'
else skip "plots, gnuplot is missing: apt-get install gnuplot-nox"; fi

closing_line
