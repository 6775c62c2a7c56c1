#!/usr/bin/env bash
# mutate.sh [COUNT [SEED]] - makes a single change to mtt.h, runs the tests that concern its room, and says
# which of them notices. First the chosen changes below, each of which must be noticed; then COUNT random ones
# (default 20) as SEED (default 1) picks them. A survivor is printed with its diff: a test is missing, or the
# change makes no difference. A mutant counts if it compiles and the tests' object code differs from the
# original's. If no test sees it, they run again with the address sanitizer. The golden checksums take no
# part: they notice any change of bits, right or wrong.
#
# mutate.sh stale - fails if the text of a chosen change is not in mtt.h once
#
# Works on a copy in build/mutate. Run again, it continues where it stopped, unless a source has changed.
cd "$(dirname "$0")/.." || exit 1
count=${1:-20} seed=${2:-1} source=$PWD/mtt.h work=$PWD/build/mutate
export OMP_WAIT_POLICY=passive TEST_STOP=1 LC_ALL=C
SANITIZE=-fsanitize=address
export ASAN_OPTIONS=hard_rss_limit_mb=8000
ulimit -c 0

# A text of mtt.h, which must be there once, and what takes its place. A model's quality, memory and cost are
# what users see of mtt. None of these changes stops it from training.
chosen() {
  cat << 'CHANGES'
count.hits += losses[3 * i + 1] > 0; => count.hits += losses[3 * i + 1] >= 0;
bytes > 0 ? loss / log(2.0) / bytes : 0 => bytes > 0 ? 0.5 * loss / log(2.0) / bytes : 0
bytes > 0 ? loss / log(2.0) / bytes : 0 => bytes > 0 ? 1.001 * loss / log(2.0) / bytes : 0
hits / (double)q->targets : 0 => 1.1 * hits / (double)q->targets : 0
q->perplexity = exp(q->loss) => q->perplexity = exp2(q->loss)
part.loss = info.loss * (double)info.targets => part.loss = info.loss * (double)rows
(o->lr * (double)(step + 1) / => (o->lr * (double)step /
(double)(o->total_steps - o->warmup_steps) => (double)o->total_steps
/= sqrtf(2.0f * (float)t->schedule->model.layers) => /= sqrtf((float)t->schedule->model.layers)
init >= MTT__NORMAL ? 0.02f : 0.0f => init >= MTT__NORMAL ? 0.0204f : 0.0f
MTT__SITE_INIT, 0, (uint64_t)index) => MTT__SITE_INIT, 0, 0)
pow(10000.0, -(double) => pow(9990.0, -(double)
wave : 0.02 * wave => wave : 0.0201 * wave
1.0f + 0.134145f * x[k] => 1.0f + 0.1343f * x[k]
x + 0.044715f * x * x => x + 0.0448f * x * x
(float)width + op->shape->norm_eps => (float)width + 0.1f * op->shape->norm_eps
query - window + 1 : 0 => query - window : 0
part.group = q->weight->dims == 1 => part.group = 0
8 * mtt__count(o->x), moved, 0) => 9 * mtt__count(o->x), moved, 0)
16 * parameters, moved => 20 * parameters, moved
4 * mtt__attention_pairs(d) => 5 * mtt__attention_pairs(d)
10 * mtt__attention_pairs(d) => 9 * mtt__attention_pairs(d)
3 * (double)o->x->bytes, 0) => 2 * (double)o->x->bytes, 0)
== MTT_MLP_GELU ? 21 : 12) => == MTT_MLP_GELU ? 20 : 12)
2 + (seq - window) * window) => 2 + (seq - window))
if (!(c->scale > 0) || !mtt__finite( => if (!mtt__finite(
least, most, 0, c->top_k) => least, most, 0, c->top_k + 1)
fmin(halving / temperature, => fmin(halving,
: vocab, (uint64_t)q->drawn) => : vocab, 0)
ends = tokenizer && id == => ends = 0 && id ==
q->place += r.counts[i] => q->place += r.counts[i] + 1
CHANGES
}

# The tests that concern a room, the cheapest first.
tests_of() {
  case $1 in
    interface | operations | config | tensors | schedule | plan) echo test_identity test_plan test_model;;
    adapters | eight) echo test_identity test_model;;
    exchange) echo test_identity test_plan test_together;;
    tokenizer) echo test_tokenizer test_model;;
    json | files | data | batches) echo test_files test_model;;
    base | checkpoint) echo test_files test_model;;
    models) echo test_models;;
    report) echo test_plan;;
    ranks) echo test_ranks test_together;;
    generator) echo test_generate test_model;;
    *) echo test_model;; # numbers, cpu, trainer, public
  esac
}
ALL="test_identity test_plan test_structs test_files test_tokenizer test_ranks test_models test_generate \
  test_together test_model"

# Every place: LINE, COLUMN, LENGTH, ROOM, NEW. Comments, strings and tables of numbers are passed over.
# Operators: a constant off by one or by 1 %, a comparison turned, + for -, && for ||, a `!` or a statement
# removed.
places() {
  awk '
    function put(column, length_, new) {printf "%d\t%d\t%d\t%s\t%s\n", NR, column, length_, room, new}
    function mask(text,  out, c, i) { # the same length, with blanks for comments and strings
      for (i = 1; i <= length(text); i++) {
        c = substr(text, i, 1)
        if (comment) {
          if (substr(text, i, 2) == "*/") {comment = 0; i++; out = out " "}
          c = " "
        } else if (quote) {
          if (c == "\\") {i++; c = "  "} else {if (c == quote) quote = ""; c = " "}
        } else if (substr(text, i, 2) == "/*") {comment = 1; c = " "
        } else if (c == "\"" || c == "\047") {quote = c; c = " "}
        out = out c
      }
      return out
    }
    function swap(old, new,  from, at) {
      for (from = 1; (at = index(substr(code, from), old)); from += at + length(old) - 2)
        put(from + at - 1, length(old), new)
    }
    function numbers(  from, text, change) {
      for (from = 1; match(substr(code, from), /[A-Za-z0-9_.]+/); from += RSTART + RLENGTH - 1) {
        text = substr(code, from + RSTART - 1, RLENGTH)
        if (text !~ /^(0x[0-9a-f]+|[0-9]+|[0-9]+\.[0-9]*(e[0-9]+)?f?|[0-9]+e[0-9]+)u?$/) continue
        change = text ~ /^0(\.0*)?[fu]?$/ || NR % 2 ? " + 1" : " - 1"
        if (text ~ /[.e]/ && text !~ /^0x/ && text + 0) change = " * 1.01f"
        put(from + RSTART - 1, RLENGTH, "(" text change ")")
      }
    }
    /^\/\* -----+ backend -+ \*\/$/ {room = "interface"} # operations, and numbers that all backends share
    /^   >>[a-z]+$/ {room = substr($1, 3)}
    {code = mask($0)}
    room ~ /^(|os|base|json|files|report)$/ {next}
    /^#/ || code ~ /^[ 0-9a-fux,{}-]*$/ {next}
    {
      swap(" < ", " <= "); swap(" <= ", " < "); swap(" > ", " >= "); swap(" >= ", " > ")
      swap(" == ", " != "); swap(" != ", " == "); swap(" && ", " || "); swap(" || ", " && ")
      swap(" + ", " - "); swap(" - ", " + "); swap(" += ", " -= "); swap(" -= ", " += ")
      swap("(!", "("); swap(" !", " ")
      numbers()
      trimmed = code; gsub(/^ +| +$/, "", trimmed)
      if (last ~ /[;{}]$/ && trimmed ~ /;$/ && trimmed ~ \
        /^(\*?[a-z][^ ]* ([-+*|]?=) |[a-z_]+\(|if \(|for \(|break;|continue;|[^ ]*\+\+)/)
        put(index(code, trimmed), length(trimmed), ";")
      if (trimmed != "") last = trimmed
    }' mtt.h
}

# In an order that the seed fixes, with any awk (Park and Miller 1988).
shuffled() {
  awk -v state="$((seed % 2147483646 + 1))" '
    {state = state * 16807 % 2147483647; printf "%d\t%s\n", state, $0}' | sort -n | cut -f2-
}

# The chosen changes as places. One whose text is not there once is stale: the list needs care.
chosen_places() {
  chosen | awk -F' => ' '
    NR == FNR {
      if ($0 ~ /^   >>[a-z]+$/) at = substr($0, 6)
      line[NR] = $0; room[NR] = at ? at : "interface"; lines = NR
      next
    }
    {
      found = 0
      for (n = 1; n <= lines; n++)
        if ((at = index(line[n], $1))) {found++; where = n; column = at}
      if (found == 1) printf "%d\t%d\t%d\t%s\t%s\n", where, column, length($1), room[where], $2
      else printf "0\t0\t0\tstale\t%s\n", $1
    }' mtt.h -
}

changed() { # LINE COLUMN LENGTH NEW: mtt.h with that change
  new=$4 awk -v at="$1" -v column="$2" -v length_="$3" '
    NR == at {$0 = substr($0, 1, column - 1) ENVIRON["new"] substr($0, column + length_)} {print}' "$source"
}

compile() { # TEST OBJECT [OPTION...]: in the copy
  cc -std=gnu99 -O1 -fopenmp -w -c "$1.c" -o "$2" "${@:3}"
}

run() { # TEST SECONDS KIB: the first failure, or how else it ended, into `noticed`
  local status
  (ulimit -v "$3"; TMPDIR=$scratch exec timeout -k 5 "$2" "../$1" quick) > ../log 2>&1; status=$?
  rm -rf "${scratch:?}"/*
  noticed=$(grep -m 1 '^FAILED: ' ../log | cut -c9- | sed 's/.*\(.\{90\}\)$/...\1/')
  [ $status != 124 ] || noticed="no end after $2 s"
  [ -n "$noticed" ] || noticed="status $status"
  return $status
}

# The copy, and what the original's objects and times are.
prepare() (
  local test stamp start
  stamp=$(cat mtt.h tests/{,units/}*.[ch] tools/*.h | sha256sum)
  [ "$stamp" != "$(cat "$work/stamp" 2> /dev/null)" ] || return 0
  rm -rf "$work"
  mkdir -p "$work/copy"
  cp -r mtt.h tests tools "$work/copy"
  cd "$work/copy/tests/units" || exit 1
  for test in $ALL; do
    compile $test "$work/$test.original" && cc -fopenmp "$work/$test.original" -o ../$test -lm || exit 1
    start=$SECONDS
    run $test 600 16000000 || { echo "$test fails without a change: $noticed" >&2; exit 1; }
    echo $((4 * (SECONDS - start) + 20)) > "$work/$test.seconds"
  done
  touch "$work/results"
  echo "$stamp" > "$work/stamp"
)

trial() { # LINE COLUMN LENGTH ROOM NEW: the verdict into `verdict`
  local test differs=
  changed "$1" "$2" "$3" "$5" > ../../mtt.h
  for test in $(tests_of $4); do
    compile $test ../object 2> /dev/null || { verdict="invalid"; return; }
    ! cmp -s ../object "$work/$test.original" || continue
    differs=1
    cc -fopenmp ../object -o ../$test -lm
    run $test "$(cat "$work/$test.seconds")" 16000000 || { verdict="killed by $test: $noticed"; return; }
  done
  verdict=${differs:+survived}
  verdict=${verdict:-no difference}
  [ "$verdict" = survived ] || return
  for test in $(tests_of $4); do # as tests/sanitize.sh runs them
    compile $test ../object $SANITIZE && cc -fopenmp $SANITIZE ../object -o ../$test -lm
    run $test $((4 * $(cat "$work/$test.seconds"))) unlimited ||
      { verdict="killed by $test with the address sanitizer: $noticed"; return; }
  done
}

# Tries places until `most` of them count. A known verdict is taken from the results.
series() { # MOST
  local most=$1 counted=0 line column length_ room new key
  while [ $counted -lt "$most" ] && IFS=$'\t' read -r line column length_ room new; do
    key="line $line:$column:$length_:$new"
    if [ "$room" = stale ]; then
      verdict="stale"
    elif verdict=$(grep -m 1 -F "$key"$'\t' "$work/results"); then
      verdict=${verdict##*$'\t'}
    else
      trial "$line" "$column" "$length_" "$room" "$new"
      printf '%s\t%s\n' "$key" "$verdict" >> "$work/results"
    fi
    case $verdict in
      killed*) killed=$((killed + 1)); counted=$((counted + 1));;
      survived)
        survived=$((survived + 1)) counted=$((counted + 1))
        echo "survived in $room, line $line:"
        diff "$source" <(changed "$line" "$column" "$length_" "$new") | grep '^[<>]' | tr -s ' ';;
      stale) stale=$((stale + 1)); echo "stale: mtt.h does not have once: $new";;
      invalid) invalid=$((invalid + 1));;
      *) alike=$((alike + 1));;
    esac
    [ -z "$VERBOSE" ] || printf '%s\t%s\t%s\n' "$room" "$key" "$verdict"
  done
}

tally() { # NAME
  echo "$1: $killed killed, $survived survived;" \
    "not counted: $invalid do not compile, $alike make no difference"
}

if [ "$count" = stale ]; then
  ! chosen_places | awk -F'\t' '$4 == "stale" {print "mtt.h does not have once: " $5}' | grep .
  exit
fi
scratch=$(mktemp -d /tmp/mtt_mutate_XXXXXX) || exit 1
trap 'rm -rf "$scratch"' EXIT
prepare || exit 1
places | shuffled > "$work/random"
chosen_places > "$work/chosen"
cd "$work/copy/tests/units" || exit 1
killed=0 survived=0 stale=0 invalid=0 alike=0
series 1000000 < "$work/chosen"
tally "chosen changes"
bad=$((survived + stale + invalid + alike)) killed=0 survived=0 invalid=0 alike=0
series "$count" < "$work/random"
[ "$count" = 0 ] || tally "random changes of seed $seed"
[ $bad = 0 ]
