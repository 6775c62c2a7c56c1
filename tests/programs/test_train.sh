#!/usr/bin/env bash
# test_train.sh BUILD_DIR - what BUILD_DIR/train promises on its command line: exit codes, messages, files,
# resume; and that examples/hello.c trains. Prints what fails, what is skipped, and the closing line. Runs in
# the repository root.
set -u
. tests/lib.sh
root=$(pwd) train=$(realpath "$1")/train data=$(realpath -m ../shared/data) work=$(mktemp -d)
[ -d "$data" ] || data=$root/data
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
export OMP_WAIT_POLICY=passive
model="--layers 1 --d-model 32 --heads 2 --seq-len 32 --batch-size 4 --vocab-size 300"

run() { timeout 120 "$train" "$@" > out 2> err < /dev/null; code=$?; }
expect() { # CODE PATTERN ARGUMENT...: the trainer's exit code, and what it must say
  local want=$1 pattern=$2; shift 2
  run "$@"
  if [ $code = "$want" ] && cat out err | grep -qE -- "$pattern"; then pass; return; fi
  fail "train $*: exit $code, expected $want and /$pattern/;" \
    "it said: $(cat err out | tail -n 2 | cut -c1-300)"
}
near() { awk -v a="$1" -v b="$2" 'BEGIN { exit !(a > 0 && b > 0 && a / b < 1.001 && b / a < 1.001) }'; }
same_log() { [ "$(cut -d, -f1-4 "$1")" = "$(cut -d, -f1-4 "$2")" ]; }
once() { # starts a run of the resume test, and signals it when its log has 8 KiB
  local signal=$1 log=$2; shift 2
  "$train" "$@" > out 2> err < /dev/null & local id=$!
  for _ in $(seq 3000); do [ "$(cat "$log" 2> /dev/null | wc -c)" -ge 8192 ] && break; sleep 0.02; done
  { kill -"$signal" $id && wait $id; code=$?; } 2> /dev/null
}

sample_text > text.txt

# published networks
while read -r name count; do
  run --dry-run --json --model $name
  check "$name has $count parameters" [ "$(field out parameters)" = $count ]
done << 'MODELS'
gpt2 124439808
gpt2-medium 354823168
gpt2-large 774030080
gpt2-xl 1557611200
llama-tiny 22696448
cs336-small 128625408
cs336-medium 423183360
cs336-large 969411840
cs336-xl 3406809600
cs336-10b 12832823808
smollm-135m 134515008
llama3.2-1b 1235814400
qwen3-0.6b 596049920
MODELS
# a plan says for what; a network of 1,024 or 2,048 tokens brings its length, as its preset does
while read -r batch sequences tokens options; do
  expect 0 "^parameters [0-9]+, arena .* MiB for $batch $sequences of $tokens tokens?$" --dry-run $options
done << 'LENGTHS'
4 sequences 1024 --preset gpt2
16 sequences 1024 --model gpt2 --batch-size 16 --technique bf16_flash --device cuda
1 sequence 1024 --model gpt2-xl --batch-size 1
2 sequences 2048 --model smollm-135m --batch-size 2 --flash
1 sequence 300 --model gpt2 --seq-len 300 --batch-size 1
1 sequence 1024 --preset small --model gpt2 --batch-size 1
4 sequences 256 --model cs336-small --batch-size 4
1 sequence 1 --batch-size 1 --seq-len 1 --layers 1
32 sequences 256 --preset a --vocab-size 50257 --recompute budget --split --memory-budget 900M
LENGTHS
expect 0 '^72$' --find-max-batch --memory-budget 24G --device cuda --model gpt2 --technique bf16_flash
check "its label has the length" says err '^sequences of 1024 tokens in the largest batch'
# the README's commands for GPT-2 say what it says of them, and its first numbers are plans
count=0
while IFS='#' read -r command number; do
  run ${command#build/train }
  check "$command says $number" grep -qF -- "$(grep -oE '[0-9.]{2,}' <<< "$number")" out
  count=$((count + 1))
done < <(grep -E '^build/train .*--model gpt2' $root/README.md)
check "$count commands of the README for GPT-2" [ $count = 2 ]
for technique in bf16_flash bf16_flash_selective_chunked_compact fp8_flash_compact; do
  run --dry-run --json --device cuda --model gpt2 --batch-size 64 --technique $technique
  gb=$(awk -v n="$(field out arena_bytes)" 'BEGIN {printf "%.1f GB", n / 1e9}')
  check "$technique takes $gb" eval 'tr "\n" " " < $root/README.md | grep -q "$gb [^(]*(.$technique.)"'
done
expect 2 '--model bert: expected gpt2.gpt2-medium' --dry-run --model bert
expect 0 '"parameters": 124439808' --dry-run --json --preset small --model gpt2

# ends of text separate documents, and a sample stops there
for i in $(seq 400); do printf 'Tom saw %d boats.\n\nThe end.\n<|endoftext|>\n' $((i % 7)); done > ends.txt
expect 0 '^ends.txt: plain text, 400 documents, separated by <\|endoftext\|>, ' --data ends.txt $model \
  --steps 150 --lr 1e-2 --sample 400 --prompt Tom --temperature 0
check "a sample stops at the end of its document" [ "$(sed -n '/^Tom/,$p' out | wc -c)" -lt 60 ]
expect 0 "^ends.txt: plain text, 400 documents, separated by" --data ends.txt $model --steps 151 --lr 1e-2 \
  --resume
printf 'Tom.<|endoftext|>Mia.\n%.0s' $(seq 400) > joined.txt
expect 0 "^note: joined.txt: <\|endoftext\|> is ordinary text 400 times: .* sed 's" --data joined.txt $model \
  --steps 1

# first weights of a checkpoint and of a folder
llama="--norm rms --mlp swiglu --positions rotary --no-biases --qk-norm"
run --data text.txt --dataset first --results-dir first $model $llama --steps 3 --lr 1e-2
check "a Qwen3 trains" [ $code = 0 ]
run --data text.txt --dataset more --results-dir more --init first/first_fp32_step3.safetensors --seq-len 32 \
  --batch-size 4 --steps 1 --lr 1e-30 --log csv
check "--init" [ $code = 0 ]
check "it says whose weights and tokenizer it takes" says err \
  'weights of first/first_fp32_step3.safetensors, tokenizer first/first_fp32_tokenizer.json'
check "it has their loss" near "$(field first/first_fp32_metrics.json val_loss)" \
  "$(field more/more_fp32_metrics.json val_loss)"
"$(dirname "$train")/convert" first/first_fp32_step3.safetensors folder > /dev/null
run --data text.txt --dataset folder --results-dir more --init folder --seq-len 32 --batch-size 4 --steps 1 \
  --lr 1e-30 --technique bf16_flash_compact
check "--init with a folder" [ $code = 0 ]
check "it has their loss, too" awk -v a="$(field first/first_fp32_metrics.json val_loss)" \
  -v b="$(field more/folder_bf16_flash_compact_metrics.json val_loss)" \
  'BEGIN {exit !(a / b > .99 && a / b < 1.01)}'
run --data text.txt --dataset ranks --results-dir more --init folder --seq-len 32 --batch-size 4 --steps 1 \
  --lr 1e-30 --ranks 2 --shard gradients
check "two ranks begin with it" near "$(field first/first_fp32_metrics.json val_loss)" \
  "$(field more/ranks_fp32_zero2_metrics.json val_loss)"
run --data text.txt --dataset more --results-dir more --init folder --seq-len 32 --batch-size 4 --steps 2 \
  --resume
check "--resume continues what --init began" says err 'steps 2 to 2'
run --data text.txt --dataset adapted --results-dir more --init folder --seq-len 32 --batch-size 4 --steps 2 \
  --lora-rank 8 --lr 0.01
check "--init with adapters" [ $code = 0 ]
convert_it() { "$(dirname "$train")/convert" "$1" "$2" > out 2> err; }
check "merged weights are another model" convert_it more/adapted_fp32_merged.safetensors adapted
check "they differ from the folder's" eval '! cmp -s adapted/model.safetensors folder/model.safetensors'
check "adapters alone are refused" eval '! convert_it more/adapted_fp32_best.safetensors no'
check "the merged file is named" says err 'mtt_save_merged'
run --data text.txt --dataset together --results-dir more --init folder --seq-len 32 --batch-size 2 \
  --steps 2 --lora-rank 8 --lr 0.01 --ranks 2 --shard gradients
run --data text.txt --dataset adapted --results-dir more --init folder --seq-len 32 --batch-size 2 --steps 2 \
  --lora-rank 8 --lr 0.01 --accumulate 2
for file in adapter/adapter_model.safetensors merged.safetensors; do
  check "two ranks have the same $file" cmp more/together_fp32_zero2_$file more/adapted_fp32_$file
done
check "a run that starts over keeps the earlier adapters" \
  [ -d more/adapted_fp32.old/adapted_fp32_adapter -a \
    -f more/adapted_fp32.old/adapted_fp32_merged.safetensors ]
expect 0 'without --init trains adapters of random weights' --data text.txt --dataset random $model \
  --steps 1 --lora-rank 8
expect 2 '--d-model has another value than the model in folder: leave it out' --data text.txt --init folder \
  --d-model 64
expect 2 'has its own model: leave out --model' --dry-run --init folder --model gpt2
rm folder/tokenizer.json
expect 2 'no tokenizer beside folder: pass --tokenizer' --data text.txt --init folder
expect 3 'cannot open it' --data text.txt --init absent

# standard streams
if [ -c /dev/full ]; then
  "$train" --dry-run > /dev/full 2> err; code=$?
  check "output that is lost is a failure" [ $code = 3 ]
fi
{ "$train" --data text.txt --dataset pipe $model --steps 3 2>&1; echo $? > code; } < /dev/null | true
check "a run survives its closed pipe, and says so" [ "$(cat code)" = 3 -a -f results/pipe_fp32_metrics.json ]
"$train" --data text.txt --dataset closed --results-dir closed $model --steps 1 >&- 2> err < /dev/null
check "no file gets the text of a closed stream" [ $? = 0 -a ! -s closed/.lock ]
expect 3 'write to the folder text.txt: Not a directory' --data text.txt --results-dir text.txt

# the command line
expect 2 'did you mean --steps\?' --stepz 3
expect 2 'did you mean --batch-size\?' --batch-sise 3
expect 2 'did you mean' -steps 3
for pair in learning-rate:lr learning_rate:lr Learning-Rate:lr max-iters:steps n_layer:layers \
  block_size:seq-len gradient-accumulation-steps:accumulate max-grad-norm:clip output_dir:results-dir \
  lora_r:lora-rank \
  max-new-tokens:sample num_attention_heads:heads batch_size:batch-size; do
  expect 2 "did you mean --${pair#*:}\?" --${pair%:*} 3
  expect 2 "did you mean --${pair#*:}\?" --${pair%:*}=3
done
expect 2 'there is no option --zzzzzz \(--help lists all\)$' --zzzzzz 3
long=$(printf 'z%.0s' $(seq 5000)) odd=$'\033[31m\n\177\302\233'
for program in train tiny generate schedule report prepare profile convert; do # names are short and printable
  [ -x "${train%/*}/$program" ] || continue
  paths=; [ $program = generate ] && paths=model; [ $program = convert ] && paths='model target'
  for option in "--$odd$long" "$odd$long" "--layers=$odd$long" "--results-dir$odd$long"; do
    "${train%/*}/$program" $paths "$option" > out 2> err < /dev/null; code=$?
    check "$program ends with $code, not 2, at an odd option" [ $code = 2 ]
    check "and its message is short, on one line, printable: $program ${option:0:14}" eval \
      '[ "$(wc -c < err)" -lt 700 -a "$(wc -l < err)" = 1 ] && ! LC_ALL=C grep -q "[^ -~]" err'
  done
done
expect 2 'did you mean --data text.txt\?' text.txt
expect 2 '--steps x: expected' --steps x
expect 2 '--steps -3: expected' --steps -3
expect 2 '--steps 1.5: expected' --steps 1.5
expect 2 '--steps : expected' --steps
expect 2 '--lr fast: expected' --lr fast
expect 2 '--optimizer sgd: expected adamw' --optimizer sgd
expect 2 '--top-p 1.5: expected a number above 0, at most 1' --top-p 1.5
expect 2 '--top-p 0: expected a number above 0, at most 1 \(.*; 1: all\)' --top-p 0
expect 2 '--top-k 3000000000: expected a whole number from 0 to 2147483647' --top-k 3000000000
expect 2 '--steps 99999999999: expected a whole number from 0 to 2147483647' --steps 99999999999
expect 2 '--log disk: expected none\|csv\|tensorboard' --log disk
expect 2 '--memory-budget 3Q: expected' --memory-budget 3Q
expect 2 'fp32\|tf32\|bf16\|fp16\|fp8' --precision fp64
expect 2 'all\|layers' --fp8-products none
expect 2 'is no technique any more: take selective' --technique bf16_kept8
expect 2 'no option --kept-inputs: did you mean --recompute' --kept-inputs fp8
expect 2 'no option --forward8: did you mean --fp8-products' --forward8
expect 2 "precision is fp8: d_model 24 .* multiples of 16" --fp8 --dry-run $model --d-model 24 --heads 1
expect 2 'technique' --technique nonsense
expect 2 '"nonsense" in "bf16_nonsense" is no technique' --technique bf16_nonsense
expect 2 'needs a budget, for example --memory-budget 8G' --recompute budget --dry-run
expect 2 'technique' --technique no
expect 2 'technique' --technique bf16_32
expect 2 '"bs4294967304" in .* is no technique' --technique bf16_bs4294967304
expect 2 '"window99999999999" in .* is no technique' --technique bf16_window99999999999
expect 2 '"" in "bf16_.* is no technique' --technique "$(printf 'bf16_%.0s' $(seq 40))"
expect 2 '--resume takes no value' --resume=no
expect 2 '--lr 0: expected a number above 0, at most 100' --lr 0 --dry-run
expect 2 '--epochs 0: expected a whole number, 1 or more' --epochs 0 --dry-run
expect 2 '--split needs --recompute budget' --split --dry-run
for threads in 4097 99999 2147483647 2147483648; do
  for how in --dry-run "--data text.txt"; do
    OMP_NUM_THREADS=$threads expect 2 "^train: OMP_NUM_THREADS is $threads, .* number of cores" $how $model
  done
done
expect 2 '--lora-targets and --lora-alpha need a rank' --lora-targets nonsense --dry-run
expect 2 '--data is missing' --technique bf16
expect 2 'batch is 0' --dry-run --batch-size 0
expect 2 'd_model 32 does not divide' --dry-run $model --heads 3
expect 2 'memory-budget 24G$' --find-max-batch
command -v nvidia-smi > /dev/null ||
  expect 2 'memory-budget 24G: .*CUDA' --find-max-batch --device cuda
for words in bf16_fp16 checkpointing_segments bf16_bs2_flash_bs4 window16_flash_window8; do
  expect 2 "--technique $words: a later word contradicts \"" --technique $words --dry-run
done
expect 0 arena --technique flash_window16_bf16_bf16_bs4 --dry-run
check "words that agree are not contradictory" not says err note
expect 0 'note: --window-size saves no memory without --flash' --window-size 16 --dry-run
expect 0 'note: --window-size 256 changes nothing: --seq-len is 256' --window-size 256 --seq-len 256 --dry-run
expect 0 '--window-size 99 changes nothing: --seq-len is 64' --technique window99 --seq-len 64 --dry-run
expect 0 . --technique flash_window63 --seq-len 64 --dry-run
check "a window below the sequence has no note" not says err note
expect 2 '"nosuch"' --dry-run --freeze 'wte.*,nosuch'
expect 2 '"mlp.c_fcc"' --dry-run --lora-rank 8 --lora-targets attn.c_attn,mlp.c_fcc
expect 2 'need a rank, for example --lora-rank 16' --dry-run --lora-targets attn.c_attn
expect 2 'need a rank, for example --lora-rank 16' --dry-run --lora-alpha 8
expect 0 '--gradient-checkpointing' --help
fields() { sed -n '/^static const mtt_field /,/^}/s/.*MTT__FIELD(\([a-z0-9_]*\),.*/\1/p' "$root/mtt.h"; }
for name in $(fields); do # each field of the library is an option, under its name or another
  case $name in
    vocab | window) name+=-size;;
    tied_head) name=head;;
    loss_chunk_rows) name=chunk-rows;;
    budget_bytes) name=memory-budget;;
    total_steps | keep_gradients) continue;;
  esac
  check "--help lists --${name//_/-}" says out "^  --${name//_/-}( |\$)"
done
check "there are fields" [ "$(fields | wc -l)" -gt 30 ]
for word in fp32 tf32 bf16 fp16 fp8 layers8 flash window16 selective checkpointing segments \
  recursive chunked compact early; do
  expect 0 arena --$word --dry-run --vocab-size 300
done

# data that cannot be used
expect 3 'absent.txt.*No such file' --data absent.txt $model
expect 3 'is a folder: name a file in it' --data . $model
: > empty.txt;                                       expect 3 'empty.txt has no text' --data empty.txt $model
gzip -c text.txt > text.gz;                          expect 3 'text.gz is .*gzip -dc' --data text.gz $model
printf '\377\376h\000e\000l\000l\000o\000' > wide;   expect 3 'wide is .*iconv -f UTF-16' --data wide $model
printf '\050\265\057\375\044\000\000' > text.zst;    expect 3 'text.zst is .*zstd -dc' --data text.zst $model
printf 'a\0b' > image;                              expect 3 'image is not text.*UTF-8' --data image $model
echo "too short" > short.txt
expect 3 'short.txt is too short: .* 0 tokens, and a sequence has 32: give more text$' --data short.txt $model
expect 3 'a sequence has 65536: give more text, or --seq-len [0-9]+$' \
  --data text.txt --dataset long ${model/--seq-len 32/--seq-len 65536}
echo '{"body": "x"}' > other.jsonl
expect 3 'other.jsonl:1: there is no field "text"' --data other.jsonl $model

# threads that wait passively: the program starts again, once, unless its user chose
spins() { # ENVIRONMENT...: how often a thread looks before it sleeps, a number for each start
  (unset OMP_WAIT_POLICY; export OMP_DISPLAY_ENV=verbose "$@"; exec -a odd "$train" --dry-run 2>&1) |
    sed -n "s/.*GOMP_SPINCOUNT = '\(.*\)'/\1/p" | tr '\n' ' '
}
seen=$(spins A=)
if [ -n "$seen" ]; then
  check "the second start does not spin: $seen" eval '[[ "$seen" =~ ^[0-9]+\ 0\ $ ]]'
  check "OMP_WAIT_POLICY=active stays" eval '[[ "$(spins OMP_WAIT_POLICY=active)" =~ ^[1-9][0-9]+\ $ ]]'
  check "GOMP_SPINCOUNT=9 stays" [ "$(spins GOMP_SPINCOUNT=9)" = "9 " ]
else skip "this OpenMP does not show its variables"; fi

# threads: a container's quota limits them, unless its user chose a number
if [ -n "$seen" ]; then
  group() { # the group's line in /proc/self/cgroup, then PATH=CONTENT for each file
    rm -rf system; mkdir -p system/proc/self; printf '%s\n' "$1" > system/proc/self/cgroup; shift
    local file
    for file; do mkdir -p "system/sys/fs/cgroup/$(dirname "${file%%=*}")"
      printf '%b\n' "${file#*=}" > "system/sys/fs/cgroup/${file%%=*}"; done
  }
  threads() { # WORDS [VARIABLE=VALUE]: what the note must say; empty: no note
    said=$(env -u OMP_NUM_THREADS ${2:-A=} MTT_SYSTEM_ROOT="$work/system" "$train" --data text.txt $model \
      --steps 1 --dataset quota --no-checkpoint 2>&1 > /dev/null < /dev/null |
      sed -n 's/^note: \([0-9]* thread.*\), as the quota.*/\1/p')
    check "the group $(cat system/proc/self/cgroup): \"$said\", not \"$1\"" [ "$said" = "$1" ]
  }
  group 0::/ cpu.max='100000 100000';                        threads "1 thread"
  group 0::/ cpu.max='50000 100000';                         threads "1 thread"
  group 0::/ cpu.max='max 100000';                           threads ""
  group 0::/ cpu.max=max;                                    threads ""
  group 0::/ cpu.max='99999900000 100000';                   threads ""
  group 0::/ cpu.max='100000 0';                             threads ""
  group 0::/ cpu.max='-5 100000';                            threads ""
  group 0::/ cpu.max='nonsense';                             threads ""
  group 0::/ cpu.max='';                                     threads ""
  group 0::/ cpu.max='100000';                               threads ""
  group 0::/a/b cpu.max='max 100000' a/cpu.max='100000 100000' a/b/cpu.max='max 100000'; threads "1 thread"
  group 0::/gone/b a/cpu.max='100000 100000';                threads ""
  group 0::/../.. cpu.max='70000 100000';                    threads "1 thread"
  group '0::/a b:c' 'a b:c/cpu.max=70000 100000';            threads "1 thread"
  group 3:cpu,cpuacct:/docker/x cpu/cpu.cfs_quota_us=100000 cpu/cpu.cfs_period_us=100000; threads "1 thread"
  group 3:cpuacct,cpu:/x cpuacct,cpu/x/cpu.cfs_quota_us=80000 cpuacct,cpu/x/cpu.cfs_period_us=100000
  threads "1 thread"
  group 3:cpu:/ cpu/cpu.cfs_quota_us=-1 cpu/cpu.cfs_period_us=100000;    threads ""
  group 3:memory:/x cpu/x/cpu.cfs_quota_us=100000 cpu/x/cpu.cfs_period_us=100000; threads ""
  group 'no colons' cpu.max='100000 100000';                 threads ""
  group 0::/ cpu.max='100000 100000';                        threads "" OMP_NUM_THREADS=2
  rm -rf system;                                             mkdir -p system/proc/self
  : > system/proc/self/cgroup;                               threads ""
  group 0::/ cpu.max='100000 100000'
  check "a dry run has no note" eval '! MTT_SYSTEM_ROOT=$work/system "$train" --dry-run 2>&1 | grep "^note"'
fi

# presets
expect 2 '--preset big: expected tiny\|small\|a\|b\|c\|d\|gpt2\|gpt2-medium ?$' --preset big --dry-run
while read -r preset parameters; do # 2 V C + V + L (12 C^2 + 13 C) + 2 C; no V of a bias in tiny, small
  run --dry-run --json --vocab-size 50257 --preset $preset
  check "preset $preset has $(field out parameters) parameters, not $parameters" \
    [ "$(field out parameters)" = $parameters ]
done << SIZES
tiny 6532992
small 13659136
a 28941393
b 70428753
c 29072465
d 162301009
gpt2 124439808
gpt2-medium 354823168
SIZES
run --help
for preset in tiny small a b c d gpt2 gpt2-medium; do
  check "--help lists the preset $preset" says out "^    $preset +layers=[0-9]+ heads="
done
for order in "--preset gpt2 --layers 2" "--layers 2 --preset gpt2"; do
  run --dry-run --json $order
  check "$order has 2 layers" [ "$(field out parameters)" = 53561088 ]
done
run --dry-run --preset a --technique bs4
check "a technique overrides a preset" not says out ' 1208.31 MiB'
run --dry-run --preset small; cp out plan
run --dry-run
check "without a model's size a CPU gets the preset small" cmp out plan
run --dry-run --seq-len 64 --batch-size 16 --heads 4 --vocab-size 1024
check "a size of the model leaves the rest to the library" not cmp out plan
run --dry-run --device cuda
check "CUDA gets the library's model" says out '^parameters 8289552,'

# plans without data
a="--dry-run --vocab-size 50257 --layers 4 --heads 8 --d-model 256 --d-ff 1024 --seq-len 256 --batch-size 32"
run $a --json
check "--dry-run --json is one JSON object" is_json out
check "--dry-run --json is all on stdout" [ ! -s err ]
check "parameters are $(field out parameters), not 28941393" [ "$(field out parameters)" = 28941393 ]
for key in arena_bytes peak_bytes peak_forward_bytes peak_backward_bytes; do
  check "$key in the plan" [ "$(field out $key)" -gt 100000000 ]
done
check "bytes by category in the plan" grep -q '"bytes": {"weights": [0-9]' out
check "no max_batch without a budget" [ -z "$(field out max_batch)" ]
arena=$(field out arena_bytes)
run $a --json --memory-budget 24G
check "max_batch in the plan" is_json out
largest=$(field out max_batch)
check "max_batch $largest is above 32" [ "${largest:-0}" -gt 32 ]
expect 0 "^$largest\$" --find-max-batch ${a#* } --memory-budget 24G
check "the number alone is on stdout" [ "$(cat out)" = "$largest" ]
check "stderr says what it is" \
  says err '^sequences of 256 tokens in the largest batch under --memory-budget:$'
expect 0 "largest batch under the budget: $largest" $a --memory-budget 24G --batch-size "$largest"
expect 4 "$largest does" $a --memory-budget 24G --batch-size $((largest + 1))
expect 4 '10485760 bytes.*one sequence takes [0-9]+' $a --memory-budget 10M
expect 4 'smallest plan takes [0-9]+: .* too many; lower seq_len' $a --memory-budget 300M \
  --recompute budget --split
expect 4 'too many; set split, lower the batch or seq_len' $a --memory-budget 500M --recompute budget
expect 4 'does; or pass --recompute budget --split$' $a --memory-budget 500M
run $a --json --memory-budget 900M --recompute budget --split
check "900M hold batch 32 in $(field out micro_batches) micro-batches" \
  [ $code = 0 -a "$(field out micro_batches)" = 8 ]
expect 0 "arena $arena bytes" $a
run $a --json --technique bf16_flash
check "bf16_flash takes less than fp32" [ "$(field out arena_bytes)" -lt "$arena" ]
run $a --json --technique bf16 --precision fp32
check "single options go before the technique's" [ "$(field out arena_bytes)" = "$arena" ]

# training: the files and their numbers
expect 0 '^\{"dataset": "text.txt"' --data text.txt $model --steps 20
metrics=results/text.txt_fp32_metrics.json
check "metrics file is JSON" is_json $metrics
check "memory file is JSON" is_json results/text.txt_fp32_memory.json
check "log is JSON" is_json --lines results/text.txt_fp32.jsonl
check "log has 20 steps and an evaluation" [ "$(wc -l < results/text.txt_fp32.jsonl)" = 21 ]
check "stdout is the metrics file" cmp out $metrics
check "stderr has no \\r and no escape" [ "$(tr -dc '\r\033' < err | wc -c)" = 0 ]
check "stderr shows the progress" grep -q 'step 20/20 100%' err
steps=$(sed -n 's/^step \([0-9]*\)\/.*/\1/p' err | tr '\n' ' ')
check "a line for the first steps and each tenth, not $steps" [ "$steps" = "1 $(seq -s ' ' 2 2 20) " ]
check "it names the tokenizer" says err '^training a BPE tokenizer, 300 ids, on text.txt \.\.\.$'
bytes=$(wc -c < text.txt | sed ':a; s/\([0-9]\)\([0-9]\{3\}\)\($\|,\)/\1,\2\3/; ta')
check "it counts documents, bytes and ids" says err \
  "^text.txt: plain text, [0-9]+ documents, $bytes bytes, 300 ids$"
for split in train validation test; do
  check "it counts documents and tokens to $split" says err "^  $split +[0-9]+ documents +[0-9,]+ tokens$"
done
check "it counts steps and epochs" \
  says err '^training: steps 1 to 20 of 128 tokens each: 0\.[0-9]+ epochs of '
check "it says model and memory" eval 'says err "^model: [0-9,]+ parameters$" &&
  says err "^memory: [0-9.]+ MiB for 4 sequences of 32 tokens: weights 0\.[0-9], .*, logits [0-9.]+$"'
check "it says the time after the second step" says err '^the remaining 18 steps take about [0-9]+ s$'
round() { printf "%.$1f" "$(field $metrics $2)"; }
check "the summary has the metrics' quality" says err "^validation  perplexity $(round 2 perplexity), \
$(round 3 bits_per_byte) bits per byte, loss $(round 4 val_loss), accuracy [0-9.]+ %$"
check "the summary has speed and memory" eval 'says err "^speed  .* tokens/s, 20 steps in [0-9]+ s$" &&
  says err "^memory  .* MiB planned$"'
check "a model that has learned is better than guessing" not says err 'worse than guessing'
check "the metrics follow the summary" eval '"$train" --data text.txt $model --steps 2 --dataset order 2>&1 \
  < /dev/null | tail -n 1 | grep -q "^{\"dataset\": \"order\""'
expect 0 '^ +worse than guessing among the 300 ids of the vocabulary$' \
  --data text.txt $model --steps 40 --dataset worse --lr 1
check "the last evaluation is said once" [ "$(grep -c "perplexity" err)" = 1 ]
for file in $(sed -nE 's/^(metrics|log|timeline|checkpoint|best)  +([^,]*).*/\2/p' err); do
  check "$file, which the summary names, is there" [ -s "$file" ]
  named="${named:-}+"
done
check "the summary names 5 files" [ "${named:-}" = +++++ ]
expect 0 '^note: the text has too few pairs for 60,000 ids: the vocabulary has [0-9,]+$' \
  --data text.txt ${model/300/60000} --steps 1 --dataset pairs --no-checkpoint
if command -v script > /dev/null; then
  script -qec "$train --data text.txt $model --steps 3 --dataset terminal --eval-every 1" typescript \
    > /dev/null < /dev/null
  check "a terminal gets the progress in one line" says typescript "step 1/3.*$(printf '\033')"
  check "a terminal gets the summary in words alone" eval \
    'says typescript "^validation  perplexity" && ! says typescript "\"perplexity\":"'
  check "a terminal gets each evaluation" [ "$(grep -c '^validation ' typescript)" = 3 ]
else skip "script is missing: apt-get install bsdutils"; fi
for split in "" "--recompute budget --split --memory-budget 4M"; do
  run --data text.txt $model --batch-size 64 --steps 5 --dataset "whole${split:+_split}" $split
  check "training with $split" [ $code = 0 ]
  losses="${losses:-} $(field out val_loss)"
done
check "a batch in 8 micro-batches reaches the loss of one whole" near $losses
check "perplexity is e to the loss" \
  near "$(field $metrics perplexity)" "$(awk -v l="$(field $metrics val_loss)" 'BEGIN { print exp(l) }')"
check "tokens/s is tokens by time" \
  near "$(field $metrics tokens_per_s)" \
  "$(awk -v ms="$(field $metrics ms_per_step)" 'BEGIN { print 128000 / ms }')"
check "time is steps by ms" \
  awk -v s="$(field $metrics training_time)" -v ms="$(field $metrics ms_per_step)" \
  'BEGIN { d = s - ms * 0.02; exit !(d * d < 1e-6) }'
checkpoint=results/text.txt_fp32_step20.safetensors
check "checkpoint is there" [ -s $checkpoint ]
check "the best checkpoint is the last" cmp $checkpoint results/text.txt_fp32_best.safetensors
files() { (cd "$1" && sha256sum text.txt_fp32_* text.txt_fp32.jsonl); } # FOLDER
earlier=$(files results)
expect 3 'sequences, but a step takes 4096: lower --batch-size' --data text.txt $model --batch-size 4096
check "an epoch without a step leaves the run" [ "$(files results)" = "$earlier" ]
expect 0 'earlier run is kept in results/text.txt_fp32.old: --resume would have continued it' \
  --data text.txt $model --steps 20
check "a run that starts over keeps the earlier one" [ "$(files results/text.txt_fp32.old)" = "$earlier" ]
cp $checkpoint same
expect 0 'kept in results/text.txt_fp32.old2:' --data text.txt $model --steps 3
check "the first one stays" [ "$(files results/text.txt_fp32.old)" = "$earlier" ]
expect 0 'kept in results/text.txt_fp32.old3:' --data text.txt $model --steps 20
check "the same run makes the same checkpoint" cmp $checkpoint same

tiny="--data text.txt --dataset tiny --preset tiny --vocab-size 300 --no-checkpoint"
expect 0 '^a sample of 200 tokens:' $tiny --steps 2
check "a preset's warmup yields to few steps" says results/tiny_fp32.jsonl '"step": 1, .*"lr": 0.003,'
expect 2 'needs more than the 20 of the warmup' $tiny --steps 2 --warmup-steps 20
expect 0 '"steps": 400,' $tiny --layers 1 --heads 1 --d-model 8 --seq-len 8 --batch-size 1 --sample 0
run $tiny --batch-size 2000 --epochs 1 --sample 0
check "--epochs overrides a preset's steps" [ $code = 3 ]
expect 0 '"steps": 2,' --data results/text.txt --dataset ready --preset tiny --steps 2 --sample 0

# token files: prepared again if the text or an option has changed
tokens() { sha256sum < results/made.train.tokens; }
expect 0 . --data text.txt $model --steps 1 --dataset made --no-checkpoint
first=$(tokens)
expect 0 'text.txt are reused from an earlier run' \
  --data text.txt $model --steps 1 --dataset made --no-checkpoint
check "the same text and options: the same files" [ "$(tokens)" = "$first" ]
expect 0 . --data text.txt $model --steps 1 --dataset made --no-checkpoint --seed 5
check "another seed, another split" [ "$(tokens)" != "$first" ]
expect 0 . --data text.txt $model --steps 1 --dataset made
check "the first seed again" [ "$(tokens)" = "$first" ]
expect 0 'text.txt are reused from an earlier run' \
  --data text.txt ${model/--vocab-size 300/} --steps 2 --dataset made --resume
check "resumed without its tokenizer's options" [ "$(tokens)" = "$first" ]
mkdir elsewhere && tac text.txt > elsewhere/text.txt && touch -r text.txt elsewhere/text.txt
expect 0 . --data elsewhere/text.txt $model --steps 1 --dataset made --no-checkpoint
check "another text of the same name" [ "$(tokens)" != "$first" ]
expect 0 . --data text.txt $model --steps 1 --dataset made --no-checkpoint
check "the first text again" [ "$(tokens)" = "$first" ]
tac text.txt > other.txt
"$train" --data - --dataset made $model --steps 1 --no-checkpoint < other.txt > out 2> err
check "standard input takes the place of the text" [ "$(tokens)" != "$first" ]
expect 0 . --data text.txt $model --steps 1 --dataset made --no-checkpoint
check "and the text that of standard input" [ "$(tokens)" = "$first" ]
awk 'NF { printf "{\"text\": \"%s\"}\n", $0 }' text.txt > text.jsonl
expect 0 . --data text.jsonl $model --steps 1 --no-checkpoint
expect 3 'no field "nonsense"' --data text.jsonl $model --field nonsense
cp results/made.tokenizer.json tokenizer.json
for file in train.tokens valid.tokens tokenizer.json; do
  truncate -s 100 results/made.$file
  expect 0 . --data text.txt $model --steps 1 --dataset made --no-checkpoint
  check "a damaged $file is replaced" [ "$(tokens)" = "$first" ]
done
expect 0 . --data text.txt ${model/300/400} --steps 1 --dataset wider --no-checkpoint
cp results/wider.tokenizer.json results/made.tokenizer.json
expect 3 'made.tokenizer.json is not the tokenizer of results/made.train.tokens' \
  --data results/made --dataset mixed ${model/--vocab-size 300/} --steps 1
expect 0 . --data text.txt $model --steps 1 --dataset made
check "another run's tokenizer is replaced" cmp results/made.tokenizer.json tokenizer.json
expect 2 'has its own tokenizer: leave out' --data results/made --dataset mixed ${model/300/500} --steps 1
expect 2 'has its own tokenizer: leave out' \
  --data results/made --dataset mixed ${model/--vocab-size 300/} --tokenizer tokenizer.json --steps 1
own="--data text.txt $model --tokenizer own.json --dataset own --steps 1 --no-checkpoint"
cp tokenizer.json own.json
expect 0 . $own
check "a tokenizer's files are made" not says err reused
expect 0 'text.txt are reused' $own
first=$(sum results/own.train.tokens)
cp results/wider.tokenizer.json own.json
expect 0 . $own
check "another content of the tokenizer makes them again" [ "$(sum results/own.train.tokens)" != "$first" ]
cp text.txt edited.txt
expect 0 . --data edited.txt $model --steps 2
first=$(sha256sum results/edited.txt.*[ns])
sed -i '3s/a/o/g' edited.txt
expect 3 'made of another text, field or seed: give what it was made of' \
  --data edited.txt $model --steps 3 --resume
expect 3 'made of another text, field or seed: give what it was made of' \
  --data edited.txt ${model/--vocab-size 300/} --seed 1 --steps 3 --resume
check "what cannot be resumed leaves the run's files" [ "$(sha256sum results/edited.txt.*[ns])" = "$first" ]
cp text.txt edited.txt
expect 0 'step 3/3' --data edited.txt $model --steps 3 --resume
check "no temporary file is left" [ -z "$(find results -name '*tmp*')" ]
cp text.txt 'a "b".txt'
expect 0 dataset --data 'a "b".txt' $model --steps 1
check "metrics of a file name with quotes are JSON" is_json out
expect 0 '"dataset": "again"' --data results/text.txt --dataset again $model --steps 20
check "a prepared prefix trains the same" cmp results/again_fp32_step20.safetensors $checkpoint
"$train" --data - $model --steps 20 < text.txt > out 2> err
check "standard input trains the same" cmp results/stdin_fp32_step20.safetensors $checkpoint
expect 0 . --data results/text.txt --dataset sample $model --steps 3 --sample 20 --temperature 1e30
expect 0 . --data results/text.txt --dataset sample $model --steps 3 --sample 20 --prompt alabeta
check "the sample continues the prompt" grep -q '^alabeta.' out
sampled() { run --data results/text.txt --dataset drawn $model --steps 3 --sample 40 "$@"; sed 1d out; }
check "the least nucleus has the most likely token" \
  [ "$(sampled --top-p 1e-6)" = "$(sampled --temperature 0)" ]
check "--top-p draws from others than all" [ "$(sampled --top-p 0.3)" != "$(sampled)" ]
check "--top-p 1 draws from all" [ "$(sampled --top-p 1)" = "$(sampled)" ]

# short texts, with the default preset
tr '\n' ' ' < text.txt | head -c 30000 > oneline.txt
grep . text.txt | fold -s -w 80 | head -c 30000 > lines.txt
for text in oneline lines; do
  expect 0 "\"dataset\": \"$text.txt\".*\"val_loss\": [0-9.]+," --data $text.txt --steps 2 --sample 0
  check "$text.txt has 20 documents or more, and all its bytes" \
    says err "^$text.txt: plain text, (2[0-9]|3[0-9]|4[0-2]) documents, 30,000 bytes"
  check "$text.txt has text for each split" not says err ' 0 documents'
done
head -c 500 oneline.txt > brief.txt
expect 3 'brief.txt is too short: .* has 64: give more text, or --seq-len [0-9]+$' --data brief.txt
expect 0 '"seq_len": [1-9]' --data brief.txt --steps 2 $(grep -o -- '--seq-len [0-9]*$' err)
expect 0 . --data results/text.txt --dataset bare $model --steps 2 --no-memory-profiling
check "--no-memory-profiling writes no memory file" [ ! -e results/bare_fp32_memory.json ]
expect 0 '"batch_size": 8' \
  --data results/text.txt --dataset many ${model/--batch-size 4/} --steps 2 --technique bf16_window16_bs8
expect 0 '"batch_size": 4' \
  --data results/text.txt --dataset many $model --steps 2 --technique bf16_window16_bs8
for technique in tf32 bf16 fp16 fp8 bf16_flash bf16_window16 bf16_window32 fp32_checkpointing \
  bf16_flash_segments fp16_flash_selective_chunked bf16_flash_compact fp8_flash_checkpointing; do
  expect 0 "\"technique\": \"$technique\"" \
    --data results/text.txt --dataset many $model --steps 20 --technique $technique
  case $technique in *window*) continue;; esac
  check "$technique reaches the loss of fp32" \
    awk -v a="$(field out val_loss)" -v b="$(field $metrics val_loss)" \
    'BEGIN { exit !(a > 0 && a / b < 1.01 && b / a < 1.01) }'
done
expect 0 '"technique": "bf16_flash_chunked"' \
  --data results/text.txt --dataset many $model --steps 1 --bf16 --flash-attn --chunked
expect 0 '"technique": "fp32_flash_checkpointing_window8"' \
  --data results/text.txt --dataset many $model --steps 1 --gradient-checkpointing --attention flash \
  --window-size 8
expect 2 'more than 2' --data results/text.txt $model --epochs 2000000000
for decay in 0 -1 0.01; do
  expect 0 . \
    --data results/text.txt --dataset "decay$decay" $model --steps 3 --weight-decay $decay --clip \
    ${decay/0.01/1}
done
check "--weight-decay 0 and --clip 0 are none" \
  cmp results/decay0_fp32_step3.safetensors results/decay-1_fp32_step3.safetensors
check "the defaults are others" \
  not cmp results/decay0_fp32_step3.safetensors results/decay0.01_fp32_step3.safetensors

# names and paths: of any length, or refused before anything is written; nothing in them is run
deep=$(printf 'd%.0s' $(seq 200))/$(printf 'e%.0s' $(seq 200))/$(printf 'f%.0s' $(seq 93))
expect 0 . --data results/text.txt --dataset ds --results-dir "$deep" $model --steps 2
check "a folder of 495 letters has all files of a run" [ "$(ls -A "$deep" | grep -c '^ds_fp32')" = 7 ]
expect 2 'takes 1 to 1500 letters' \
  --data text.txt --results-dir "$(printf 'd/%.0s' $(seq 800))" $model --steps 1
expect 2 'takes 1 to 1500 letters' --data text.txt --results-dir '' $model --steps 1
expect 2 'at most 200 letters' --data text.txt --dataset "$(printf 'n%.0s' $(seq 197))" $model --steps 1
for name in 'a/b' '../up' '$(touch RAN)' '`touch RAN`' "it's" -dash .hidden 'a b' 'a"b' \
  "$(printf 'a\nb')" ''; do
  expect 2 'a name consists of letters, digits' --data text.txt --dataset "$name" $model --steps 1
done
for folder in "it's" '$(touch RAN)' '`touch RAN`' "$(printf 'a\nb')" ./-dash 'a "b"'; do
  expect 0 '"steps": 1,' --data results/text.txt --results-dir "$folder" $model --steps 1
  check "results in the folder $folder" [ -s "$folder/text.txt_fp32_metrics.json" ]
done
printf -v odd 'o\nd$(touch RAN)d.txt' && cp text.txt "$odd"
expect 0 '"dataset": "o_d__touch_RAN_d.txt"' --data "$odd" $model --steps 1
check "no name is run" [ ! -e RAN ]
mkdir locked && chmod 500 locked
[ "$(id -u)" = 0 ] ||
  expect 3 'cannot make the folder locked/in: ' --data text.txt --results-dir locked/in $model --steps 1

# files that cannot be written
mkdir -p results/{full_fp32_metrics.json,disk_fp32_memory.json,log_fp32.jsonl}.tmp/x
expect 3 'cannot write results/full_fp32_metrics.json: .*check that --results-dir is yours' \
  --data results/text.txt --dataset full $model --steps 2
check "the metrics are on stdout nevertheless" says out '^{"dataset": "full"'
expect 3 'cannot write results/disk_fp32_memory.json' --data results/text.txt --dataset disk $model --steps 2
expect 3 'cannot write results/log_fp32.jsonl' --data results/text.txt --dataset log $model --steps 2
check "a log that cannot be written is reported before the first step" not says err 'step 1/'
for name in metrics.json memory.json; do ln -s "$work/target" results/link_fp32_$name; done
ln -s "$work/target" results/link_fp32.jsonl.tmp
expect 0 . --data results/text.txt --dataset link $model --steps 2
check "no link is followed" eval '[ ! -e target ] && [ ! -L results/link_fp32_metrics.json ]'
mkdir -p results/.last_fp32_step2.safetensors.tmp/x
expect 3 'saved as \./last_fp32_step2.safetensors: move it to results, then --resume' \
  --data results/text.txt --dataset last $model --steps 2
check "a checkpoint that cannot be saved costs no metrics" [ -s results/last_fp32_metrics.json ]
rm -r results/.last_fp32* && mv last_fp32_step2.safetensors results
expect 0 'step 3/3' --data results/text.txt --dataset last $model --steps 3 --resume
(ulimit -f 20; run --data results/text.txt --dataset limit $model --steps 4 --save-every 2; exit $code)
check "a limit on file sizes ends with $?, not 3" [ $? = 3 ]
check "a limit on file sizes costs no metrics" [ -s results/limit_fp32_metrics.json ]
(ulimit -f 1; run --data text.txt --dataset small $model --steps 1; exit $code)
check "a limit on file sizes ends the preparation with $?, not 3" [ $? = 3 ]
mkdir results/folder_fp32_step1.safetensors
run --data results/text.txt --dataset folder $model --steps 2 --resume
check "a checkpoint that is there but cannot be read is not called absent" \
  eval '[ $code = 3 ] && ! grep -q "nothing to resume" err'
expect 3 'MiB free, too few for 2000000002 checkpoints' \
  --data results/text.txt --dataset room $model --steps 2 --save-every 1 --keep 2000000000
check "no room is reported before the first step" not says err 'step 1/'
# runs that diverge: their files are JSON, their exit code is 5
expect 5 'lower lr' \
  --data results/text.txt --dataset wild $model --steps 60 --lr 100 --weight-decay 1 --clip -1
expect 0 '^validation  perplexity [0-9.]+e\+[0-9]+, ' --data results/text.txt --dataset huge $model \
  --steps 40 --lr 2 --clip 0
check "a perplexity of many digits has an exponent in the metrics" eval \
  'is_json results/huge_fp32_metrics.json && says results/huge_fp32_metrics.json "\"perplexity\": [0-9.]+e\+"'
expect 5 'the run diverged.*lower --lr' --data results/text.txt --dataset far $model --steps 60 --lr 100
check "metrics without a perplexity are JSON with null" eval 'is_json out && says out "\"perplexity\": null"'
run --data results/text.txt --dataset half $model --steps 60 --lr 0.3 --fp16 --log csv
half=results/half_fp16.csv
check "an overflow in FP16 has no number in the CSV" \
  eval 'says $half ",0.3[0-9]*,,[0-9.]+$" && not says $half "nan|inf|null"'
check "an overflow in FP16 is null in the log" says results/half_fp16.jsonl '"grad_norm": null'
check "the log of a run that overflows is JSON" is_json --lines results/half_fp16.jsonl
# in FP8, weights that grow fast are clipped
run --data results/text.txt --dataset eight $model --steps 4 --lr 0.3 --fp8
check "clipped values are in the log" eval 'says results/eight_fp8.jsonl "\"clipped\": [1-9][0-9]*, " &&
  is_json --lines results/eight_fp8.jsonl'
check "and in the progress" says err '[0-9] values clipped'
check "a step that clips nothing is silent" not says results/eight_fp8.jsonl '^{"step": 1,.*clipped'
run --data results/text.txt --dataset eight $model --steps 8 --lr 0.3 --fp8 --resume
check "a run in FP8 resumes: exit $code" [ $code = 0 ]
expect 0 '"technique": "fp8_layers8"' --data results/text.txt $model --steps 1 --fp8 --fp8-products layers
if ldd "$train" | grep -q cublas; then skip "--device cuda in a build without it, since this build has it"
else
  run --device cuda --data results/text.txt --dataset gpu $model --steps 2
  check "--device cuda without CUDA: exit $code, expected 2 or 6 and a text that names CUDA" \
    eval '[ $code = 2 -o $code = 6 ] && grep -qi cuda err'
fi

# interrupted, killed, resumed: the same to the bit
long="--data results/text.txt $model --steps 800 --seed 3 --dropout 0.1 --lr-schedule cosine --save-every 50"
long+=" --eval-every 100 --eval-batches 1"
: > results/.whole_fp32_step7.safetensors.tmp # left by a process that was killed
: > results/.whole_fp32_step7.json.tmp
run $long --dataset whole
check "what a killed save left is removed, and nothing else" \
  [ ! -e results/.whole_fp32_step7.safetensors.tmp -a -e results/.whole_fp32_step7.json.tmp ]
run $long --dataset full --steps 1 --no-checkpoint
(ulimit -f 8; once INT results/full_fp32.jsonl $long --dataset full --no-checkpoint; exit $code)
check "SIGINT with a full log ends with $?, not 130" [ $? = 130 ]
check "SIGINT with a full log says why" says err 'cannot write results/full_fp32.jsonl: File too large'
once INT results/cut_fp32.jsonl $long --dataset cut
check "SIGINT ends with $code, not 130" [ $code = 130 ]
check "SIGINT leaves no metrics" [ ! -e results/cut_fp32_metrics.json ]
check "SIGINT came before the end" [ "$(grep -c '"loss"' results/cut_fp32.jsonl)" -lt 800 ]
expect 0 'step 800/800' $long --dataset cut --resume
check "weights after SIGINT and --resume are those of an uninterrupted run" \
  cmp results/cut_fp32_step800.safetensors results/whole_fp32_step800.safetensors
check "log after SIGINT and --resume is that of an uninterrupted run" \
  same_log results/cut_fp32.jsonl results/whole_fp32.jsonl
once HUP results/hung_fp32.jsonl $long --dataset hung
want=130 # 0 under nohup: the tests then ignore SIGHUP, the trainer inherits that, and runs to its end
[ $((0x$(sed -n 's/^SigIgn:[[:space:]]*//p' /proc/self/status) & 1)) = 0 ] || want=0
check "SIGHUP ends with $code and a checkpoint, not $want" eval \
  '[ $code = $want ] && ls results/hung_fp32_step*.safetensors > /dev/null'
# the warnings that batch systems send: the run is saved, however often they come, unless the parent ignores
# them
for signal in USR1 USR2 XCPU; do
  once $signal results/${signal}_fp32.jsonl $long --dataset $signal --sample 20
  check "SIG$signal ends with $code, not 130" [ $code = 130 ]
  check "SIG$signal saves, and says so" eval 'says err "^stopping after this step, before the time limit" &&
    says err "^train: stopped after step [0-9]*: --resume continues from there" &&
    ls results/${signal}_fp32_step*.safetensors > /dev/null'
done
expect 0 'step 800/800' $long --dataset USR1 --resume
check "weights after SIGUSR1 and --resume are those of an uninterrupted run" \
  cmp results/USR1_fp32_step800.safetensors results/whole_fp32_step800.safetensors
"$train" $long --dataset often > out 2> err < /dev/null & id=$!
for _ in $(seq 3000); do
  [ "$(cat results/often_fp32.jsonl 2> /dev/null | wc -c)" -ge 8192 ] && break
  sleep 0.02
done
for _ in $(seq 3000); do kill -XCPU $id && kill -USR1 $id || break; sleep 0.005; done 2> /dev/null
wait $id; code=$?
check "warnings again and again end with $code, not 130" [ $code = 130 ]
check "and with a checkpoint" eval 'ls results/often_fp32_step*.safetensors > /dev/null'
(trap '' USR1 USR2 XCPU; exec "$train" $long --dataset deaf) > out 2> err < /dev/null & id=$!
for _ in $(seq 3000); do [ -s results/deaf_fp32.jsonl ] && break; sleep 0.02; done
kill -USR1 $id; kill -USR2 $id; kill -XCPU $id; wait $id; code=$?
check "warnings that the parent ignores change nothing: $code, not 0" \
  eval '[ $code = 0 ] && cmp results/deaf_fp32_step800.safetensors results/whole_fp32_step800.safetensors'
once KILL results/killed_fp32.jsonl $long --dataset killed
check "kill -9 ends with $code, not 137" [ $code = 137 ]
expect 0 'step 800/800' $long --dataset killed --resume
check "weights after kill -9 and --resume are those of an uninterrupted run" \
  cmp results/killed_fp32_step800.safetensors results/whole_fp32_step800.safetensors
check "log after kill -9 and --resume is that of an uninterrupted run" \
  same_log results/killed_fp32.jsonl results/whole_fp32.jsonl

# disks without locks: a run trains, with one note; other failures of a lock end it
cc -O1 -shared -fPIC "$root/tests/platforms/faults.c" -o faults.so -ldl || fail "faults.c does not compile"
lockless() { # ERRNO LOCKED CODE PATTERN ARGUMENT...: LOCKED locks do not fail
  export FAULT_LOCK=$1 FAULT_LOCKED=$2 FAULT_FOLDER=$work/results/ LD_PRELOAD=$work/faults.so
  expect "${@:3}"
  unset FAULT_LOCK FAULT_LOCKED FAULT_FOLDER LD_PRELOAD
}
note='note: this disk has no locks: do not start two runs of one name'
for error in 38 37 95 22 75; do # ENOSYS ENOLCK EOPNOTSUPP EINVAL EOVERFLOW
  lockless $error 0 0 '"steps": 2,' --data text.txt --dataset lockless$error $model --steps 2
  check "errno $error: one note" [ "$(grep -cx "$note" err)" = 1 ]
done
for locked in 1 2; do # the run's name has a lock, but not the text; neither can be unlocked
  lockless 37 $locked 0 '"steps": 2,' --data text.txt --dataset locked$locked $model --steps 2
  check "one note after $locked locks" [ "$(grep -cx "$note" err)" = 1 ]
done
lockless 37 0 0 '"ranks": 2,' --data text.txt --dataset locklessranks $model --steps 2 --ranks 2
check "one note of two ranks" [ "$(grep -cx "$note" err)" = 1 ]
lockless 37 0 0 'steps 3 to 4' --data text.txt --dataset lockless37 $model --steps 4 --resume
lockless 5 0 3 'cannot lock results/' --data text.txt --dataset broken $model --steps 2

# the umask decides who may read and write what a run leaves
for mask in 002 007 077; do
  umask $mask
  all="--results-dir mask/$mask $model --log"
  run --data text.txt $all csv --steps 4 --save-every 2 --eval-every 2
  run --data text.txt $all tensorboard --steps 2 --lora-rank 2
  run --data text.txt $all csv --steps 4 --ranks 2
  umask 022
  check "umask $mask: there are files of all kinds" [ "$(find mask/$mask -type f | wc -l)" -gt 20 ]
  check "umask $mask holds for files" \
    [ -z "$(find mask/$mask -type f ! -perm $(printf %o $((8#666 & ~8#$mask))))" ]
  check "umask $mask holds for folders" \
    [ -z "$(find mask/$mask -type d ! -perm $(printf %o $((8#777 & ~8#$mask))))" ]
done

# the log's numbers as CSV and for TensorBoard: each once, also if a run was killed after its last checkpoint
cat > curves.py << 'PYTHON'
import glob, json, struct, sys
tags = {"loss": "loss/train", "val_loss": "loss/validation", "bits_per_byte": "bits_per_byte/validation",
        "accuracy": "accuracy/validation", "lr": "learning_rate", "grad_norm": "gradient_norm",
        "tokens_per_s": "tokens_per_second"}

def crc(data): # CRC-32C, masked as TFRecord has it
    value = 0xffffffff
    for byte in data:
        value ^= byte
        for _ in range(8): value = value >> 1 ^ (0x82f63b78 if value & 1 else 0)
    value ^= 0xffffffff
    return ((value >> 15 | value << 17) + 0xa282ead8) & 0xffffffff

def members(data): # of a protocol buffer: number and value
    at = 0
    def varint():
        nonlocal at
        value = shift = 0
        while True:
            at += 1
            value |= (data[at - 1] & 127) << shift
            shift += 7
            if data[at - 1] < 128: return value
    while at < len(data):
        key = varint()
        size = {0: 0, 1: 8, 5: 4}[key & 7] if key & 7 != 2 else varint()
        at += size
        yield key >> 3, data[at - size:at] if size or key & 7 else varint()
    assert at == len(data)

def by_hand(folder):
    paths, events = glob.glob(folder + "/*tfevents*"), []
    assert len(paths) == 1, paths
    data = open(paths[0], "rb").read()
    while data:
        size, size_crc = struct.unpack("<QI", data[:12])
        event, (event_crc,) = data[12:12 + size], struct.unpack("<I", data[12 + size:16 + size])
        assert size_crc == crc(data[:8]) and event_crc == crc(event)
        events.append(dict(members(event)))
        data = data[16 + size:]
    assert events[0][3] == b"brain.Event:2" and events[1][7] == b"\x08\x01", events[:2]
    for event in events[2:]:
        for number, pair in members(event[5]):
            pair, (seconds,) = dict(members(pair)), struct.unpack("<d", event[1])
            yield pair[1].decode(), event[2], seconds, struct.unpack("<f", pair[2])[0]

def by_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator(folder, size_guidance={"scalars": 0}).Reload()
    for tag in events.Tags()["scalars"]:
        for e in events.Scalars(tag): yield tag, e.step, e.wall_time, e.value

want = []
for row in map(json.loads, open(sys.argv[2], encoding="utf-8")):
    want += [(tags[key], row["step"], row["time"], struct.unpack("f", struct.pack("f", row[key]))[0])
             for key in tags if row.get(key) is not None]
assert len(want) > 100
for read in [by_hand, by_tensorboard][:len(sys.argv) - 2]:
    assert sorted(read(sys.argv[1])) == sorted(want), read
PYTHON
csv_of() { # LOG: the table that it is
  awk 'function of(key, format) {
    if (!match($0, "\"" key "\": [-0-9]")) return ""
    return sprintf(format, substr($0, RSTART + length(key) + 4) + 0)
  }
  BEGIN {print "step,time,loss,val_loss,bits_per_byte,accuracy,lr,grad_norm,tokens_per_s"}
  {
    printf "%s,%s", of("step", "%d"), of("time", "%.3f")
    n = split("loss val_loss bits_per_byte accuracy lr grad_norm tokens_per_s", keys, " ")
    for (k = 1; k <= n; k++) printf ",%s", of(keys[k], "%.15g")
    print ""
  }' "$1"
}
curves="--data results/text.txt $model --steps 400 --seed 3 --save-every 50 --eval-every 100"
curves+=" --dataset curves"
package="" # an argument of curves.py if Python has TensorBoard
if python3 -c 'import tensorboard' 2> /dev/null; then package=tensorboard
else skip "python3 has no tensorboard: pip install tensorboard"; fi
once KILL results/curves_fp32.jsonl $curves --log tensorboard
check "a killed run leaves an event file" [ -s results/curves_fp32_tensorboard/events.out.tfevents.*.mtt ]
expect 0 'tensorboard --logdir results$' $curves --log tensorboard --resume
if command -v python3 > /dev/null; then
  check "the event file is the log" \
    python3 curves.py results/curves_fp32_tensorboard results/curves_fp32.jsonl $package
else skip "python3 is missing, event files are not read: apt-get install python3"; fi
expect 0 '^curves      results/curves_fp32.csv$' $curves --log csv --resume
csv_of results/curves_fp32.jsonl > curves.csv
check "the CSV is the log" cmp curves.csv results/curves_fp32.csv
check "the CSV has each step and 4 evaluations" [ "$(wc -l < curves.csv)" = 405 ]
rm results/curves_fp32.csv && mkdir results/curves_fp32.csv
expect 3 'cannot make results/curves_fp32.csv: ' $curves --log csv --resume
rmdir results/curves_fp32.csv
run $curves --steps 2
check "a run that starts over keeps the curves" [ -d results/curves_fp32.old/curves_fp32_tensorboard ]

# Ctrl-C answers at once, also while it evaluates; a step is evaluated once, before or after it
for _ in $(seq 40); do cat text.txt; done > much.txt
much="--data much.txt --tokenizer tokenizer.json ${model/--vocab-size 300/} --steps 4 --eval-every 1"
run $much --dataset calm
check "a run that evaluates each step" [ $code = 0 ]
"$train" $much --dataset hasty > out 2> err < /dev/null & id=$!
for _ in $(seq 3000); do [ -s results/hasty_fp32.jsonl ] && break; sleep 0.02; done
start=$(date +%s%N)
kill -INT $id; wait $id; code=$? took=$((($(date +%s%N) - start) / 1000000))
check "SIGINT in an evaluation ends with $code, not 130" [ $code = 130 ]
check "it takes $took ms, not 1000" [ $took -lt 1000 ]
check "it says that it stops, and where" eval 'says err "^stopping after this step" &&
  says err "^train: stopped after step 1: --resume continues from there"'
check "the log has no half evaluation" not says results/hasty_fp32.jsonl val_loss
expect 0 'step 4/4' $much --dataset hasty --resume
check "the log is that of an uninterrupted run" same_log results/calm_fp32.jsonl results/hasty_fp32.jsonl
check "an evaluation for each step" [ "$(grep -c val_loss results/hasty_fp32.jsonl)" = 4 ]
"$train" $long --steps 100000 --dataset slow > out 2> err < /dev/null & id=$!
for _ in $(seq 3000); do grep -q '^step 2/' err && break; sleep 0.02; done
kill -STOP $id; sleep 10.5; kill -CONT $id
for _ in $(seq 250); do [ "$(grep -c '^step ' err)" = 3 ] && break; sleep 0.02; done
check "a line after 10 s" [ "$(grep -c '^step ' err)" = 3 ]
kill -INT $id; wait $id

expect 3 'nothing to resume: there is no results/none_fp32_step' $long --dataset none --resume
check "it does so before it makes tokens" [ ! -e results/none.train.tokens ]
: > results/begun.train.tokens # the first run was killed while it prepared
expect 3 'nothing to resume: .*: start without --resume' $long --dataset begun --resume

# what is named like a checkpoint and is no file
odd="--data text.txt --dataset odd $model --save-every 2"
run $odd --steps 4
mkdir results/odd_fp32_step7.safetensors; mkfifo results/odd_fp32_step8.safetensors
ln -s nowhere results/odd_fp32_step9.safetensors; ln -s . results/odd_fp32_step10.safetensors
expect 0 'training: steps 5 to 6' $odd --steps 6 --resume --keep 9
for step in 7 8 9 10; do
  check "step $step is passed over, with a note" \
    says err "^note: results/odd_fp32_step$step.safetensors is no file: it is passed over$"
done
rm -rf results/odd_fp32_step*; mkdir results/odd_fp32_step7.safetensors
expect 3 'odd_fp32_step7.safetensors is no file: start without --resume' $odd --steps 8 --resume

# a preset whose warmup is longer than the run: with more steps it goes on as if it had had them at once
few="--data text.txt --preset a $model --d-ff 64"
expect 0 "^note: the preset's warmup has 50 steps, the run 10: --warmup-steps 0" $few --dataset few --steps 10
expect 0 'steps 11 to 20' $few --dataset few --steps 20 --resume
check "nothing has changed" not says err 'other settings|lr goes on'
run $few --dataset once --steps 20
check "it has the weights of a run of 20 steps" \
  cmp results/few_fp32_step20.safetensors results/once_fp32_step20.safetensors
expect 0 '^training' $few --dataset known --steps 4 --warmup-steps 0
check "a warmup that is given has no note" not says err '^note: the preset'

# what a resumed run does otherwise
goes() { expect 0 "$1" --data text.txt --dataset goes $model --lr-schedule cosine --resume "${@:2}"; }
run --data text.txt --dataset goes $model --lr-schedule cosine --steps 20
ended=$(sed -n 's/^{"step": 20, "loss.*"lr": \([^,]*\),.*/\1/p' results/goes_fp32.jsonl)
goes "^note: lr goes on at 0.0005; the run before ended at $(printf %.3g "$ended")$" --steps 40
check "settings that are the same are not listed" not says err 'other settings'
goes '^note: lr goes on at [0-9.e-]+; the run before ended at [0-9.e-]+$' --steps 42 --lr 2e-3
check "another lr is named" says err '^note: other settings than before: --lr 0.002 \(was 0.001\)$'
list='tokens in a step 256 \(was 128\), --dropout 0.1 \(was 0\), --clip 0 \(was 1\)'
goes "^note: other settings than before: $list$" --steps 50 --lr 2e-3 --accumulate 2 --dropout 0.1 --clip 0
run --data text.txt --dataset quiet $model --steps 4
expect 0 'steps 5 to 6' \
  --data text.txt --dataset quiet $model --steps 6 --batch-size 2 --accumulate 2 --resume
check "a run that goes on as it was has no note" not says err '^note: '
check "settings are JSON" is_json results/quiet_fp32_settings.json
expect 0 'other settings, and is kept in results/quiet_fp32.old; here: --norm rms \(was layer\)\. With' \
  --data text.txt --dataset quiet $model --steps 6 --norm rms
check "settings move with their run" says results/quiet_fp32.old/quiet_fp32_settings.json '"norm": "layer"'
expect 3 'layers 1.* 2' $long --dataset cut --layers 2 --resume

steps() { (cd results && echo $1_fp32_step*.safetensors | sed "s/$1_fp32_step//g; s/\.safetensors//g"); }
check "two checkpoints stay: $(steps whole)" [ "$(steps whole)" = "750 800" ]
run $long --dataset every --keep 20
check "--keep 20 keeps 16: $(steps every)" [ "$(steps every | wc -w)" = 16 ]
best=$(sed -n 's/.*"step": \([0-9]*\), "val_loss": \([0-9.]*\).*/\2 \1/p' results/every_fp32.jsonl |
  sort -g | sed 's/.* //; q')
check "the best checkpoint is that of step $best, of the least validation loss" \
  cmp results/every_fp32_best.safetensors "results/every_fp32_step$best.safetensors"
expect 0 . --data text.txt --dataset damaged $model --steps 4 --save-every 2
truncate -s 1000 results/damaged_fp32_step4.safetensors
expect 0 'continuing .*step 2' --data text.txt --dataset damaged --resume $model --steps 5 --lr 0.5 \
  --save-every 40 --eval-every 4
check "the best checkpoint, of step 4, is no damaged file of that step" \
  [ "$(stat -c %s results/damaged_fp32_best.safetensors)" -gt 1000 ]
truncate -s 1000 results/every_fp32_step800.safetensors
expect 0 'continuing from step 750' $long --dataset every --resume
check "a damaged checkpoint costs the steps since the one before" \
  cmp results/every_fp32_step800.safetensors results/whole_fp32_step800.safetensors
cp results/whole_fp32_metrics.json metrics.json && rm results/whole_fp32_metrics.json
expect 0 '"steps": 800' $long --dataset whole --resume
check "--resume writes metrics that are missing, the same" cmp metrics.json results/whole_fp32_metrics.json

# two at a time: one run once, one dataset for all
once_more() { "$train" --data text.txt $model --steps 20 --dataset three --technique $1 > out$1 2>&1; }
for technique in fp32 bf16 fp32_flash; do once_more $technique & ids="${ids:-} $!"; done
for id in $ids; do wait "$id"; check "three first runs of a text at once" [ $? = 0 ]; done
"$train" $long --steps 100000 --dataset twice > out1 2> err1 < /dev/null & id=$!
for _ in $(seq 3000); do [ -s results/twice_fp32.jsonl ] && break; sleep 0.02; done
expect 3 'another process writes results/twice_fp32: wait until it ends' $long --dataset twice
expect 3 'another process writes results/twice_fp32' $long --dataset twice --resume
kill -INT $id; wait $id
check "the first one does not notice" [ $? = 130 ]
expect 0 . --data text.txt $model --steps 1 --results-dir a/b/c --no-checkpoint
check "--results-dir makes its folders" [ -s a/b/c/text.txt_fp32_metrics.json ]
mkdir beside; cp text.txt beside; cd beside # where token files lie beside the text
expect 0 . --data text.txt $model --steps 1 --results-dir . --no-checkpoint
tac ../text.txt > text.txt
expect 0 '^comparing text.txt with' --data text.txt $model --steps 1 --results-dir . --no-checkpoint
check "a changed text is new data" not says err 'reused'
cd ..
expect 0 . --data text.txt --dataset shared $model --steps 2
cp results/shared.train.tokens before; cp results/shared.tokenizer.json first.json
expect 2 'does not divide into 3 heads' --data text.txt --dataset shared $model --vocab-size 320 --heads 3
check "a model that is refused leaves the tokens" cmp results/shared.train.tokens before
expect 0 . --data text.txt --dataset shared $model --vocab-size 320 --steps 2 --technique bf16
check "a run's tokenizer stays" cmp results/shared_fp32_tokenizer.json first.json
check "another run has its own" cmp results/shared_bf16_tokenizer.json results/shared.tokenizer.json
check "and it is another" not cmp results/shared.tokenizer.json first.json
expect 0 . --data text.txt --dataset shared $model --steps 2
check "a run that is set aside has its tokenizer" \
  cmp results/shared_fp32.old/shared_fp32_tokenizer.json first.json

# data that is reported before the first step
cp results/made.train.tokens mixed.train.tokens && cp results/made.tokenizer.json mixed.tokenizer.json
cp results/wider.valid.tokens mixed.valid.tokens
expect 3 mixed --data mixed ${model/--vocab-size 300/} --steps 300
check "a validation split of another vocabulary is reported before the first step" not says err 'step '
run --data <(cat text.txt) $model --steps 20 --dataset pipe
check "a pipe trains the same" cmp results/pipe_fp32_step20.safetensors $checkpoint
mkfifo fifo
timeout 60 cat text.txt > fifo &
run --data fifo $model --steps 20 --dataset fifo
check "a named pipe trains the same" cmp results/fifo_fp32_step20.safetensors $checkpoint
expect 3 /dev/zero --data /dev/zero $model --steps 1

# real text
if [ -r "$data/tinyshakespeare.txt" ] && [ -r "$data/vocab.bpe" ]; then
  expect 0 '"parameters": 3279473' \
    --data "$data/tinyshakespeare.txt" --tokenizer "$data/vocab.bpe" $model --steps 2 --eval-batches 2
  expect 0 '"parameters": 77768' \
    --data "$data/tinyshakespeare.txt" $model --vocab-size 1000 --steps 300 --eval-batches 50
  check "300 steps on Shakespeare beat guessing by far: perplexity $(field out perplexity)" \
    awk -v p="$(field out perplexity)" 'BEGIN { exit !(p > 1 && p < 500) }'
else skip "tinyshakespeare.txt or vocab.bpe is missing: tools/get_data.sh tinyshakespeare.txt vocab.bpe"; fi

# several ranks: the bits of one rank that has all their micro-batches
together="--data results/text.txt $model --steps 40 --seed 3 --dropout 0.1 --save-every 10 --eval-every 10"
same_run() { # NAME WHAT: has the files of the run "alone"
  local kind
  for kind in step40 best; do
    check "$2: $kind" cmp results/$1_$kind.safetensors results/alone_fp32_$kind.safetensors
  done
  check "$2: the log" same_log results/$1.jsonl results/alone_fp32.jsonl
  check "$2: val_loss" [ "$(field results/$1_metrics.json val_loss)" = \
    "$(field results/alone_fp32_metrics.json val_loss)" ]
}
launch() { # RANKS ARGUMENT...: as torchrun; sets codes; the last argument, if not "", is rank 1's alone
  local ranks=$1 port=$((20000 + RANDOM % 12000)) k ids=() id; shift
  for ((k = ranks - 1; k >= 0; k--)); do
    RANK=$k WORLD_SIZE=$ranks LOCAL_RANK=$k MASTER_ADDR=127.0.0.1 MASTER_PORT=$port timeout 120 \
      "$train" "${@:1:$#-1}" $([ $k != 1 ] || echo "${!#}") > out.$k 2> err.$k < /dev/null & ids+=($!)
  done
  codes=
  for id in "${ids[@]}"; do wait $id; codes="$? $codes"; done
  cat $(seq -f 'out.%g' 0 $((ranks - 1))) > out
  cat $(seq -f 'err.%g' 0 $((ranks - 1))) > err
}
once_said() { [ "$(grep -c "^train: " err)" = 1 ]; }
gone() { # PID...: wait until they are
  local id
  for id in "$@"; do for _ in $(seq 100); do kill -0 $id 2> /dev/null || break; sleep 0.1; done; done
  ! kill -0 "$@" 2> /dev/null
}
run $together --dataset alone --accumulate 4
expect 0 'training on 4 ranks: .* of 512 tokens' $together --dataset four --ranks 4
same_run four_fp32 "4 ranks by fork"
check "4 ranks are in the metrics" says out '"ranks": 4, '
run $together --dataset divided --ranks 4 --shard optimizer
same_run divided_fp32_zero1 "4 ranks divide the optimizer"
run $together --dataset divided --ranks 2 --accumulate 2 --shard gradients
same_run divided_fp32_zero2 "2 ranks divide gradients, too"
launch 4 $together --dataset torch ""
check "4 ranks of a launcher end with $codes" [ "$codes" = "0 0 0 0 " ]
same_run torch_fp32 "4 ranks of a launcher"
check "rank 0 alone speaks" [ ! -s err.1 -a ! -s out.1 -a ! -s err.3 ]
for name in mpirun torchrun; do
  if ! command -v $name > /dev/null; then skip "ranks started by $name, which is not installed"; continue; fi
  case $name in
    mpirun) start="mpirun --allow-run-as-root --oversubscribe -n 4";;
    torchrun) start="torchrun --no-python --nproc-per-node 4 --master-port $((20000 + RANDOM % 12000))";;
  esac
  timeout 120 $start "$train" $together --dataset $name > out 2> err < /dev/null
  same_run ${name}_fp32 "4 ranks by $name"
done
run $together --dataset moved --ranks 4 --steps 20
expect 0 'steps 21 to 40' $together --dataset moved --accumulate 4 --resume
same_run moved_fp32 "from 4 ranks to 1"

# what differs between ranks, or fails on all of them, is said once
launch 2 $together --dataset differs "--lr 0.5"
check "another learning rate ends with $codes" [ "$codes" = "3 3 " ]
check "another learning rate is named" \
  says err '^train: rank 1 \(host .*\) differs from rank 0 .* in lr; start all ranks with the same settings'
check "another learning rate is said once" once_said
for other in "--dropout 0.2:dropout" "--freeze wte.*:freeze" "--clip 2:clip"; do
  launch 2 $together --dataset differs "${other%:*}"
  check "another ${other#*:} is named" says err "^train: rank 1 .* differs from rank 0 .* in ${other#*:};"
done
launch 2 --data text.txt $model --steps 2 --dataset apart "--results-dir another"
check "ranks without a common folder end with $codes" [ "$codes" = "7 3 " ]
check "rank 1 says why it stops" says err.1 '^train: rank 1: another/apart.tokenizer.json: cannot read it'
check "rank 0 says that and why" says err.0 '^train: rank 1 \(host .*\) stopped: another/apart\.token'
launch 2 --data absent.txt $model --steps 2 --dataset apart ""
check "ranks of which the first fails end with $codes" [ "$codes" = "3 7 " ]
check "rank 1 stays silent beside rank 0" [ ! -s err.1 ]
sed 's/LOCAL_RANK=$k/LOCAL_RANK=0/' <<< "$(declare -f launch)" | sed 's/^launch/launch_apart/' > launch_apart
. ./launch_apart
launch_apart 2 --data absent.txt $model --steps 2 --dataset apart ""
check "on another host it has a line of its own" \
  says err.1 '^train: rank 1: rank 0 \(host .*\) stopped: absent.txt: cannot open'
run --data $root/README.md $model --steps 1 --dataset wider
launch 2 $together --dataset differs "--data results/wider"
check "another text ends with $codes" [ "$codes" = "3 3 " ]
check "another text is named" \
  says err '^train: rank 1 \(host .*\) differs from rank 0 .* in the training text'
launch 2 $together --dataset four "--save-every 7 --eval-batches 2"
check "other checkpoints are named" says err '^train: rank 1 .* in --save-every: 7, not 10;'
launch 2 $together --dataset four --resume
check "--resume on one rank is named" says err '^train: rank 1 .* in --resume: 1, not 0;'
check "--resume on one rank moves no files" [ ! -e results/four_fp32.old ]
(ulimit -f 20; run $together --dataset narrow --ranks 2 --steps 20 --shard gradients; exit $code)
check "ranks whose checkpoints cannot be written end with $?, not 3" [ $? = 3 ]
check "ranks go on without a checkpoint" \
  [ "$(grep -c 'step[12]0.safetensors: cannot write it: File too large' err)" = 2 -a \
  -s results/narrow_fp32_zero2_metrics.json ]
port=$((20000 + RANDOM % 12000))
for ranks in 2 3; do
  RANK=$((ranks - 2)) WORLD_SIZE=$ranks MASTER_ADDR=127.0.0.1 MASTER_PORT=$port "$train" $together \
    --dataset turned --rank-timeout 3 > out.$ranks 2> err.$ranks < /dev/null & ids[ranks]=$!
done
wait ${ids[2]} ${ids[3]}
check "a rank that is turned away says why" \
  says err.3 '^train: rank 1: .* start all with the same number of ranks$'
check "the other one names it" says err.2 '^train: rank 0 .* Turned away: rank 1 of 3 '
WORLD_SIZE=2 RANK=0 MASTER_ADDR=127.0.0.1 \
  expect 2 'the launcher has started 2: leave it out' $together --ranks 3
expect 3 'absent.txt: cannot open' --data absent.txt --ranks 3
check "a file that is absent is said once" once_said
expect 5 'lower lr' \
  --data results/text.txt --dataset wilder $model --steps 60 --lr 100 --weight-decay 1 --clip -1 --ranks 2
check "a run that diverges is said once" once_said
expect 4 'a batch of 4096 does not fit --memory-budget' \
  --data results/text.txt $model --batch-size 4096 --ranks 2 --memory-budget 8M
check "a batch that does not fit is said once" once_said
expect 2 'ranks 0: expected a whole number from 1 to 1024' --ranks 0

# ranks that are stopped, killed, or hang
ranks() { # SIGNAL WHOM ARGUMENT...: signals rank 0 (parent) or rank 1 (child) when the log has 8 KiB
  local signal=$1 whom=$2 log=results/$3_fp32.jsonl; shift 2
  rm -f "$log"
  "$train" $long --dataset "$@" --ranks 2 > out 2> err < /dev/null & id=$!
  for _ in $(seq 3000); do [ "$(cat "$log" 2> /dev/null | wc -c)" -ge 8192 ] && break; sleep 0.02; done
  child=$(grep -lE "^PPid:[[:space:]]+$id\$" /proc/[0-9]*/status 2> /dev/null | cut -d/ -f3)
  local start=$SECONDS
  [ $whom = parent ] && kill -"$signal" $id || kill -"$signal" $child
  { wait $id; code=$?; } 2> /dev/null
  check "no process is left after $signal to the $whom" gone $id $child
  took=$((SECONDS - start))
}
run $long --dataset whole --accumulate 2
for whom in parent child; do
  ranks INT $whom $whom
  check "SIGINT to the $whom ends with $code, not 130" [ $code = 130 ]
  check "SIGINT to the $whom saves" says err 'stopped after step [0-9]*: --resume continues from there'
  expect 0 . $long --dataset $whom --ranks 2 --resume
  check "SIGINT to the $whom, then --resume" \
    cmp results/${whom}_fp32_step800.safetensors results/whole_fp32_step800.safetensors
done
for signal in USR1 USR2 XCPU; do
  ranks $signal child warned$signal
  check "SIG$signal to a child alone ends with $code, not 130, and saves" \
    eval '[ $code = 130 ] && says err "stopped after step [0-9]*: --resume continues from there"'
done
ranks KILL child lost
check "the death of a rank ends with $code, not 7" [ $code = 7 ]
check "the death of a rank is named" says err '^train: rank 1 \(host .*\) ended'
expect 0 . $long --dataset lost --accumulate 2 --resume
check "the death of a rank costs no bit" \
  cmp results/lost_fp32_step800.safetensors results/whole_fp32_step800.safetensors
ranks STOP child hangs --rank-timeout 2
check "a rank that hangs ends with $code, not 7, after $took s" [ $code = 7 -a $took -lt 10 ]
check "a rank that hangs is named" \
  says err '^train: rank 1 \(host .*\) has been silent for 2 seconds'
# All are stopped for longer than the timeout, as by Ctrl-Z or a batch system, then go on.
"$train" ${long/--steps 800/--steps 1000000} --dataset slept --ranks 3 --rank-timeout 2 > out 2> err \
  < /dev/null & id=$!
log=results/slept_fp32.jsonl
for _ in $(seq 3000); do [ "$(cat $log 2> /dev/null | wc -c)" -ge 8192 ] && break; sleep 0.02; done
all=($id $(grep -lE "^PPid:[[:space:]]+$id\$" /proc/[0-9]*/status 2> /dev/null | cut -d/ -f3))
for turn in 1 2 3; do kill -STOP ${all[@]}; sleep 2.6; kill -CONT ${all[@]}; sleep 0.3; done
kill -INT $id
{ wait $id; code=$?; } 2> /dev/null
check "${#all[@]} ranks that were all stopped go on: $code, not 130: $(tail -n 1 err)" \
  [ ${#all[@]} = 3 -a $code = 130 ]

# the same by MPI, whose build has no BLAS and therefore bits of its own
by_mpi() { # RANKS ARGUMENT...: sets code
  timeout 120 mpirun --allow-run-as-root --oversubscribe -n $1 "$work/train_mpi" "${@:2}" > out 2> err \
    < /dev/null
  code=$?
}
if ! command -v mpicc > /dev/null || ! command -v mpirun > /dev/null; then
  skip "ranks by MPI: apt-get install libopenmpi-dev openmpi-bin"
elif ! mpicc -std=gnu99 -O1 -fopenmp -DMTT_MPI "$root/tools/trainer.c" -o train_mpi -lm 2> err; then
  fail "train.c does not compile with MPI: $(head -n 3 err)"
else
  for ranks in 2 3 8; do
    rm -rf by_one
    timeout 120 ./train_mpi $together --dataset alone --accumulate $ranks --results-dir by_one > out 2> err
    for shard in none optimizer gradients; do
      rm -rf mpi
      by_mpi $ranks $together --dataset alone --shard $shard --results-dir mpi
      check "$ranks ranks by MPI, shard $shard, end with $code" [ $code = 0 ]
      check "$ranks ranks by MPI, shard $shard" \
        cmp mpi/alone_fp32*_step40.safetensors by_one/alone_fp32_step40.safetensors
    done
  done
  differs="$together --dataset differs --results-dir mpi"
  by_mpi 1 $differs : -n 1 ./train_mpi $differs --lr 0.5
  check "another learning rate by MPI is named" \
    says err 'rank 1 \(host .*\) differs from rank 0 .* in lr;'
  for signal in INT KILL STOP; do
    rm -rf mpi
    mpirun --allow-run-as-root --oversubscribe -n 3 ./train_mpi $long --dataset long --results-dir mpi \
      --rank-timeout 2 > out 2> err < /dev/null & id=$!
    for _ in $(seq 3000); do
      [ "$(cat mpi/long_fp32.jsonl 2> /dev/null | wc -c)" -ge 8192 ] && break
      sleep 0.02
    done
    child=($(grep -lE "^PPid:[[:space:]]+$id\$" /proc/[0-9]*/status 2> /dev/null | cut -d/ -f3))
    start=$SECONDS
    [ $signal = INT ] && kill -INT $id || kill -$signal ${child[1]}
    { wait $id; code=$?; } 2> /dev/null
    check "mpirun ends $((SECONDS - start)) s after $signal" [ $((SECONDS - start)) -lt 30 -a $code != 0 ]
    [ $signal != STOP ] || kill -KILL ${child[1]} 2> /dev/null
    check "no process is left after $signal by MPI" gone "${child[@]}"
    case $signal in
      INT) check "SIGINT to mpirun saves" says err 'stopped after step [0-9]*: --resume continues';;
      KILL) check "mpirun names the signal" says err 'exited on signal 9';;
      STOP) check "MPI names who hangs" says err 'rank [0-2] \(host .*\) has been silent for [24] s';;
    esac
  done
  mpirun --allow-run-as-root --oversubscribe -n 3 ./train_mpi --data results/text.txt --layers 8 --heads 4 \
    --d-model 128 --batch-size 1 --seq-len 32 --steps 1 --eval-batches 1 --no-checkpoint --sample 100 \
    --rank-timeout 2 --results-dir mpi > out 2> err < /dev/null & id=$!
  for _ in $(seq 1000); do says err 'a sample of' && break; sleep 0.02; done
  child=($(grep -lE "^PPid:[[:space:]]+$id\$" /proc/[0-9]*/status 2> /dev/null | cut -d/ -f3))
  start=$SECONDS
  kill -STOP ${child[1]}
  timeout 30 tail --pid=$id -f /dev/null
  check "mpirun ends $((SECONDS - start)) s after a rank hung at its end" not kill -0 $id
  kill -KILL $id ${child[1]} 2> /dev/null
  { wait $id; } 2> /dev/null
fi

# examples/train.c: four files in an empty folder train, continue to the same bits, and refuse
mkdir four; cp "$root"/{mtt.h,mtt_kernels.cu,examples/train.c} "$(stb_header)" four/
check "four files compile" eval '(cd four && ${CC:-cc} -std=gnu99 -O1 -fopenmp train.c -o train -lm)'
small="--data text.txt --layers 1 --heads 2 --d-model 32 --seq-len 32 --batch-size 2 --vocab-size 300"
small+=" --dropout 0.1 --eval-batches 4 --technique bf16_flash_bs4"
four() { # CODE PATTERN ARGUMENT...
  local want=$1 pattern=$2; shift 2
  timeout 120 four/train "$@" > out 2> err < /dev/null; code=$?
  check "train.c $*: exit $code, expected $want and /$pattern/; it said: $(cat err out | tail -n 2)" \
    eval '[ $code = $want ] && cat out err | grep -qE -- "$pattern"'
}
four 0 'bf16_flash_bs4: [0-9.]+ MiB, .*/text.txt_bf16_flash_bs4_metrics.json' $small --steps 6 \
  --results-dir one --save-every 2 --eval-every 3 --sample 20
four 0 'perplexity' $small --steps 3 --results-dir two --eval-every 3
four 3 'is there: --resume continues it, or move it away' $small --steps 6 --results-dir two
four 0 'perplexity' $small --steps 6 --results-dir two --eval-every 3 --resume
of=text.txt_bf16_flash_bs4
check "train.c continues to the same checkpoint" cmp one/$of.safetensors two/$of.safetensors
check "train.c continues to the same log" \
  cmp <(sed 's/, "ms".*//' one/$of.jsonl) <(sed 's/, "ms".*//' two/$of.jsonl)
check "its log has step 0 and each step once" [ "$(cut -d, -f1 one/$of.jsonl | uniq | wc -l)" = 7 ]
for key in train_loss val_loss perplexity accuracy; do
  check "train.c continues to the same $key" \
    [ "$(field one/${of}_metrics.json $key)" = "$(field two/${of}_metrics.json $key)" ]
done
check "train.c writes JSON" eval 'is_json one/${of}_metrics.json && is_json one/${of}_memory.json'
four 0 '^parameters [0-9]+, arena ' --bf16 --flash-attn --gradient-checkpointing --window-size 16 --dry-run
four 0 '"arena_bytes": [0-9]+' --technique fp32_checkpointing --dry-run --json
four 0 '^[0-9]+$' --find-max-batch --memory-budget 1G
four 0 '^--batch_size +sequences in a batch' --help
four 2 'data is missing: --data my_text.txt'
four 2 'no option --lairs: --help lists all' $small --lairs 2
four 2 '--layers 0: expected a whole number from 1' --layers 0
four 2 '--lr : expected a number' --data text.txt --lr
four 2 '"fp33" in "fp33" is no technique' --technique fp33
four 2 'leave out / ' --data text.txt --dataset ../away
four 3 'absent.txt: cannot open it' --data absent.txt
four 3 'too short: lower --batch-size or --seq-len' $small --batch-size 100000 --results-dir two
four 3 'lower seq_len or give more text' $small --seq-len 1000000 --max-seq 1000000 --results-dir two
four 3 'nothing/.*cannot' $small --results-dir nothing/here
four 4 'lower --batch-size' $small --memory-budget 1K --results-dir two
four 3 'CUDA device 0 cannot be used' $small --device cuda --results-dir three

# hello.c, with fewer steps
sed 's/STEPS = [0-9]*/STEPS = 20/' "$root/examples/hello.c" > hello.c
check "hello.c compiles" ${CC:-cc} -std=gnu99 -O1 -fopenmp -iquote "$root/examples" hello.c -o hello -lm
check "hello.c trains" eval 'timeout 120 ./hello text.txt > sample.out 2> hello.out'
check "hello.c begins with the plan" eval 'head -n 1 hello.out | grep "^parameters"'
check "hello.c prints the loss" says hello.out '^step 20/20, loss [0-9.]*$'
check "hello.c ends with a sample" [ -s sample.out ]
sed -i 's/STEPS = [0-9]*/STEPS = 1000000/' hello.c
${CC:-cc} -std=gnu99 -O1 -fopenmp -DMTT_IMPLEMENTATION_DONE -iquote "$root/examples" hello.c \
  "${train%/*}/mtt.o" -o hello -lm
./hello text.txt > err 2> slow.out & id=$!
for _ in $(seq 3000); do says slow.out '^step 20/' && break; sleep 0.02; done
last=$(sed -n 's/^step \([0-9]*\)\/.*/\1/p' slow.out | tail -n 1)
{ kill -KILL $id; wait $id; } 2> /dev/null
check "a file gets each line of hello.c, not step ${last:-none} first" [ "${last:-9999}" -lt 1000 ]
check "hello.c without a text says how to call it" eval './hello 2>&1 | grep "usage: hello TEXT_FILE"'
check "hello.c names a missing text" eval './hello absent.txt 2>&1 | grep "hello: absent.txt: cannot open"'

closing_line
