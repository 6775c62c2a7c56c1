#!/usr/bin/env bash
# demo.sh [TEXT [OPTION...]] - suite A at a size for a CPU on real text: what does each technique save?
# `make demo` calls it in the repository root. The default text is the Polish manual pages of Debian, with
# results in results/demo. Those of another text are in results/demo/NAME. Options are those of
# experiments.sh.
set -u -o pipefail
text=${1:-} name=manpages_pl cache=build/demo out=results/demo
shift $(($# > 0))
fail() { echo "demo: $*" >&2; exit 1; }

manual_pages() { # the text of the pages of two packages, without installing them
  mkdir -p "$cache" && cd "$cache" || return
  fetch() { apt-get download manpages-pl manpages-pl-dev >/dev/null 2>&1; }
  as=; [ "$(id -u)" = 0 ] || as="sudo -n"
  ls manpages-pl_*.deb manpages-pl-dev_*.deb > /dev/null 2>&1 || fetch ||
    { $as apt-get -qq update > /dev/null 2>&1 && fetch; } ||
    fail "cannot download manpages-pl and manpages-pl-dev: run 'sudo apt-get update'," \
      "or give a text: make demo TEXT=my_text.txt"
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
function add(s) {
    text = text (text == "" ? "" : " ") plain(s)
    if (tag && text ~ /[^ ]/) { tag = 0; line() }
}
function line() { # prints it, unless it was left in English
    gsub(/[ \t]+/, " ", text); gsub(/^ | $/, "", text)
    if (text ~ /[[:alnum:]]/ && (text !~ / (the|of|is|and|are|be) / || text ~ /[\303-\305]/)) {
        print text
        open = 1
    }
    text = ""
}
function paragraph() { line(); if (open) print ""; open = 0 }
BEGIN {
    pairs = "aq \047 cq \047 oq ` ga ` dq \" ha ^ ti ~ rs \\ at @ sl / bv | hy - em — en – lq „ rq ”"
    pairs = pairs " bu • co © de ° >= ≥ <= ≤ mc µ mu × -> → L\" \" R\" \" C` \" C\047 \" `` „"
    split(pairs " \047\047 ” Aq \047 la < ra > Gt > Am &", g, " ")
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
macro == "SH" { page = rest !~ /SK.*ADNIA|T.*UMACZENIE|ZG.*ASZANIE|PRAWA/ } # synopsis; notes of every page
macro ~ /^S[HS]$/ {
    paragraph()
    tag = page && rest == ""
    if (page && !tag) { add(words(rest, " ")); paragraph() }
}
macro == "IP" { paragraph(); add(words(rest, "\t")); sub(/\t.*/, "", text); line() }
macro ~ /^(PP|P|LP|TP|HP|sp|Sp|RS|RE)$/ { paragraph(); tag = macro == "TP" }
macro ~ /^(TQ|br)$/ { line(); tag = macro == "TQ" }
macro ~ /^(B|I|R|SM|SB|CW)$/ && rest != "" { add(words(rest, " ")) }
macro ~ /^(BR|BI|IR|IB|RB|RI|OP)$/ { add(words(rest, "")) }
macro ~ /^[UM]E$/ { text = text plain(words(rest, "")) }
END { paragraph() }'

make -s --no-print-directory train build/report || fail "the trainer does not build"
mkdir -p "$cache"
if [ -n "$text" ]; then
  [ -f "$text" ] || fail "there is no file $text"
  name=${text##*/} name=${name%.*}
  out+=/${name//[^A-Za-z0-9_-]/_}
else
  text=$cache/$name.txt
  if [ ! -s "$text" ]; then
    (manual_pages) > "$text.part" && [ -s "$text.part" ] && mv "$text.part" "$text" || exit 1
  fi
fi
if [ -e "$out/a/experiment_summary.json" ] && [ build/train -nt "$out/a/experiment_summary.json" ]; then
  mv --backup=numbered -T "$out/a" "$out/a.old" || fail "cannot move $out/a away"
  echo "demo: results of another build are now in $out/a.old" >&2
fi
exec tools/experiments.sh a --small --data "$text" --results-dir "$out" "$@"
