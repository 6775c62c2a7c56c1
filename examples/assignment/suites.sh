# suites.sh - the experiments of suites A to E, which five teams trained in PyTorch, and our best settings;
# and those of the demo. Read by experiments.sh, whose variables it uses.
export LC_ALL=C # decimals have a point

# For each suite: the kind of tokenizer that is trained on a text (bpe unless named), the original vocabulary,
# the vocabulary of a trained tokenizer, the original GPU's memory in bytes, and a budget for a CPU.
declare -A kind=([d]=wordpiece)
declare -A vocabulary=([a]=50257 [b]=10000 [c]=50257 [d]=30000 [e]=50257 [demo]=2000)
declare -A own_ids=([a]=10000 [b]=10000 [c]=10000 [d]=30000 [e]=50000 [demo]=2000)
declare -A memory=([a]=32000000000 [b]=32000000000 [c]=25260000000 [d]=40000000000 [e]=40000000000
  [demo]=4000000000)
declare -A small_memory=([a]=256M [b]=256M [c]=64M [d]=64M [e]=64M [demo]=64M)

shape() { # OPTION...
  model=("$@")
  [ -z "$small" ] || model+=(--layers 2 --heads 4 --d-model 128 --d-ff 512 --seq-len 128)
}
all() { # GROUP BATCH TECHNIQUE...
  local group=$1 batch=$2 technique; shift 2
  for technique in "$@"; do row $group $technique $batch; done
}
largest() { # TECHNIQUE...: each at its own largest batch; one sequence more is refused
  local technique
  for technique in "$@"; do row largest $technique largest; row refused $technique more; done
}
forced() { # TECHNIQUE: without a budget, a batch that the device cannot hold: the device must refuse it
  local most
  [ -n "$device_mib" ] || return 0
  most=$(cap=$((device_mib << 20)) max_batch $1)
  row forced $1 $((most + 1)) forced
}

# ---- the suites ----

suite_a() {
  shape --layers 4 --heads 8 --d-model 256 --d-ff 1024 --seq-len 256
  local b windows="bf16_window16 bf16_window32"
  # Without warmup the loss jumps, and rounding decides how far.
  recipe=(--lr 1e-3 --warmup-steps 50 --save-every 500) length=
  if [ $suite = b ]; then
    shape --layers 6 --heads 8 --d-model 512 --d-ff 2048 --seq-len 512
    windows="bf16_window64 bf16_window128"
    # Two roundings of one run end up to 5 % apart in perplexity at 1e-3 after 50 steps, 2 % at 3e-4.
    recipe+=(--lr 1e-4 --warmup-steps 100)
  fi
  [ -z "$small" ] || recipe+=(--warmup-steps 10) # the later option counts
  for b in ${batches:-$(pick "32 64 128" "4 8 16")}; do
    all batch $b $base bf16 bf16_flash $windows ${base}_checkpointing $ours budget
  done
  [ -z "$small" ] || return 0
  short=1 enforce=1
  largest $base bf16_flash fp8_flash bf16_flash_checkpointing_chunked
  forced $base
}
suite_b() { suite_a; }
suite_c() {
  local b theirs="$base bf16 bf16_flash bf16_window64 bf16_checkpointing"
  shape --layers 4 --heads 8 --d-model 256 --d-ff 1024 --seq-len 256 \
    --positions learned --dropout 0.1 --max-seq 512
  recipe=(--lr 3e-4 --warmup-steps 200 --clip 1 --save-every 100) length=$(pick 200 20)
  for b in ${batches:-$(pick 64 4)}; do all batch $b $theirs $ours budget; done
  largest $theirs
  forced $base
  short=1
  largest $ours bf16_flash_checkpointing_chunked
}
suite_d() {
  local b theirs="$base bf16 bf16_flash bf16_window128 bf16_window256"
  theirs+=" ${base}_checkpointing bf16_flash_checkpointing"
  theirs+=" bf16_checkpointing bf16_window128_checkpointing" # combinations that the team left out
  shape --layers 12 --heads 12 --d-model 768 --d-ff 3072 --seq-len 1024 --dropout 0.1
  # At 5e-4 two roundings of one run end 3 % apart in perplexity.
  recipe=(--lr 1e-4 --warmup-steps 100 --weight-decay -1 --clip 1 --save-every 100) length=$(pick 200 20)
  for b in ${batches:-$(max_batch $base)}; do all batch $b $theirs $ours budget; done
  largest $theirs
  forced $base
  short=1
  largest $ours bf16_flash_checkpointing_chunked
}
suite_e() {
  local t n few=$(pick 8 2)
  shape --layers 12 --heads 12 --d-model 768 --d-ff 3072 --seq-len 512
  recipe=(--lr 5e-4 --warmup-steps 100) length=$(pick 8000 40) ours="${ours//bf16/fp16}"
  for t in $base fp16 fp8; do row quality $t $few '' --save-every 1000; done
  short=1
  for t in $base fp16 fp8 ${ours%% *}; do
    for n in $(pick "128 256 512 1024" "32 64 128 256"); do row length $t $few len$n --seq-len $n; done
    for n in ${batches:-$(pick "1 2 4 8 16 32" "1 2 4 8")}; do row batch $t $n sweep; done
    for n in $(pick "2 4 8 12 16" "1 2 3 4"); do row depth $t $few depth$n --layers $n; done
  done
  for t in $base ${base}_checkpointing ${base}_flash fp16 fp16_checkpointing fp16_flash $ours budget; do
    row optimizations $t $(pick 16 4) long --seq-len $(pick 1024 256)
  done
  enforce=1
  largest $base fp16_flash fp8_flash fp16_flash_checkpointing_chunked
  forced $base
}

# Sets share, the percentage of the demo's steps that two minutes allow: by the time of a few steps, which is
# kept in the folder, so that the same command continues. Of the baseline's steps, all of the demo's take as
# long as 1,040 and the rounds as 180; to build, start, evaluate and plot as 180 more.
pace() {
  local ms=$dir/pace/pace_${base}_metrics.json
  [ -z "$dry$steps" ] || return 0
  [ -s "$ms" ] || "$trainer" --data "$prefix" --dataset pace --results-dir "$dir/pace" --technique $base \
    $(full $base) "${model[@]}" --device $device --batch-size ${batches%% *} --steps 8 --eval-batches 1 \
    --no-checkpoint "${extra[@]}" > /dev/null 2>&1
  ms=$(field ms_per_step "$ms" 2> /dev/null) ms=${ms%.*}
  [[ $ms =~ ^[1-9][0-9]*$ ]] || return 0 # the first experiment says what is wrong
  share=$(((120000 / ms - 360) * 10 / 104))
  share=$((share > 100 ? 100 : share < 10 ? 10 : share))
}

# Each technique learns for some seconds, and the smallest one then for longer, to write a sample. Last, all
# take turns in three rounds of a few steps, which show how much times differ by chance. The report explains a
# technique's last word, which is the new one, but fp8 wherever it is. On a CPU the runs are as long as two
# minutes allow.
suite_demo() {
  local b round share=100 least=bf16_flash_chunked_segments_compact
  local techniques="$base ${base}_checkpointing bf16 bf16_flash bf16_window32 bf16_flash_chunked fp8_flash"
  techniques+=" budget ${least%_*} $least" batches=${batches:-$(pick 64 16)}
  shape --layers 4 --heads 8 --d-model 256 --d-ff 1024 --seq-len 256
  # After a warmup of 5 steps, two roundings of one run end up to 6 % apart in perplexity, after 20 about 1 %.
  recipe=(--lr $(pick 1e-3 3e-3) --lr-schedule cosine --warmup-steps 20 --no-checkpoint)
  [ -z "$small" ] || pace
  length=$(pick 100 $((share > 50 ? 40 * share / 100 : 20)))
  [ "${steps:-$length}" -gt 20 ] || recipe+=(--warmup-steps 0)
  for b in $batches; do all batch $b $techniques; done
  length=$(pick 300 $((80 * share / 100 * 5)))
  row learning $least $b learning --eval-every $((length / 5)) --sample 200
  length=$((share > 50 ? 5 : 3)) short=1 recipe+=(--warmup-steps 0)
  for round in 1 2 3; do
    for b in $batches; do all round$round $b $techniques; done
  done
}

# ---- their rows ----

full() { # TECHNIQUE: on a GPU, the option without which the loss is chunked even where no word says so
  [[ $device$1 =~ cpu|chunked|fp8 ]] || echo --loss full
}
ask() { # TECHNIQUE OPTION...: asks the trainer's planner
  "$trainer" "${model[@]}" --device $device --vocab-size $vocab $(full $1) --technique "$@" "${extra[@]}" \
    2> /dev/null
}
max_batch() { ask "$@" --find-max-batch --memory-budget $cap || echo 0; }
planned() { # TECHNIQUE OPTION...: bytes, 0 if there is no plan
  local bytes
  bytes=$(ask "$@" --dry-run --json | field arena_bytes /dev/stdin)
  echo ${bytes:-0}
}
row() { # GROUP TECHNIQUE BATCH [VARIANT [OPTION...]]: adds an experiment; BATCH: N, `largest`, `more` by one
  local group=$1 technique=${2//bf16/$half} batch=$3 variant=${4:-} count=${steps:-$length} most run label
  label=$technique
  shift $(($# < 4 ? $# : 4))
  case $batch in largest | more) variant=$batch;; esac
  case $group in round*) variant=$group;; esac
  if [ $technique = budget ]; then # the fastest choice within half of what recomputing whole layers can save
    technique=${ours%% *} label=${technique}_budget variant+=${variant:+_}budget
    run="$technique $* --batch-size $batch"
    most=$((($(planned $run) + $(planned $run --recompute layer)) / 2))
    set -- "$@" --recompute budget --memory-budget $most
  elif [ -n "$enforce" ] && [ $group != forced ]; then
    set -- "$@" --memory-budget $cap
  fi
  most=${limits[$technique $*]:=$(max_batch $technique "$@")} # asked once for all batches
  case $batch in
    largest) batch=$((most > 0 ? most : 1));;
    more) batch=$((most + 1));;
    0) batch=1;; # not even one fits: it is refused
  esac
  if [ -n "$small" ]; then
    set -- "$@" --eval-batches $((16384 / batch / 128 + 1))
    [ -n "$count" ] || count=$((40960 / batch / 128)) # the same number of tokens for each batch
  fi
  if [ -n "$short" ]; then
    count=$((${count:-20} < 20 ? ${count:-20} : 20))
    [ $group = largest ] || set -- "$@" --eval-batches 1 --no-checkpoint
  fi
  [ $group != refused ] || set -- "$@" --dry-run --vocab-size $vocab
  variant=$dataset${variant:+_$variant} technique=${technique}_bs$batch
  rows+=("$group $label $batch $most ${variant}_$technique")
  work+=($(((count > 0 ? count : 1000) * batch))) # without a number of steps it is an epoch: many
  args+=("$(printf '%q ' --data "$prefix" --dataset "$variant" --results-dir "$dir" --technique $technique \
    $(full $technique) "${recipe[@]}" "${model[@]}" --device $device "$@" ${count:+--steps $count} \
    "${extra[@]}")")
}
