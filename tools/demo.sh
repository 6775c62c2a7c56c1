#!/usr/bin/env bash
# demo.sh [TEXT] - trains the six techniques of the assignment on real text and prints what each of them saves.
# Without TEXT it takes the Polish manual pages of Debian's packages. Called by `make demo` in the repository root.
# Settings from the environment: STEPS, BATCH, BUDGET, TECHNIQUES. Leaves its files in results/demo.
set -u -o pipefail
text=${1:-} name=manpages_pl cache=build/demo out=results/demo
steps=${STEPS:-200} batch=${BATCH:-8} budget=${BUDGET:-256M}
techniques=${TECHNIQUES:-fp32 bf16 bf16_flash bf16_window16 bf16_window32 fp32_checkpointing}
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive} # threads that spin lose much on a machine with other work
fail() { echo "demo: $*" >&2; exit 1; }

manual_pages() { # the text of the pages of two packages, without installing them
  mkdir -p "$cache" && cd "$cache" || return
  fetch() { apt-get download manpages-pl manpages-pl-dev >/dev/null 2>&1; }
  as=; [ "$(id -u)" = 0 ] || as="sudo -n"
  ls manpages-pl_*.deb manpages-pl-dev_*.deb >/dev/null 2>&1 || fetch || { $as apt-get -qq update >/dev/null 2>&1 && fetch; } ||
    fail "cannot get manpages-pl and manpages-pl-dev: run 'sudo apt-get update', or bring a text: make demo TEXT=my_text.txt"
  for package in *.deb; do dpkg-deb -x "$package" pages || return; done
  find pages -path '*/man[1-9]/*.gz' -type f | LC_ALL=C sort | xargs gzip -dc | LC_ALL=C awk "$prose" | cat -s
}

prose='
function plain(s,   n) { # a line without the escapes of roff
    gsub(/\\f(\[[^]]*\]|\(..|.)|\\s[-+]?[0-9]|\\[hvwklLoX]\047[^\047]*\047|\\n[-+]?(\(..|\[[^]]*\]|.)/, "", s)
    gsub(/\\[&^|%:\/,!cud)]|\\z.|\\".*|[\001-\010]/, "", s)
    while (match(s, /\\(\(..|\[[^]]*\]|\*\(..|\*\[[^]]*\]|\*.)/)) {
        n = substr(s, RSTART + 1, RLENGTH - 1)
        gsub(/[][(*]/, "", n)
        s = substr(s, 1, RSTART - 1) glyph[n] substr(s, RSTART + RLENGTH)
    }
    gsub(/\\[ ~0t]/, " ", s); gsub(/\\\\|\\e/, "\001", s); gsub(/\\/, "", s); gsub("\001", "\\", s)
    return s
}
function words(s, glue,   a, all) { # the arguments of a macro, in quotes or not
    while (match(s, /"([^"]|"")*"?|([^ \t"\\]|\\.)([^ \t\\]|\\.)*/)) {
        a = substr(s, RSTART, RLENGTH); s = substr(s, RSTART + RLENGTH)
        if (a ~ /^"/) { gsub(/^"|"$/, "", a); gsub(/""/, "\"", a) }
        all = all (all == "" ? "" : glue) a
    }
    return all
}
function add(s) { text = text (text == "" ? "" : " ") plain(s); if (tag && text ~ /[^ ]/) { tag = 0; line() } }
function line() { # prints it, unless it was left in English
    gsub(/[ \t]+/, " ", text); gsub(/^ | $/, "", text)
    if (text ~ /[[:alnum:]]/ && (text !~ / (the|of|is|and|are|be) / || text ~ /[\303-\305]/)) { print text; open = 1 }
    text = ""
}
function paragraph() { line(); if (open) print ""; open = 0 }
BEGIN {
    pairs = "aq \047 cq \047 oq ` ga ` dq \" ha ^ ti ~ rs \\ at @ sl / bv | hy - em — en – lq „ rq ” bu • co © de ° >= ≥ <= ≤"
    split(pairs " mc µ mu × -> → L\" \" R\" \" C` \" C\047 \" `` „ \047\047 ” Aq \047 la < ra > Gt > Am &", g, " ")
    for (i = 1; i in g; i += 2) glyph[g[i]] = g[i + 1]
}
/^\.TH / { paragraph(); page = 1; skip = ""; next }
skip != "" { if ($0 ~ skip) skip = ""; next }
/^[.\047]?[ \t]*\\["#]/ || /^[.\047][ \t]*$/ || !page && !/^\.S[HS]/ { next }
!/^[.\047]/ { if (/^[ \t]*$/) paragraph(); else add($0); next }
{
    rest = $0; gsub(/^[.\047][ \t]*|[ \t]+$/, "", rest)
    macro = rest; sub(/[ \t].*/, "", macro); sub(/^[^ \t]*[ \t]*|\\".*/, "", rest)
}
macro ~ /^(de|am|ig)1?$/ { skip = "^[.\047][ \t]*\\." }
macro ~ /^(if|ie|el)$/ && /\\\{/ && !/\\\}/ { skip = "\\\\}" }
macro ~ /^(TS|EX|nf|Vb|EQ)$/ { line(); skip = "^[.\047][ \t]*(TE|EE|fi|Ve|EN)" }
macro == "SH" { page = rest !~ /SK.*ADNIA|T.*UMACZENIE|ZG.*ASZANIE|PRAWA/ } # synopsis and the same notes on every page
macro ~ /^S[HS]$/ { paragraph(); tag = page && rest == ""; if (page && !tag) { add(words(rest, " ")); paragraph() } }
macro == "IP" { paragraph(); add(words(rest, "\t")); sub(/\t.*/, "", text); line() }
macro ~ /^(PP|P|LP|TP|HP|sp|Sp|RS|RE)$/ { paragraph(); tag = macro == "TP" }
macro ~ /^(TQ|br)$/ { line(); tag = macro == "TQ" }
macro ~ /^(B|I|R|SM|SB|CW)$/ && rest != "" { add(words(rest, " ")) }
macro ~ /^(BR|BI|IR|IB|RB|RI|OP)$/ { add(words(rest, "")) }
macro ~ /^[UM]E$/ { text = text plain(words(rest, "")) }
END { paragraph() }'

make -s --no-print-directory train || fail "the trainer does not build"
mkdir -p "$cache" "$out"
if [ -n "$text" ]; then
  [ -f "$text" ] || fail "there is no file $text"
  name=$(basename "$text" | sed 's/\.[^.]*$//; s/[^A-Za-z0-9-]/_/g')
else
  text=$cache/$name.txt
  [ -s "$text" ] || { (manual_pages) > "$text.part" && [ -s "$text.part" ] && mv "$text.part" "$text"; } || exit 1
fi
bytes=$(wc -c < "$text") vocab=$((bytes / 500 > 10000 ? 10000 : bytes / 500 < 512 ? 512 : bytes / 500))
model="--layers 2 --heads 4 --d-model 128 --seq-len 128"
train() { build/train --dataset "$name" --results-dir "$out" $model "$@" 2> "$out/err" || { cat "$out/err" >&2; return 1; }; }
train --data "$text" --vocab-size $vocab --steps 1 --batch-size 1 --eval-batches 1 > /dev/null || exit 1
vocab=$(od -An -tu8 -j24 -N8 "$out/$name.train.tokens" | tr -d ' ')
echo "$text: $bytes bytes, vocabulary $vocab; $steps steps each of $model --batch-size $batch"
field() { sed -n "s/.*\"$1\": \([^,}]*\).*/\1/p" "$out/${name}_${technique}_metrics.json"; }
median() { sed -n 's/.*"ms": \([0-9.]*\).*/\1/p' "$out/${name}_$technique.jsonl" | sort -n | awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }'; }
rows=
for technique in $techniques; do
  train --data "$out/$name" --technique $technique --batch-size $batch --steps $steps --warmup-steps 20 --seed 1 \
    --eval-batches 40 > /dev/null || exit 1
  largest=$(train --technique $technique --vocab-size $vocab --find-max-batch --memory-budget $budget) || exit 1
  row=$technique
  for f in perplexity bits_per_byte accuracy peak_forward_bytes peak_backward_bytes arena_bytes; do row+=" $(field $f)"; done
  rows+="$row $(median) $largest"$'\n'
  echo "  $technique: perplexity $(field perplexity), $(median) ms a step"
done
columns="technique perplexity bits/byte accuracy MiB_forward backward arena batch_in_$budget ms/step tokens/s memory speed"
printf %s "$rows" | awk -v columns="$columns" -v tokens=$((batch * 128)) '
  BEGIN {
    n = split(columns, c, " ")
    for (i = 1; i <= n; i++) {
      w = i == 1 ? 18 : length(c[i]) < 8 ? 8 : length(c[i]); line = substr("-------------------", 1, w + 1)
      gsub("_", " ", c[i]); head = head sprintf("| %*s ", i == 1 ? -w : w, c[i]); rule = rule "|" (i == 1 ? ":" line : line ":")
    }
    print head "|\n" rule "|"
  }
  NR == 1 { arena = $7; ms = $8 }
  { printf "| %-18s | %10.2f | %9.4f | %6.2f %% | %11.1f | %8.1f | %8.1f | %13d | %8.1f | %8.0f | %6.0f %% | %7.2fx |\n",
      $1, $2, $3, 100 * $4, $5 / 2^20, $6 / 2^20, $7 / 2^20, $9, $8, tokens / $8 * 1000, 100 * $7 / arena, ms / $8 }' | tee "$out/comparison.md"
echo "
Memory is exact, as planned so allocated. Speed is a GPU's matter: a CPU computes 16-bit products in FP32." | tee -a "$out/comparison.md"
printf %s "$rows" | awk '
  $1 ~ /^(fp32|bf16|bf16_flash|fp32_checkpointing)$/ { n++; if (!low || $2 < low) low = $2; if ($2 > high) high = $2 }
  END { if (n) printf "The exact techniques agree to %.2f %% in perplexity; the limit is 1 %%.\n", 100 * (high / low - 1)
    exit high > 1.01 * low }' || fail "the exact techniques do not agree"
