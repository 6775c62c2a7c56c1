#!/usr/bin/env bash
# faults.sh BUILD_DIR [SCENARIO] - each call of train, prepare and report on a file fails once: open, read,
# write, fsync, close, rename, unlink, mmap, mkdir. After each failure there must be an exit code and a
# message, nothing may be lost, and the next run must give what a run without failures gives. Then a run dies
# at each call, continues, and must end with every file of one that did not, to the bit.
. tests/lib.sh
build=$(mkdir -p "$1/faults" && cd "$1/faults" && pwd) || exit 1
room=$(mktemp -d -p /dev/shm 2> /dev/null || mktemp -d)
trap 'rm -rf "$room"' EXIT
run=$room/run start=$room/start want=$room/want
export FAULT_FOLDER=$run FAULT_MARK=$room/mark OMP_WAIT_POLICY=passive
model=(--layers 1 --heads 1 --d-model 8 --d-ff 8 --vocab-size 280 --batch-size 2 --seq-len 16
       --eval-batches 2 --dataset ds)

cc -O1 -Wall -Wextra -shared -fPIC tests/platforms/faults.c -o "$build/faults.so" -ldl || exit 1
# One thread: calls come in one order.
cc -std=gnu99 -O1 -DMTT_IMPLEMENTATION -DMTT_DOCUMENT_BYTES=512 -include mtt.h -x c -c tools/wordpiece.h \
  -o "$build/mtt.o" || exit 1
for program in train prepare report; do
  case $program in train) source=tools/trainer.c;; report) source=examples/assignment/report.c;;
    *) source=tools/$program.c;; esac
  cc -std=gnu99 -O1 -DMTT_IMPLEMENTATION_DONE $source "$build/mtt.o" \
    -o "$build/$program" -lm || exit 1
done
mkdir "$room/here"
sample_text | head -c 30000 | fold -w 600 | sed G > "$room/text" # 50 documents

# ---- scenarios: what is there before, the command, what must hold after a failure, and the next run

train() { # in a folder of its own, which takes the last checkpoint where that of the results does not
  (cd "$room/here" && "$build/train" --data "$room/text" --results-dir "$run" "${model[@]}" "$@")
}
prepare() { "$build/prepare" --input "$1" --output "$run/d" --vocab-size 280 --seed "$2"; }

before_first() { :; }
command_first() { train --steps 4 --save-every 2 --eval-every 2; }
again_first() { command_first; }
continue_first() { # from the newest checkpoint, if there is one
  local resume=
  ! ls "$run"/*_step*.safetensors > /dev/null 2>&1 || resume=--resume
  train --steps 4 --save-every 2 --eval-every 2 $resume
}

before_resume() { train --steps 3; }
command_resume() { train --steps 6 --save-every 2 --eval-every 2 --resume; }
again_resume() { command_resume; }
continue_resume() { command_resume; }
kept_resume() { grep -q '"step": 3' "$run"/*.jsonl; }

before_anew() { train --steps 3; }
command_anew() { train --steps 2 --seed 1; }
again_anew() { command_anew; }
kept_anew() { # the older checkpoint is there under some name
  find "$run" -type f -exec sha256sum {} + | grep "$(hash_of "$(first_checkpoint)")" > /dev/null
}

before_prepare() { prepare "$room/text" 1; }
command_prepare() { prepare "$room/text" 2; }
again_prepare() { command_prepare; }

before_piped() { :; }
command_piped() { prepare - 2 < "$room/text"; }
again_piped() { command_piped; }

before_report() { train --steps 3 --no-checkpoint && train --steps 3 --no-checkpoint --flash; }
command_report() { "$build/report" --results-dir "$run"; }
again_report() { command_report; }

# ---- judging

first_checkpoint() { ls "$start"/*.safetensors | head -1; }
hash_of() { sha256sum < "$1" | cut -c1-64; }
numbers() { # FILE: the metrics that do not depend on time
  local key
  for key in steps val_loss perplexity accuracy; do field "$1" $key; done
}
is_same() { # FILE FILE: equal but for times
  case $1 in
    *_metrics.json) [ "$(numbers "$1")" = "$(numbers "$2")" ];;
    *.jsonl) cmp -s <(sed 's/, "\(ms\|time\)".*//' "$1") <(sed 's/, "\(ms\|time\)".*//' "$2");;
    *) cmp -s "$1" "$2";;
  esac
}
has_all() { # [after]: what a run without failures leaves is there. After a failure a log may have gaps, and
  # another evaluation may be the best, as a run evaluates where it stops.
  local file newest
  newest=$(ls "$want"/*.safetensors 2> /dev/null | grep -v _best | sort -V | tail -1)
  for file in "$want"/*; do
    odd="$(basename "$file") differs"
    case $file in
      *.lock) continue;;
      *_step*.safetensors) [ "$file" = "$newest" ] || continue;; # a run goes on after a save that failed
      *.jsonl | *_best.safetensors) [ -z "${1:-}" ] || continue;;
    esac
    [ -d "$file" ] || is_same "$file" "$run/$(basename "$file")" || return 1
  done
}
is_clean() { # nothing temporary is left
  odd=$(find "$run" -mindepth 1 ! -name '*.lock' \( -name '.*' -o -name '*.tmp*' -o -name '*.spool' \) \
    -printf '%f is left' -quit)
  [ -z "$odd" ]
}
is_told() { # STATUS: the error is of the program and names the file, or if it fails at least the folder
  local name
  name=$(basename "$run$(cut -d' ' -f2- "$FAULT_MARK")" .tmp)
  grep -qE '^(train|prepare|report): ' "$room/err" &&
    { grep -qF -- "${name#.}" "$room/err" || { [ "$1" != 0 ] && grep -qF "$run" "$room/err"; }; }
}
put_back() { rm -rf "$run" && cp -r "$1" "$run"; }
wrong() { fail "$scenario, $(cat "$FAULT_MARK"): $*"; }
kept() { # WHEN
  [ "$(type -t "kept_$scenario")" = function ] || return 0
  if "kept_$scenario"; then pass; else wrong "what was there is lost $1"; fi
}
try() { # N: fails the Nth call; 1 = there is none
  local status
  rm -f "$FAULT_MARK"
  put_back "$start"
  FAULT_AT=$1 LD_PRELOAD=$build/faults.so "command_$scenario" > "$room/out" 2> "$room/err"; status=$?
  [ -e "$FAULT_MARK" ] || return 1
  sites=$((sites + 1))
  if [ $status -gt 7 ]; then wrong "status $status"
  elif is_told $status || { [ $status = 0 ] && has_all; }; then pass
  elif [ $status = 0 ]; then wrong "status 0 and no message, but $odd"
  else wrong "status $status, and the message does not name the file: $(tail -1 "$room/err")"; fi
  kept ""
  "again_$scenario" > "$room/out" 2> "$room/err"; status=$?
  if [ $status != 0 ]; then wrong "the next run: status $status, $(tail -1 "$room/err")"
  elif ! has_all after || ! is_clean; then wrong "after the next run $odd"
  else pass; fi
  kept "by the next run"
}
die() { # N: the process dies at the Nth call; 1 = there is none
  rm -f "$FAULT_MARK"
  put_back "$start"
  { FAULT_KILL=1 FAULT_AT=$1 LD_PRELOAD=$build/faults.so "command_$scenario"; } > "$room/out" 2> "$room/err"
  [ -e "$FAULT_MARK" ] || return 1
  deaths=$((deaths + 1))
  kept "by death"
  if ! "continue_$scenario" > "$room/out" 2> "$room/err"; then wrong "continued: $(tail -1 "$room/err")"
  elif ! has_all || ! is_clean; then wrong "continued after death: $odd"
  else pass; fi
}
ready() { # makes the folders before and after the command
  rm -rf "$run" "$start" "$want"
  mkdir "$run" && "before_$scenario" && cp -r "$run" "$start" && "command_$scenario" && cp -r "$run" "$want"
}
for scenario in ${2:-first resume anew prepare piped report}; do
  sites=0 before=$failed
  ready > "$room/out" 2>&1 || { fail "$scenario without a failure: $(tail -1 "$room/out")"; continue; }
  for ((n = 1; n < 2000; n++)); do try $n || break; done
  printf '%-8s %d calls failed, %d wrong outcomes\n' "$scenario" $sites $((failed - before))
  [ $sites -gt 20 ] || fail "$scenario: only $sites calls"
  [ "$(type -t "continue_$scenario")" = function ] || continue
  deaths=0 before=$failed
  for ((n = 1; n < 2000; n++)); do die $n || break; done
  printf '%-8s died at %d calls, %d wrong outcomes\n' "$scenario" $deaths $((failed - before))
  [ $deaths -gt 20 ] || fail "$scenario: only $deaths deaths"
done
closing_line
