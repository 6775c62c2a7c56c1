#!/usr/bin/env bash
# bench.sh - time and memory of a training step, ours and PyTorch's on the same GPU, as a table.
usage() {
  cat << 'TEXT'
bench.sh [CASE...]     without a case all of them, into tools/performance.md; with cases to stdout
bench.sh --table       measures nothing: the table of all figures so far, into tools/performance.md
  cases: a128 a128_dropout a128_tf32 a32 b64 d32 d32_dropout gpt2_16 gpt2_16_dropout gpt2_64 gpt2m_16
  gpt2xl_8 long llama_16 llama_16_d128 largest; attention alone gqa12_1k gqa12_4k gqa12_16k gqa16_1k gqa16_4k
  gqa16_16k; generation, with transformers gpt2_generate_N, N = 1, 8, 32 or 128 sequences; with torchao
  gpt2_16_fp8; with N = 2, 4 or 8 GPUs gpt2_16_ranksN gpt2_64_ranksN gpt2m_16_ranksN gpt2xl_8_ranksN; and for
  a CPU tiny tiny_dropout tiny_ranks2 tiny_llama tiny_gqa tiny_generate
Variables: PROFILE and TRAIN, programs built elsewhere (make builds them); PYTHON (python3), which is left out
if it has no PyTorch; DEVICE (cuda) or cpu; STEPS (40); PAGE (tools/performance.md); FIGURES
(results/bench/figures.tsv), where figures are kept for --table.
Exit status: 1 if a run of ours failed, and the page is unchanged; 2 for a wrong call; 3 if the GPU or nvcc
is missing.
TEXT
}
set -u -o pipefail
export LC_ALL=C # decimals have a point
[ "${BASH_VERSINFO[0]}" -ge 4 ] || { echo "bench: needs bash 4: brew install bash" >&2; exit 2; }
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive} # threads that spin slow each other down on a busy machine
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3} device=${DEVICE:-cuda} steps=${STEPS:-40} page=${PAGE:-$root/tools/performance.md}
figures=${FIGURES:-$root/results/bench/figures.tsv}
fail() { echo "bench: $2" >&2; exit "$1"; }

. "$root/tools/cases.sh"

record() { local IFS=$'\t'; echo "$*" >> "$figures"; } # CASE PROGRAM MS BYTES, or CASE PROGRAM - REASON
ours() { # CASE: each technique, in a process of its own
  local technique rows out numbers='s/.*"ms": ([0-9.]+)(.*"arena_bytes": ([0-9]+))?.*/\1\t\3/'
  for technique in ${techniques[$1]//,/ }; do
    rows=
    case $technique in *:*) rows="--chunk-rows ${technique#*:}";; esac
    if out=$(timeout 120 "$PROFILE" --device "$device" --steps "$steps" --only-step ${model[$1]} \
      --technique ${technique%:*} $rows 2>&1); then
      record "$1" "mtt $technique" "$(sed -En "${numbers}p" <<< "$out")"
      grep -oE 'rank .*' <<< "$out" >&2
    else
      out=${out##*$'\n'} failed=1
      record "$1" "mtt $technique" - "${out:-took too long}"
    fi
    tail -n 1 "$figures" >&2
  done
}
planned() { # the largest batches that the planner finds
  local policy="--device cuda --technique bf16_flash_segments_chunked_compact --dropout 0.1 --find-max-batch"
  local c_batch d_batch
  c_batch=$("$TRAIN" $policy $a --positions learned --max-seq 512 --memory-budget 25260000000) &&
    d_batch=$("$TRAIN" $policy $d --memory-budget 40000000000) || { failed=1; return; }
  record largest "model C" "$c_batch" 25.26
  record largest "model D" "$d_batch" 40
}
from_json='{ gsub(/^ *"|"$/, "", $1); gsub(/^"|"$/, "", $2); v[$1] = $2 }
  $1 == "pytorch" || $1 == "cuda" { print "about", $1, $2, "" }
  $1 == "program" { v["ms"] = "-"; v["note"] = "" }
  $1 == "seq_len" {
    bytes = v["mib"] == "null" ? "-" : sprintf("%.0f", v["mib"] * 1048576)
    print v["case"] tail, v["program"], v["ms"], v["ms"] == "-" ? v["note"] : bytes
  }'
theirs() { # CASE...: PyTorch; cases of the same modes share a process, since its import takes seconds
  local group name tail how mode kernels start json=$figures.json
  declare -A groups=()
  for name; do
    tail=
    [[ ! $name =~ _(tf32|dropout|fp8|ranks[248])$ ]] || tail=${BASH_REMATCH[0]}
    kernels=flash
    [[ ! $name =~ llama|gqa ]] || kernels="flash cudnn"
    [ -z "${modes[$name]}" ] || groups[${modes[$name]},$kernels,$tail]+=" ${name%$tail}"
  done
  for group in "${!groups[@]}"; do
    start=("$python")
    IFS=, read -r mode kernels tail <<< "$group"
    case $tail in
      _ranks*) how=bf16 start+=(-m torch.distributed.run --standalone --nproc-per-node ${tail#_ranks});;
      _tf32 | _fp8) how=${tail#_};;
      _dropout) how="bf16 --dropout 0.1";;
      *) how=bf16;;
    esac
    rm -f "$json"
    "${start[@]}" "$root/tools/compare_pytorch.py" --device "$device" --speed ${groups[$group]} \
      --pytorch $how --modes $mode --sdpa $kernels --speed-steps "$steps" --json "$json" >&2
    [ -s "$json" ] && awk -F '": |,$' -v OFS='\t' -v tail="$tail" "$from_json" "$json" >> "$figures"
  done
}

markdown='
function comma(n,  s) {
  for (s = sprintf("%.0f", n); match(s, /[0-9][0-9][0-9][0-9]($|,)/);)
    s = substr(s, 1, RSTART) "," substr(s, RSTART + 1)
  return s
}
function mb(bytes) { return bytes ~ /^[0-9]/ ? comma(bytes / 1e6) : "–" }
function short(s) { gsub(/\|/, "/", s); return substr(s, 1, 60) }
function label(s) {
  sub(/^mtt /, "", s); gsub(/[_+]/, ", ", s); sub(/tf32/, "TF32", s); sub(/fp8/, "FP8", s)
  sub(/bf16/, "BF16", s)
  if (match(s, /:[0-9]+/)) s = substr(s, 1, RSTART - 1) ", " substr(s, RSTART + 1) " rows a chunk"
  return s
}
function pytorch(n) { return n in ms ? sprintf("%.2f%s | %s", ms[n], how[n], mb(bytes[n])) : \
  (n in why ? why[n] : "–") " |" }
function ratios(n, k) {
  if (!(n in ms)) return " | |"
  return sprintf(" %.2fx | %s |", ms[n] / row_ms[n, k], \
    bytes[n] ~ /^[0-9]/ ? sprintf("%.0f %%", 100 * row_bytes[n, k] / bytes[n]) : "–")
}
function line(n, k,  s) {
  s = "| " (k == 1 ? title[n] : "") " | "
  if (theirs) s = s (k > 1 ? "|" : pytorch(n)) " | "
  s = s label(row[n, k]) " | "
  if (row_ms[n, k] == "-") return s short(row_bytes[n, k]) " | |" (theirs ? " | |" : "")
  return s sprintf("%.2f | %s |", row_ms[n, k], mb(row_bytes[n, k])) (theirs ? ratios(n, k) : "")
}
$1 == "title" { name[++cases] = $2; title[$2] = $3; wanted[$2] = 1; next }
$1 == "about" { about[$2] = $3; next }
!($1 in wanted) { next }
$1 == "largest" {
  batches = batches sprintf("%s%s %s sequences in %s GB", batches ? ", " : "", $2, comma($3), $4)
  next
}
$2 ~ /^PyTorch/ && $3 == "-" { theirs = 1; if (!($1 in why)) why[$1] = short($4); next }
$2 ~ /^PyTorch/ {
  theirs = 1
  if ($1 in ms && $3 + 0 >= ms[$1]) next
  ms[$1] = $3 + 0; bytes[$1] = $4; how[$1] = $2
  how[$1] = sub(/.*(eager|compiled), /, "", how[$1]) ? " (" how[$1] ")" : ""
  next
}
{ row[$1, ++rows[$1]] = $2; row_ms[$1, rows[$1]] = $3; row_bytes[$1, rows[$1]] = $4 }
END {
  for (c = 1; c <= cases; c++) {
    any += rows[name[c]]
    if (rows[name[c]] && match(name[c], /gqa|generate/)) has[substr(name[c], RSTART, RLENGTH)] = 1
  }
  if (any) {
    print "| model, batch x T |" (theirs ? " PyTorch: ms | MB |" : "") " mtt | ms | MB |" \
      (theirs ? " speed | memory |" : "")
    print "|---|" (theirs ? "---:|---:|" : "") "---|---:|---:|" (theirs ? "---:|---:|" : "")
    for (c = 1; c <= cases; c++) for (k = 1; k <= rows[name[c]]; k++) print line(name[c], k)
    versions = theirs ? sprintf(", PyTorch %s for CUDA %s", about["pytorch"], about["cuda"]) : ""
    printf "\n%s, %s%s.\nEach time is the mean of the second half of %d steps, ", \
      about["device"], about["date"], versions, about["steps"]
    print "without synchronizing after each step. MB is 10^6 bytes."
    print "Rows are BF16 unless they name TF32 or FP8. Where no row says otherwise, the loss goes over"
    print "8,192 to 16,384 tokens at a time."
    if (has["gqa"])
      print "Attention: the forward and the backward pass of one layer, the mean of 10 in a row."
    if (has["generate"])
      print "New tokens: the time of one of each sequence, with its share of prompts of 16 tokens."
  }
  if (batches) printf "%sPlanned largest batch with %s: %s.\n", any ? "\n" : "", \
    "flash, segments, chunked, compact and dropout", batches
}'
table() { # CASE...: Markdown of their figures
  for name; do printf 'title\t%s\t%s\n' "$name" "${title[$name]}"; done | awk -F '\t' "$markdown" - "$figures"
}
into_page() { # the text of stdin goes between the markers
  local marks
  marks=$(grep -nE '^<!-- bench:(begin|end) -->$' "$page" | sed 's/.*bench://' | tr -d '\n')
  [ "$marks" = "begin -->end -->" ] ||
    fail 2 "$page has no pair of lines <!-- bench:begin --> and <!-- bench:end -->"
  cat > "$figures.md"
  [ -s "$figures.md" ] || fail 2 "there are no figures of these cases in $figures"
  rm -f "$page.tmp" && awk 'NR == FNR { text = text $0 "\n"; next }
    /^<!-- bench:end -->$/ { skip = 0 }
    !skip
    /^<!-- bench:begin -->$/ { skip = 1; printf "%s", text }' "$figures.md" "$page" > "$page.tmp" &&
    mv -f "$page.tmp" "$page" || { rm -f "$page.tmp"; fail 2 "cannot write $page"; }
  rm "$figures.md" && echo "bench: the table is in $page" >&2
}

case ${1:-} in
  --help | -h) usage; exit 0;;
  --table) [ -s "$figures" ] || fail 2 "there are no figures in $figures"
    table $all | into_page; exit;;
esac
for name; do [[ -n ${modes[$name]+set} ]] || fail 2 "there is no case $name (--help lists all)"; done
cases=("$@") failed=
if [ $# = 0 ]; then
  "$python" -c 'import torchao' 2> /dev/null || all=${all/ gpt2_16_fp8/}
  gpus=$(nvidia-smi -L 2> /dev/null | wc -l)
  for n in 2 4 8; do [ "$gpus" -ge $n ] || all=$(sed -E "s/ [a-z0-9_]+_ranks$n//g" <<< "$all"); done
  read -ra cases <<< "$all"
fi
if [ "${cases[*]}" != largest ] && [ "$device" = cuda ]; then
  missing=
  [ "$("$root/tools/arch.sh" half)" = bf16 ] ||
    missing="a GPU of compute capability 8.0 or later (nvidia-smi finds none)"
  [ -n "${PROFILE:-}" ] || command -v nvcc > /dev/null ||
    missing+="${missing:+, }nvcc (in the CUDA Toolkit; or name a program built elsewhere: PROFILE=./profile)"
  [ -z "$missing" ] || fail 3 "missing: $missing"
fi
need() { make -s -C "$root" "build/$1" >&2 || fail 1 "cannot build build/$1"; }
[ "${cases[*]}" = largest ] || [ -n "${PROFILE:-}" ] || { need profile; PROFILE=$root/build/profile; }
[[ " ${cases[*]} " != *" largest "* ]] || [ -n "${TRAIN:-}" ] || { need train; TRAIN=$root/build/train; }
mkdir -p "$(dirname "$figures")" && touch "$figures" || fail 2 "cannot write to $figures"
awk -F '\t' -v cases=" ${cases[*]} " '!index(cases, " " $1 " ")' "$figures" > "$figures.tmp" &&
  mv "$figures.tmp" "$figures" # figures of other cases stay
if [ "${cases[*]}" != largest ]; then # a later record of the same counts
  about="A CPU, $(uname -m)"
  if [ "$device" != cpu ]; then
    about=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | sed '1s/, /, driver /;q')
    about="One $about with CUDA $(nvidia-smi | sed -nE 's/.*CUDA Version: ([0-9.]+).*/\1/p')"
  fi
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
else table "${cases[@]}" | into_page; fi
[ -z "$failed" ]
