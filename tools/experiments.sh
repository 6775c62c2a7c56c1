#!/usr/bin/env bash
# experiments.sh - trains the experiments of the write-ups A to E, and compares them. The same command goes on where it stopped.
usage() {
  cat << 'TEXT'
experiments.sh SUITE... [options] [-- options of train]      suites: a b c d e all
  --data [SUITE=]PATH     text, JSONL or the prefix of prepared token files; again with SUITE= for one suite alone
  --tokenizer FILE        vocab.bpe, vocab.txt or tokenizer.json for a text (suite b and without it: trained on the text, BPE,
                          in suite d WordPiece)
  --train PATH            the trainer (build/train)
  --device cpu|cuda       who computes (cpu)
  --results-dir DIR       everything goes to DIR/SUITE (results)
  --baseline fp32|tf32    precision of the baseline (on cuda tf32 in a, b and c, as PyTorch had it there, and else fp32)
  --only NAME,..          these alone: techniques (bf16_flash), with batch (bf16_flash_bs32), groups (length) or patterns (*_bs32)
  --skip NAME,..          all but these
  --batch-size N,..       batches in the place of the write-up's
  --memory-budget SIZE    refuse what takes more: a large GPU answers for a small one (24G; c: 25.26 GB, d: 40 GB)
  --steps N               optimizer steps of each experiment (a, b: one epoch; c, d: 200; e: 8000; sweeps at most 20)
  --keep-checkpoints      in DIR/SUITE/checkpoints; else a checkpoint goes when its experiment is complete
  --small                 a model and batches for a CPU
  --dry-run               print experiments, planned memory and commands, and stop
TEXT
}
set -u -o pipefail
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive} # threads that spin lose much on a machine with other work
root=$(cd "$(dirname "$0")/.." && pwd)
fail() { echo "experiments: $*" >&2; exit 2; }
declare -A data old limits
suites=() extra=() train=$root/build/train device=cpu results=results baseline= only= skip= keep= batches= budget= steps= small= dry= tokenizer=
while [ $# -gt 0 ]; do
  case $1 in
    a | b | c | d | e) suites+=("$1");;
    all) suites+=(a b c d e);;
    --small) small=1;;
    --keep-checkpoints) keep=1;;
    --dry-run) dry=1;;
    --help | -h) usage; exit 0;;
    --) shift; extra=("$@"); break;;
    --data | --tokenizer | --train | --device | --results-dir | --baseline | --only | --skip | --batch-size | --memory-budget | --steps)
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
    *) fail "there is no suite or option $1 (--help lists all)";;
  esac
  shift
done
[ ${#suites[@]} -gt 0 ] || { usage; exit 2; }
case $device in cpu | cuda) ;; *) fail "--device $device: expected cpu or cuda";; esac
case $baseline in '' | fp32 | tf32) ;; *) fail "--baseline $baseline: expected fp32 or tf32";; esac
[[ $budget =~ ^[0-9.]*[KMG]?$ ]] || fail "--memory-budget $budget: expected bytes, as in 24G"
[[ $steps$batches =~ ^[0-9\ ]*$ ]] || fail "--steps $steps, --batch-size $batches: expected numbers"
[ -x "$train" ] || train=$(command -v "$train") || fail "there is no trainer: make train, or --train PATH"
pick() { if [ -n "$small" ]; then echo "$2"; else echo "$1"; fi; }
field() { sed -n "s/.*\"$1\": \"*\([^,\"}]*\).*/\1/p" "$2" | head -n 1; }
text() { # fit for a JSON string
  local t=${1//[[:cntrl:]]/ }
  t=${t//\\/\\\\}
  printf %s "${t//\"/\\\"}"
}

. "$root/tools/suites.sh"

named() { # LIST GROUP LABEL BATCH MOST NAME: whether a pattern of the list names this row
  local - pattern name
  set -f
  for pattern in ${1//,/ }; do
    for name in $2 $3 ${3}_bs$4 $6; do [[ $name != $pattern ]] || return 0; done
  done
  return 1
}
wanted() { { [ -z "$only" ] || named "$only" "$@"; } && ! named "$skip" "$@"; }
prepare() { # PATH: sets dataset, prefix and vocab; makes token files of a text
  local ids=${own_ids[$suite]} kind=${kind[$suite]:-bpe} made from
  dataset=$(basename "${1:-text}" | tr -c 'A-Za-z0-9.\n-' _) prefix=$1 vocab=${vocabulary[$suite]}
  if [ -n "$1" ] && [ ! -s "$1.train.tokens" ]; then
    [ -f "$1" ] || fail "there is neither a text $1 nor $1.train.tokens"
    [ -z "$small" ] || ids=$(($(wc -c < "$1") / 500 > ids ? ids : $(wc -c < "$1") / 500 < 512 ? 512 : $(wc -c < "$1") / 500))
    [ $suite = b ] || kind=${tokenizer:-$kind}
    dataset=${dataset%.*} made=$(basename "$kind" | tr -c 'A-Za-z0-9\n-' _)
    case $kind in bpe | wordpiece) made+=_$ids vocab=$ids;; esac # as many as are asked for, until the token files tell
    from=("$1"); [ ! -f "$kind" ] || from+=("$kind")
    prefix=$results/data/${dataset}_${made}_$(cat "${from[@]}" | cksum | cut -d' ' -f1) # another text of this name: other files, other commands
    if [ -z "$dry" ] && ! { [ -s "$prefix.train.tokens" ] && [ -s "$prefix.valid.tokens" ] && [ -s "$prefix.tokenizer.json" ]; }; then
      mkdir -p "$results/data"
      [ -x "$root/build/prepare" ] || make -s -C "$root" build/prepare || fail "cannot build build/prepare"
      "$root/build/prepare" --input "$1" --output "$prefix" --tokenizer "$kind" --vocab-size $ids > "$dir/err" 2>&1 || fail "$(tail -n 1 "$dir/err")"
    fi
  fi
  [ ! -s "$prefix.train.tokens" ] || vocab=$(od -An -tu8 -j24 -N8 "$prefix.train.tokens" | tr -d ' ')
}
entry() { # INDEX STATUS EXIT MESSAGE: the row's line in experiment_summary.json
  local group label batch most name
  read -r group label batch most name <<< "${rows[$1]}"
  printf -v "lines[$1]" '{"name": "%s", "group": "%s", "technique": "%s", "batch_size": %d, "largest_batch": %d, "status": "%s", "exit": %d, "message": "%s", "command": "%s"}' \
    "$name" $group $label $batch $most "$2" "$3" "$(text "$4")" "$(text "${args[$1]}")"
}
summary() {
  {
    printf '{"suite": "%s", "dataset": "%s", "device": "%s", "baseline": "%s", "budget": "%s", "experiments": [\n' "$suite${small:+, small}" "$dataset" $device $base $cap
    printf '%s\n' "${lines[@]}" | sed '$!s/$/,/'
    echo ']}'
  } > "$dir/summary.tmp" && mv "$dir/summary.tmp" "$dir/experiment_summary.json"
}
complete() { [ -s "$1" ] && [ "$(tail -c 2 "$1")" = "}" ]; }
experiment() { # NAME ARGUMENT...: trains, or goes on; sets code and message
  local files=$dir/$1 resume; shift
  resume=; [ ! -s "$files.safetensors" ] || resume=--resume
  while :; do
    "$train" "$@" $resume > "$dir/out" 2> "$dir/err" & child=$!
    until wait $child; code=$?; [ $code -le 128 ] || ! kill -0 $child 2> /dev/null; do :; done
    [ -z "$stopped" ] && [ -n "$resume" ] && { [ $code = 3 ] || { [ $code = 0 ] && ! complete "${files}_metrics.json"; }; } || break
    rm -f "$files.safetensors"; resume= # it cannot go on from there, or had ended before its metrics: from the start
  done
  child=
  message=$(grep '^train: ' "$dir/err" | tail -n 1 | cut -c8-)
  [ -n "$message" ] || message=$(tail -n 1 "$dir/err")
  [ $code -le 128 ] || message="ended by signal $((code - 128))"
  [ $code != 0 ] || message=
}
time_of() { printf '%dm%02ds' $(($1 / 60)) $(($1 % 60)); }

stopped= child= failures=0
trap 'stopped=1; [ -z "$child" ] || kill -TERM $child 2> /dev/null' INT TERM
for suite in "${suites[@]}"; do
  dir=$results/$suite enforce=$budget short= rows=() args=() lines=() old=() limits=() ours="bf16_flash_chunked bf16_flash_selective_chunked"
  case $suite in c | d) enforce=1;; esac
  cap=${budget:-$(pick ${memory[$suite]} ${small_memory[$suite]})}
  device_mib=
  [ $device = cpu ] || device_mib=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2> /dev/null | head -n 1)
  if [ -n "$device_mib" ] && [ -z "$budget" ]; then # no more than this device has; a MiB as 10^6: the rest is the driver's
    cap=$((cap < device_mib * 1000000 ? cap : device_mib * 1000000))
  fi
  case $device$suite in cudaa | cudab | cudac) base=${baseline:-tf32};; *) base=${baseline:-fp32};; esac
  if [ -z "$dry" ]; then
    [ -n "${data[$suite]:-${data[all]:-}}" ] || fail "suite $suite needs --data: a text, JSONL or a prefix of token files"
    mkdir -p "$dir" && exec 9> "$dir/.lock" || fail "cannot write to $dir"
    flock -n 9 || { echo "suite $suite: waiting for the one that runs in $dir" >&2; flock 9; }
  fi
  prepare "${data[$suite]:-${data[all]:-}}"
  suite_$suite
  [ -s "$dir/experiment_summary.json" ] && while IFS= read -r line; do
    [[ $line != '{"name": "'* ]] || { known=${line#*: \"}; old[${known%%\"*}]=${line%,}; }
  done < "$dir/experiment_summary.json"
  queue=() chosen=0
  for i in "${!rows[@]}"; do
    read -r group label batch most name <<< "${rows[i]}"
    known=${old[$name]:-}
    entry $i waiting 0 ""
    if ! wanted ${rows[i]}; then
      if [ -n "$known" ]; then lines[i]=$known; else entry $i skipped 0 ""; fi
      continue
    fi
    chosen=$((chosen + 1))
    if [ -n "$dry" ]; then
      eval "set -- ${args[i]}"
      bytes=$("$train" "$@" --dry-run --json --vocab-size $vocab 2> /dev/null | field arena_bytes /dev/stdin)
      if [ -n "$bytes" ]; then bytes="$((bytes >> 20)) MiB planned"; else bytes="refused by the plan"; fi
      printf '%s: %s: %s %s\n' "$name" "$bytes" "$train" "${args[i]}"
    elif [ -n "$known" ] && [[ $known != *"\"command\": \"$(text "${args[i]}")\"}" ]]; then
      rm -f "$dir/$name"{_metrics.json,_memory.json,.jsonl,.safetensors} # settings have changed
    elif complete "$dir/${name}_metrics.json"; then entry $i done 0 ""; continue
    fi
    queue+=($i)
  done
  [ $chosen -gt 0 ] || echo "suite $suite: --only and --skip leave no experiment" >&2
  echo "suite $suite: ${#rows[@]} experiments, ${#queue[@]} to run; $dataset, $vocab ids, $device, baseline $base" >&2
  [ -z "$dry" ] || continue
  start=$SECONDS ran=0
  for i in "${queue[@]}"; do
    [ -z "$stopped" ] || exit 130
    read -r group label batch most name <<< "${rows[i]}"
    printf '[%2d/%d] %s' $((ran + 1)) ${#queue[@]} "$name" >&2
    entry $i running 0 ""; summary
    eval "set -- ${args[i]}"
    experiment "$name" "$@"
    ran=$((ran + 1)) files=$dir/$name
    if [ -n "$stopped" ] || [ $code = 130 ]; then
      echo ": stopped; the same command goes on from here" >&2
      entry $i stopped $code ""; summary
      exit 130
    elif [ $code = 0 ] && complete "${files}_metrics.json"; then
      entry $i done 0 ""
      [ -z "$keep" ] || { mkdir -p "$dir/checkpoints" && mv "$files.safetensors" "$dir/checkpoints/"; }
      rm -f "$files.safetensors"
      printf ': perplexity %s, %d MiB, %s ms a step' $(field perplexity "${files}_metrics.json") $(($(field arena_bytes "${files}_metrics.json") >> 20)) \
        $(field ms_per_step "${files}_metrics.json") >&2
    elif [ $code = 4 ] && [ -n "$enforce" ] && [ $batch -gt $most ]; then
      entry $i refused $code "$message"; printf ': refused: %s' "$message" >&2
    else
      entry $i failed $code "${message:-there are no metrics}"; failures=$((failures + 1)); printf ': FAILED (%d): %s' $code "$message" >&2
    fi
    summary
    echo "; eta $(time_of $(((SECONDS - start) * (${#queue[@]} - ran) / ran)))" >&2
  done
  summary; rm -f "$dir/out" "$dir/err"
  [ -x "$root/build/report" ] || make -s -C "$root" build/report || { echo "experiments: cannot build build/report" >&2; continue; }
  "$root/build/report" --results-dir "$dir" && "$root/tools/plots.sh" "$dir"
done
[ $failures = 0 ] || echo "experiments: $failures failed: see experiment_summary.json" >&2
[ $failures = 0 ]
