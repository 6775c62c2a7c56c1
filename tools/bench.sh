#!/usr/bin/env bash
# bench.sh - time and memory of a training step, ours and PyTorch's on the same GPU, as a table.
usage() {
  cat << 'TEXT'
bench.sh [CASE...]     without a case all of them: the table goes into README.md; with cases it goes to stdout
bench.sh --table       measures nothing: the table of all figures there are, into README.md
  cases: a128 a128_tf32 a32 b64 d32 gpt2_16 gpt2_64 gpt2m_16 long largest, and for a CPU tiny
Variables: PROFILE and TRAIN, programs built elsewhere (make builds them); PYTHON (python3), whose PyTorch is left out where it has
none; DEVICE (cuda) or cpu; STEPS (40); README (README.md); FIGURES (results/bench/figures.tsv), where figures wait for --table.
Exit status: 1 if a run of ours failed, and README.md is as it was; 2 for a wrong call; 3 if the GPU or nvcc is missing.
TEXT
}
set -u -o pipefail
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive} # threads that spin lose much on a machine with other work
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3} device=${DEVICE:-cuda} steps=${STEPS:-40} readme=${README:-$root/README.md}
figures=${FIGURES:-$root/results/bench/figures.tsv}
fail() { echo "bench: $2" >&2; exit "$1"; }

# benchmark NAME MODES_OF_PYTORCH TITLE TECHNIQUE,.. OPTION...: words of a technique are joined by +
declare -A modes title techniques model
order=()
benchmark() {
  order+=("$1")
  modes[$1]=$2 title[$1]=$3 techniques[$1]=$4
  model[$1]=${*:5}
}
a="--layers 4 --heads 8 --d-model 256 --vocab-size 50257 --seq-len 256"
gpt2="--layers 12 --heads 12 --d-model 768 --vocab-size 50304 --positions learned --head tied --no-head-bias"
best=flash+selective+chunked+compact
benchmark a128 "compile graphs" "A's model, 128 x 256" flash,$best+3072-rows,flash+segments+chunked+1536-rows+compact $a --batch-size 128
benchmark a128_tf32 compile "the same, TF32" tf32+plain,tf32+chunked+32768-rows $a --batch-size 128
benchmark a32 "compile graphs" "A's model, 32 x 256" flash,flash+chunked+8192-rows,$best $a --batch-size 32
benchmark b64 compile "B's model, 64 x 512" flash,flash+selective+chunked \
  --layers 6 --heads 8 --d-model 512 --vocab-size 10000 --seq-len 512 --batch-size 64
benchmark d32 compile "D's model, 32 x 1024" flash,flash+selective+chunked,flash+checkpointing+chunked \
  --layers 12 --heads 12 --d-model 768 --vocab-size 30000 --seq-len 1024 --batch-size 32
benchmark gpt2_16 "compile graphs" "GPT-2 124M, 16 x 1024" flash,$best $gpt2 --seq-len 1024 --batch-size 16
benchmark gpt2_64 compile "GPT-2 124M, 64 x 1024" flash,$best $gpt2 --seq-len 1024 --batch-size 64
benchmark gpt2m_16 compile "GPT-2 355M, 16 x 1024" flash,flash+selective+chunked \
  $gpt2 --layers 24 --heads 16 --d-model 1024 --seq-len 1024 --batch-size 16
benchmark long compile "GPT-2 124M, 1 x 32768" flash,flash+checkpointing+chunked+compact $gpt2 --seq-len 32768 --batch-size 1
benchmark largest "" "" ""
all="${order[*]}"
benchmark tiny compile "tiny, 4 x 64" flash,$best --layers 2 --heads 4 --d-model 64 --vocab-size 1000 --seq-len 64 --batch-size 4

record() { local IFS=$'\t'; echo "$*" >> "$figures"; } # CASE PROGRAM MS BYTES, or CASE PROGRAM - REASON
ours() { # CASE: each technique, in a process of its own
  local technique word options out
  for technique in ${techniques[$1]//,/ }; do
    options=
    for word in ${technique//+/ }; do
      case $word in
        flash) options+=" --flash-attn";;
        plain) ;;
        tf32) options+=" --precision tf32";;
        checkpointing) options+=" --recompute layer";;
        segments) options+=" --recompute segments";;
        selective) options+=" --recompute selective";;
        *-rows) options+=" --chunk-rows ${word%-rows}";;
        *) options+=" --$word";;
      esac
    done
    if out=$(timeout 120 "$PROFILE" --device "$device" --steps "$steps" --only-step ${model[$1]} $options 2>&1); then
      record "$1" "mtt $technique" "$(sed -E 's/.*"ms": ([0-9.]+),.*"arena_bytes": ([0-9]+).*/\1\t\2/' <<< "$out")"
    else
      out=${out##*$'\n'} failed=1
      record "$1" "mtt $technique" - "${out:-took too long}"
    fi
    tail -n 1 "$figures" >&2
  done
}
planned() { # the largest batches that the planner finds
  local policy="--device cuda --technique bf16_flash_segments_chunked_compact --find-max-batch" c d
  c=$("$TRAIN" $policy $a --positions learned --max-seq 512 --dropout 0.1 --memory-budget 25260000000) &&
    d=$("$TRAIN" $policy ${model[d32]} --dropout 0.1 --memory-budget 40000000000) || { failed=1; return; }
  record largest "C's model" "$c" 25.26
  record largest "D's model" "$d" 40
}
theirs() { # CASE...: PyTorch, as many cases in a process as run in the same modes; its first import takes seconds
  local precision=bf16 group name json=$figures.json
  declare -A groups=()
  for name; do
    [ -z "${modes[$name]}" ] || groups[${modes[$name]},${name#${name%_tf32}}]+=" ${name%_tf32}"
  done
  for group in "${!groups[@]}"; do
    case $group in *,_tf32) precision=tf32;; *) precision=bf16;; esac
    rm -f "$json"
    "$python" "$root/tools/compare_pytorch.py" --device "$device" --speed ${groups[$group]} --pytorch $precision --modes ${group%,*} \
      --speed-steps "$steps" --json "$json" >&2
    [ -s "$json" ] && awk -F '": |,$' -v OFS='\t' -v tail="${group#*,}" '{ gsub(/^ *"|"$/, "", $1); gsub(/^"|"$/, "", $2); v[$1] = $2 }
      $1 == "pytorch" || $1 == "cuda" { print "about", $1, $2, "" }
      $1 == "program" { v["ms"] = "-"; v["note"] = "" }
      $1 == "seq_len" { print v["case"] tail, v["program"], v["ms"], v["ms"] == "-" ? v["note"] : v["mib"] == "null" ? "-" : sprintf("%.0f", v["mib"] * 1048576) }' \
      "$json" >> "$figures"
  done
}

table() { # CASE...: Markdown of their figures
  for name; do printf 'title\t%s\t%s\n' "$name" "${title[$name]}"; done | awk -F '\t' '
    function comma(n,  s) { for (s = sprintf("%.0f", n); match(s, /[0-9][0-9][0-9][0-9]($|,)/);) s = substr(s, 1, RSTART) "," substr(s, RSTART + 1); return s }
    function mb(bytes) { return bytes ~ /^[0-9]/ ? comma(bytes / 1e6) : "–" }
    function short(s) { gsub(/\|/, "/", s); return substr(s, 1, 60) }
    $1 == "title" { name[++cases] = $2; title[$2] = $3; wanted[$2] = 1; next }
    $1 == "about" { about[$2] = $3; next }
    !($1 in wanted) { next }
    $1 == "largest" { batches = batches sprintf("%s%s %s sequences in %s GB", batches ? ", " : "", $2, comma($3), $4); next }
    $2 ~ /^PyTorch/ { theirs = 1; if ($3 == "-") { if (!($1 in why)) why[$1] = short($4) } else if (!($1 in ms) || $3 + 0 < ms[$1]) {
        ms[$1] = $3 + 0; bytes[$1] = $4; how[$1] = $2 ~ /graphs/ ? " (graphs)" : "" } next }
    { row[$1, ++rows[$1]] = $2; row_ms[$1, rows[$1]] = $3; row_bytes[$1, rows[$1]] = $4 }
    END {
      for (c = 1; c <= cases; c++) any += rows[name[c]]
      if (any) {
        print "| model, batch x T |" (theirs ? " PyTorch: ms | MB |" : "") " mtt | ms | MB |" (theirs ? " speed | memory |" : "")
        print "|---|" (theirs ? "---:|---:|" : "") "---|---:|---:|" (theirs ? "---:|---:|" : "")
        for (c = 1; c <= cases; c++) for (k = 1; k <= rows[n = name[c]]; k++) {
          label = substr(row[n, k], 5); gsub(/\+/, ", ", label); sub(/-rows/, " rows a chunk", label); sub(/tf32/, "TF32", label)
          line = "| " (k == 1 ? title[n] : "") " | "
          if (theirs) line = line (k > 1 ? "|" : n in ms ? sprintf("%.2f%s | %s", ms[n], how[n], mb(bytes[n])) : (n in why ? why[n] : "–") " |") " | "
          line = line label " | "
          if (row_ms[n, k] == "-") line = line short(row_bytes[n, k]) " | |" (theirs ? " | |" : "")
          else {
            line = line sprintf("%.2f | %s |", row_ms[n, k], mb(row_bytes[n, k]))
            share = bytes[n] ~ /^[0-9]/ ? sprintf("%.0f %%", 100 * row_bytes[n, k] / bytes[n]) : "–"
            if (theirs) line = line (n in ms ? sprintf(" %.2fx | %s |", ms[n] / row_ms[n, k], share) : " | |")
          }
          print line
        }
        versions = theirs ? sprintf(", PyTorch %s of CUDA %s", about["pytorch"], about["cuda"]) : ""
        printf "\n%s, %s%s: `make bench`, the second half of %d steps, none waited for, MB of 10^6 bytes, BF16 where TF32 is not named.\n",
          about["device"], about["date"], versions, about["steps"]
      }
      if (batches) printf "%sLargest batches of flash, segments, chunked, compact, with dropout, as planned: %s.\n", any ? "\n" : "", batches
    }' - "$figures"
}
into_readme() { # the text of stdin goes between the markers
  local marks
  marks=$(grep -nE '^<!-- bench:(begin|end) -->$' "$readme" | sed 's/.*bench://' | tr -d '\n')
  [ "$marks" = "begin -->end -->" ] || fail 2 "$readme has no pair of lines <!-- bench:begin --> and <!-- bench:end -->"
  awk 'NR == FNR { text = text $0 "\n"; next }
    /^<!-- bench:end -->$/ { skip = 0 }
    !skip
    /^<!-- bench:begin -->$/ { skip = 1; printf "%s", text }' - "$readme" > "$figures.md" && cat "$figures.md" > "$readme" &&
    rm "$figures.md" && echo "bench: the table is in $readme" >&2
}

case ${1:-} in
  --help | -h) usage; exit 0;;
  --table) [ -s "$figures" ] || fail 2 "there are no figures in $figures"
    table $all | into_readme; exit;;
esac
for name; do [[ -n ${modes[$name]+set} ]] || fail 2 "there is no case $name (--help lists all)"; done
cases=("$@") failed=
[ $# -gt 0 ] || read -ra cases <<< "$all"
if [ "${cases[*]}" != largest ] && [ "$device" = cuda ]; then
  missing=
  nvidia-smi -L > /dev/null 2>&1 || missing="a GPU (nvidia-smi finds none)"
  [ -n "${PROFILE:-}" ] || command -v nvcc > /dev/null || missing+="${missing:+, }nvcc (the CUDA Toolkit has it; or name a program built elsewhere: PROFILE=./profile)"
  [ -z "$missing" ] || fail 3 "missing: $missing"
fi
need() { make -s -C "$root" "build/$1" >&2 || fail 1 "cannot build build/$1"; }
[ "${cases[*]}" = largest ] || [ -n "${PROFILE:-}" ] || { need profile; PROFILE=$root/build/profile; }
[[ " ${cases[*]} " != *" largest "* ]] || [ -n "${TRAIN:-}" ] || { need train; TRAIN=$root/build/train; }
mkdir -p "$(dirname "$figures")" && touch "$figures" || fail 2 "cannot write to $figures"
awk -F '\t' -v cases=" ${cases[*]} " '!index(cases, " " $1 " ")' "$figures" > "$figures.tmp" && mv "$figures.tmp" "$figures" # the others stay
if [ "${cases[*]}" != largest ]; then # of what is said twice the last counts
  about="A CPU, $(uname -m)"
  [ "$device" = cpu ] || about="One $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | sed '1s/, /, driver /;q') with CUDA \
$(nvidia-smi | sed -nE 's/.*CUDA Version: ([0-9.]+).*/\1/p')"
  record about device "${about//$'\n'/}"
  record about date "$(date -u +%Y-%m-%d)"
  record about steps "$steps"
fi
for name in "${cases[@]}"; do
  case $name in largest) planned;; *) ours "$name";; esac
done
if "$python" -c 'import torch, numpy' 2> /dev/null; then theirs "${cases[@]}"
else echo "bench: $python has no PyTorch: its columns are left out" >&2; fi
if [ $# -gt 0 ] || [ -n "$failed" ]; then table "${cases[@]}"
else table "${cases[@]}" | into_readme; fi
[ -z "$failed" ]
