#!/usr/bin/env bash
# experiments.sh - trains the experiments of a suite (suites.sh) and compares them. The same command
# continues where it stopped.
usage() {
  cat << 'TEXT'
experiments.sh SUITE... [options] [-- options of train]      suites: a b c d e, all of these, demo
  --data [SUITE=]PATH     text, JSONL or the prefix of prepared token files; with SUITE= for one suite
  --tokenizer FILE        vocab.bpe, vocab.txt or tokenizer.json for a text; suite b, and all suites without
                          it, train one on the text: WordPiece in suite d, BPE in the others
  --trainer PATH          the trainer (build/train; build/tiny is examples/train.c)
  --device cpu|cuda       device (cpu)
  --results-dir DIR       everything goes to DIR/SUITE, of the demo to DIR/DEVICE (results)
  --baseline fp32|tf32    precision of the baseline (tf32 on cuda in a, b, c and demo, as in PyTorch;
                          else fp32)
  --only NAME,..          only these: techniques (bf16_flash), with batch (bf16_flash_bs32), groups (length)
                          or patterns (*_bs32). A T4 has fp16 in place of bf16, and its baseline is fp32
  --skip NAME,..          all but these
  --batch-size N,..       batches instead of the suite's
  --memory-budget SIZE    refuse what needs more: simulates a smaller GPU (24G; c: 25.26 GB, d: 40 GB)
  --steps N               optimizer steps (a, b: one epoch; c, d: 200; e: 8000; sweeps: at most 20)
  --keep-checkpoints      keep them in DIR/SUITE/checkpoints; default: remove them when metrics are written
  --small                 a model, batches and a vocabulary for a CPU: logits are then a smaller part of
                          memory. -- --seq-len 512 shows what attention takes
  --dry-run               print experiments, planned memory and commands, and stop
TEXT
}
set -u -o pipefail
export LC_ALL=C # decimals have a point
[ "${BASH_VERSINFO[0]}" -ge 4 ] || { echo "experiments: needs bash 4: brew install bash" >&2; exit 2; }
shopt -s extglob nullglob
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive} # threads that spin slow each other down on a busy machine
root=$(cd "$(dirname "$0")/../.." && pwd) here=$(cd "$(dirname "$0")" && pwd)
fail() { local said="experiments: $*"; echo "${said//[[:cntrl:]]/?}" >&2; exit 2; }

# ---- options ----

declare -A data old limits
suites=() extra=() trainer=$root/build/train device=cpu results=results baseline= only= skip= keep= batches=
budget= steps= small= dry= tokenizer=
while [ $# -gt 0 ]; do
  case $1 in
    a | b | c | d | e | demo) suites+=("$1");;
    all) suites+=(a b c d e);;
    --small) small=1;;
    --keep-checkpoints) keep=1;;
    --dry-run) dry=1;;
    --help | -h) usage; exit 0;;
    --) shift; extra=("$@"); break;;
    --data | --tokenizer | --trainer | --device | --results-dir | --baseline | --only | --skip | \
      --batch-size | --memory-budget | --steps)
      [ $# -gt 1 ] || fail "$1 needs a value (--help lists all)"
      case $1=$2 in
        --data=[a-e]=*) data[${2%%=*}]=${2#*=};;
        --data=*) data[all]=$2;;
        --results-dir=*) results=$2;;
        --batch-size=*) batches=${2//,/ };;
        --memory-budget=*) budget=$2;;
        *) printf -v "${1#--}" %s "$2";;
      esac
      shift;;
    *) fail "there is no suite or option ${1:0:100} (--help lists all)";;
  esac
  shift
done
[ ${#suites[@]} -gt 0 ] || { usage; exit 2; }
case $device in cpu | cuda) ;; *) fail "--device $device: expected cpu or cuda";; esac
half=bf16
if [ $device = cuda ] && [ "$("$root/tools/arch.sh" half)" = fp16 ]; then half=fp16; fi
case $baseline in '' | fp32 | tf32) ;; *) fail "--baseline $baseline: expected fp32 or tf32";; esac
[[ $budget =~ ^[0-9.]*[KMG]?$ ]] || fail "--memory-budget $budget: expected bytes, as in 24G"
[[ $steps$batches =~ ^[0-9\ ]*$ ]] || fail "--steps $steps, --batch-size $batches: expected numbers"
[[ $results != -* ]] || results=./$results
[ -x "$trainer" ] || trainer=$(command -v "$trainer") ||
  fail "there is no trainer: make train, or --trainer PATH"

pick() { if [ -n "$small" ]; then echo "$2"; else echo "$1"; fi; }             # LARGE SMALL
field() { sed -n "s/.*\"$1\": \"*\([A-Za-z0-9_.+-]*\).*/\1/p" "$2" | head -n 1; } # KEY FILE: a name or number
plain() { # PATH: as a name, of A-Za-z0-9_.-, that begins with neither - nor .
  local name=${1##*/}
  name=${name//[^A-Za-z0-9_.-]/_}
  echo "${name/#[-.]/_}"
}
text() { # fit for a JSON string
  local t=${1//[[:cntrl:]]/ }
  [[ $t != *[^\ -~]* ]] || t=$(iconv -cf utf-8 -t utf-8 <<< "$t") # a message may be cut within a letter
  t=${t//\\/\\\\}
  printf %s "${t//\"/\\\"}"
}
need() { # PROGRAM: builds it
  [ -x "$root/build/$1" ] || make -s -C "$root" "build/$1" > /dev/null || fail "cannot build build/$1"
}

. "$here/suites.sh"

# ---- data ----

prepare() { # PATH: sets dataset, prefix, vocab and origin; makes token files of a text
  local ids=${own_ids[$suite]} kind=${kind[$suite]:-bpe} share
  dataset=$(plain "${1:-text}") prefix=$1 vocab=${vocabulary[$suite]} origin=
  if [ -n "$1" ] && [ ! -s "$1.train.tokens" ]; then
    [ -f "$1" ] || fail "there is neither a text $1 nor $1.train.tokens"
    if [ -n "$small" ]; then # fewer ids for a short text
      share=$(($(wc -c < "$1") / 500))
      ids=$((share > ids ? ids : share < 512 ? 512 : share))
    fi
    [ $suite = b ] || kind=${tokenizer:-$kind}
    dataset=${dataset%.*}
    prefix=$results/data/${dataset}_$(plain "$kind")
    case $kind in bpe | wordpiece) prefix+=_$ids vocab=$ids;; esac # a short text gives fewer ids
    [ -n "$dry" ] || tokenize "$1" "$kind" $ids
  fi
  [ -s "$prefix.train.tokens" ] || return 0
  vocab=$(od -An -tu8 -j24 -N8 "$prefix.train.tokens" | tr -d ' ')
  origin=$(od -An -tx8 -N64 "$prefix.train.tokens" | tr -d ' \n') # hashes of text and options
}
tokenize() { # TEXT TOKENIZER IDS: does nothing if the files are there and made of the same
  need prepare
  mkdir -p "$results/data"
  "$root/build/prepare" --input "$1" --output "$prefix" --tokenizer "$2" --vocab-size $3 > "$dir/err" 2>&1 ||
    fail "$(tail -n 1 "$dir/err")"
}

# ---- experiments: rows and args are of suites.sh; lines go to experiment_summary.json ----

named() { # LIST GROUP LABEL BATCH MOST NAME: 0 = a pattern of the list names this row
  local - pattern name
  set -f
  for pattern in ${1//,/ }; do
    for name in $2 $3 ${3}_bs$4 $6; do [[ $name != $pattern ]] || return 0; done
  done
  return 1
}
wanted() {
  if [ -n "$only" ]; then named "$only" "$@" || return 1; fi
  ! named "$skip" "$@"
}
settings() { printf '"command": "%s", "data": "%s"}' "$(text "${args[$1]}")" "$origin"; } # INDEX
entry() { # INDEX STATUS EXIT MESSAGE: the row's line in the summary
  local group label batch most name line
  read -r group label batch most name <<< "${rows[$1]}"
  printf -v line '{"name": "%s", "group": "%s", "technique": "%s", "batch_size": %d, "largest_batch": %d' \
    "$name" $group $label $batch $most
  printf -v line '%s, "status": "%s", "exit": %d, "message": "%s"' "$line" "$2" "$3" "$(text "$4")"
  lines[$1]="$line, $(settings $1)"
}
summary() {
  {
    printf '{"suite": "%s", "dataset": "%s", "device": "%s", ' "$suite${small:+, small}" "$dataset" $device
    printf '"baseline": "%s", "budget": "%s", "vocabulary": %d, ' $base $cap "$vocab"
    printf '"original_vocabulary": %d, "experiments": [\n' ${vocabulary[$suite]}
    printf '%s\n' "${lines[@]}" "${others[@]}" | sed '$!s/$/,/'
    echo ']}'
  } > "$dir/summary.tmp" && mv "$dir/summary.tmp" "$dir/experiment_summary.json"
}
read_summary() { # sets old: lines by name; and others: those of runs that this command does not have
  local line known row
  local -A mine=()
  for row in "${rows[@]}"; do mine[${row##* }]=1; done
  [ -s "$dir/experiment_summary.json" ] || return 0
  while IFS= read -r line; do
    [[ $line == '{"name": "'* ]] || continue
    known=${line#*: \"}
    known=${known%%\"*}
    old[$known]=${line%,}
    [ -n "${mine[$known]:-}" ] || [ ! -s "$dir/${known}_metrics.json" ] || others+=("${line%,}")
  done < "$dir/experiment_summary.json"
}
outcome() { # NAME: prints done or diverged if its metrics are there
  local metrics=$dir/${1}_metrics.json
  [ -s "$metrics" ] && [ "$(tail -c 2 "$metrics")" = "}" ] || return
  case $(field perplexity "$metrics") in null) echo diverged;; *) echo done;; esac
}
set_aside() { # NAME: moves the files of a run with other settings to NAME.old, NAME.old2, ...
  local away=$dir/$1.old files k
  files=("$dir/$1"@(_metrics.json|_memory.json|_tokenizer.json|_settings.json|_sample.txt|.jsonl|.csv)
    "$dir/$1"@(_tensorboard|_adapter)
    "$dir/$1"?(_best|_merged|_step+([0-9])).safetensors)
  [ ${#files[@]} -gt 0 ] || return 0
  for ((k = 2; ; k++)); do [ -e "$away" ] || break; away=$dir/$1.old$k; done
  mkdir "$away" && mv "${files[@]}" "$away" || fail "cannot move the files of $1 to $away"
  echo "$1: its settings have changed; older files are in $away" >&2
}
show_plan() { # INDEX
  local index=$1 bytes
  eval "set -- ${args[index]}"
  bytes=$("$trainer" "$@" --dry-run --json --vocab-size $vocab 2> /dev/null | field arena_bytes /dev/stdin)
  if [ -z "$bytes" ]; then bytes="refused by the plan"
  else bytes=$(awk "BEGIN { printf \"%.0f MiB planned\", $bytes / 1048576 }"); fi
  printf '%s: %s: %s %s\n' "${rows[index]##* }" "$bytes" "$trainer" "${args[index]}"
}
choose() { # fills queue with the experiments to run; prints them under --dry-run
  local i group label batch most name known status chosen=0
  for i in "${!rows[@]}"; do
    read -r group label batch most name <<< "${rows[i]}"
    known=${old[$name]:-}
    if ! wanted ${rows[i]}; then
      entry $i skipped 0 ""
      case $dry$known in
        *'"data": "'"$origin"'"}') lines[i]=$known;;
        '{'*) set_aside "$name";; # another text must not come into the tables
      esac
      continue
    fi
    entry $i waiting 0 ""
    chosen=$((chosen + 1))
    if [ -n "$dry" ]; then
      show_plan $i
    else
      [ -z "$known" ] || [[ $known == *"$(settings $i)" ]] || set_aside "$name"
      status=$(outcome "$name")
      case $status in
        done) entry $i done 0 ""; continue;;
        diverged) entry $i diverged 5 ""; failures=$((failures + 1)); continue;;
      esac
    fi
    queue+=($i)
  done
  [ $chosen -gt 0 ] || echo "suite $suite: --only and --skip leave no experiment to run" >&2
}
run_train() { # ARGUMENT...: sets code
  "$trainer" "$@" > "$dir/out" 2> "$dir/err" & child=$!
  while :; do
    wait $child; code=$?
    [ $code -gt 128 ] && kill -0 $child 2> /dev/null || break # a trap interrupts wait: the child goes on
  done
  child=
}
experiment() { # NAME ARGUMENT...: trains, or continues from a checkpoint; sets code and message
  local name=$1 begun=("$dir/$1"?(_step+([0-9])).safetensors); shift
  [ ${#begun[@]} = 0 ] || set -- "$@" --resume
  run_train "$@"
  message=$(grep '^train: ' "$dir/err" | tail -n 1 | cut -c8-)
  [ -n "$message" ] || message=$(tail -n 1 "$dir/err")
  [ $code != 3 ] || [ ${#begun[@]} = 0 ] || message+="; to start over, move the checkpoints of $name away"
  [ $code -le 128 ] || message="ended by signal $((code - 128))"
  [ $code != 0 ] || message=
}
finish() { # INDEX: records how the experiment ended; sets ending or trouble, for its line of progress
  local group label batch most name files found status=
  read -r group label batch most name <<< "${rows[$1]}"
  files=$dir/$name
  case $code in 0) status=$(outcome "$name");; 5) status=diverged;; esac
  if [ "$status" = done ]; then
    entry $1 done 0 ""
    found=("$files"@(?(_best|_step+([0-9])).safetensors|_tokenizer.json|_settings.json))
    if [ -z "$keep" ]; then rm -f "${found[@]}"
    elif [ ${#found[@]} -gt 0 ]; then
      mkdir -p "$dir/checkpoints" && mv --backup=numbered "${found[@]}" "$dir/checkpoints"
    fi
    [[ ${args[$1]} != *' --sample '* ]] || # after the metrics
      { sed 1d "$dir/out" > "$dir/sample.tmp" && mv -f "$dir/sample.tmp" "${files}_sample.txt"; }
    ending=$(awk "BEGIN { printf \"perplexity %s, %.0f MiB; \", $(field perplexity "${files}_metrics.json"),
      $(field arena_bytes "${files}_metrics.json") / 1048576 }")
    [[ $group != round* ]] || ending=
  elif [ "$status" = diverged ]; then
    entry $1 diverged $code "$message"
    failures=$((failures + 1)) trouble="DIVERGED: $message; "
  elif [[ $message == *' needs compute capability '* ]] ||
    { [ $code = 4 ] && [ -n "$enforce" ] && [ $batch -gt $most ]; }; then
    entry $1 refused $code "$message"
    ending="refused: $message; "
  else
    entry $1 failed $code "${message:-there are no metrics}"
    failures=$((failures + 1)) trouble="FAILED ($code): $message; "
  fi
}
duration() { # SECONDS: in words
  [ $1 -lt 60 ] || printf '%d min ' $(($1 / 60))
  echo "$(($1 % 60)) s"
}
title() { # INDEX: of its line of progress; the runs of a round have one line
  local group label batch most name
  read -r group label batch most name <<< "${rows[$1]}"
  case $group in
    round*) echo "times, round ${group#round}";;
    learning) echo "$label, longer";;
    batch) echo "${label}_bs$batch";;
    *) echo "${name#"$dataset"_}";;
  esac
}
run_one() { # INDEX: ends the program if it is stopped
  [ -z "$stopped" ] || exit 130
  entry $1 running 0 ""
  summary
  eval "experiment '${rows[$1]##* }' ${args[$1]}"
  if [ -n "$stopped" ] || [ $code = 130 ]; then
    echo "stopped; the same command continues from here" >&2
    entry $1 stopped $code ""
    summary
    exit 130
  fi
  finish $1
  summary
}
run_queue() {
  local i k now last= titles=() parts=() start=$SECONDS begun all=0 ran=0 left ending trouble
  for i in "${queue[@]}"; do
    now=$(title $i) all=$((all + work[i]))
    if [ "$now" = "$last" ]; then parts[-1]+=" $i"; else titles+=("$now") parts+=($i); fi
    last=$now
  done
  for k in "${!parts[@]}"; do
    printf '[%2d/%d] %s: ' $((k + 1)) ${#parts[@]} "${titles[k]}" >&2
    begun=$SECONDS ending= trouble=
    for i in ${parts[k]}; do
      run_one $i
      ran=$((ran + work[i]))
    done
    left=$(((SECONDS - start) * (all - ran) / ran))
    printf '%s%s, about %s left\n' "${trouble:-$ending}" "$(duration $((SECONDS - begun)))" \
      "$(duration $left)" >&2
    [ $k != 0 ] || [ $suite$small != demo1 ] || [ $((SECONDS - start + left)) -le 120 ] ||
      echo "these cores are busy or slower: about $(duration $((SECONDS - start + left))), not 2 min" >&2
  done
}

# ---- suites ----

limit() { # sets cap, the bytes that largest batches may take, and device_mib
  cap=${budget:-$(pick ${memory[$suite]} ${small_memory[$suite]})}
  device_mib=
  [ $device = cuda ] || return 0
  device_mib=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2> /dev/null | head -n 1)
  [ -n "$device_mib" ] && [ -z "$budget" ] || return 0
  cap=$((cap < device_mib * 1000000 ? cap : device_mib * 1000000)) # a MiB as 10^6: the rest is the driver's
}
lock() { # waits for another process that runs the suite in this folder
  mkdir -p "$dir" && exec 9>> "$dir/.lock" || fail "cannot write to $dir"
  command -v flock > /dev/null || return 0 # macOS has none
  flock -n 9 2> /dev/null
  case $? in
    0) ;;
    1) echo "suite $suite: waiting for the process that runs it in $dir" >&2; flock 9;;
    *) echo "suite $suite: this disk has no locks: do not start it twice" >&2;;
  esac
}

stopped= child= failures=0
trap 'stopped=1; [ -z "$child" ] || kill -TERM $child 2> /dev/null' INT TERM HUP USR1 USR2 XCPU
for suite in "${suites[@]}"; do
  dir=$results/${suite/demo/$device} enforce=$budget short=
  ours="${half}_flash_chunked ${half}_flash_selective_chunked fp8_flash"
  rows=() args=() work=() lines=() old=() others=() limits=() queue=()
  case $suite in c | d) enforce=1;; esac
  limit
  base=fp32
  case $half$device$suite in bf16cudaa | bf16cudab | bf16cudac | bf16cudademo) base=tf32;; esac
  base=${baseline:-$base}
  path=${data[$suite]:-${data[all]:-}}
  [ -n "$path$dry" ] || fail "suite $suite needs --data: a text, JSONL or a prefix of token files"
  [ -n "$dry" ] || { need report; lock; }
  prepare "$path"
  suite_$suite
  read_summary
  choose
  echo "suite $suite: ${#rows[@]} experiments, ${#queue[@]} to run;" \
    "$dataset, $vocab ids, $device, baseline $base" >&2
  [ -z "$dry" ] || continue
  run_queue
  summary
  rm -f "$dir/out" "$dir/err"
  brief=
  [ $suite != demo ] || brief=--brief
  "$root/build/report" --results-dir "$dir" $brief || { failures=$((failures + 1)); continue; }
  "$here/plots.sh" "$dir" || [ $? = 3 ] || failures=$((failures + 1)) # 3: there is no gnuplot
done
[ $failures = 0 ] || echo "experiments: $failures failed or diverged: see experiment_summary.json" >&2
[ $failures = 0 ]
