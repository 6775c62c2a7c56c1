#!/usr/bin/env bash
# rooms.sh - what the files promise their readers: widths and sizes, rooms that use only those above them, no
# guests in the hall, no private name with two definitions, a contract for every kernel, no variable that
# threads share by mistake, operands by name.
export LC_ALL=C # decimals have a point
cd "$(dirname "$0")/.." || exit 1
passed=0 failed=0 skipped=0
tell() { if [ "$1" = 0 ]; then passed=$((passed + 1)); else failed=$((failed + 1)); echo "FAILED: $2"; fi; }
none() { # TEXT NAME: there must be no text
  [ -z "$1" ]
  tell $? "$2: $(head -n 3 <<< "$1" | cut -c1-120 | tr '\n' ' ')($(wc -l <<< "$1") in all)"
}

none "$(awk 'length > 110 {print FILENAME ":" FNR}' mtt.h mtt_kernels.cu \
  {examples{,/assignment,/learn},tools{,/planner},tests{,/units,/platforms}}/*.[ch] \
  tests/oracles/*.c {examples/assignment,tools{,/planner},tests{,/programs}}/*.sh .ci/run Makefile)" \
  "wider than 110 columns"
while read -r file most; do
  lines=$(cat $file | wc -l)
  [ "$lines" -gt 0 -a "$lines" -le "$most" ]; tell $? "$file has $lines lines, not 1 to $most"
done << SIZES # lower a bound when its file shrinks
examples/train.c 300
tools/trainer.c 300
examples/generate.c 100
examples/hello.c 60
Makefile 60
SIZES

# The manual's reading path: its rooms and headings are there, it is as long as it says, in few pieces.
path=$(awk '/^   READING PATH/ {on = 1} on && /^   WHAT IT DOES/ {exit} on' mtt.h)
lines=$(awk '
  FNR == NR { # the path: for each room its headings
    if ($1 ~ /^>>/) {room = $1; $1 = ""}
    if (room) wanted[room] = wanted[room] " " $0
    next
  }
  /^   >>[a-z]+$/ {room = $1; take = wanted[room] ~ /^ *(all|the opening)/; seen += take}
  /^\/\* ---- .* ---- \*\/$/ && room in wanted && wanted[room] !~ /^ *all/ {
    title = $0; gsub(/^\/\* ---- | ---- \*\/$|[:(].*/, "", title); sub(/ +$/, "", title)
    list = wanted[room]; gsub(/ +/, " ", list)
    take = index(list ",", " " title ",") > 0
    seen += take
  }
  take {count++; pieces += !was}
  {was = take}
  END {
    for (room in wanted) {n = split(wanted[room], parts, ","); titles += n}
    if (seen != titles) print "headings " seen " of " titles; else print count, pieces
  }' <(cat <<< "$path") mtt.h)
read -r lines pieces <<< "$lines"
[[ $lines == [12][0-9][0-9][0-9] ]] && [ "$lines" -ge 1800 -a "$lines" -le 2200 -a "$pieces" -le 7 ]
tell $? "the reading path has $lines lines in $pieces pieces, not about 2,200 in 7"

# Each member of a descriptor has a row, from which checks, checkpoints and options come. But for these.
for struct in model_desc policy optim_desc; do
  members=$(sed -n "/^typedef struct mtt_$struct {/,/^} mtt_$struct;/p" mtt.h |
    awk '/^}/ {next} inside {if (sub(/.*\*\//, "")) inside = 0; else next} {gsub(/\/\*.*\*\//, "")}
      sub(/\/\*.*/, "") {inside = 1} /;/ {gsub(/[;,*]/, " "); for (i = 2; i <= NF; i++) print $i}' |
    grep -vxE 'char|rank|seed|zero_weights|mtt_group|groups|group_count')
  [ "$(wc -l <<< "$members")" -gt 8 ]; tell $? "mtt_$struct has no members"
  none "$(for member in $members; do
    grep -q "^    MTT__FIELD($member, " mtt.h || echo "$member"
  done)" "a member of mtt_$struct without a row in its table of fields"
done

# A static function is defined before it is used. Public ones are declared at the top, so nothing but this
# test keeps a room from calling those of a room below.
none "$(awk '/^#ifdef MTT_IMPLEMENTATION/ {inside = 1} !inside {next}
  /^   >>[a-z]+$/ {room++}
  {line[NR] = $0; of[NR] = room}
  /^MTTDEF [^;]*$/ && match($0, /mtt_[a-z0-9_]+\(/) {at[substr($0, RSTART, RLENGTH)] = room}
  END {for (n in line) {
    text = line[n]
    gsub(/"[^"]*"/, "", text)
    while (match(text, /(^|[^a-z0-9_])mtt_[a-z0-9_]+\(/)) {
      name = substr(text, RSTART, RLENGTH)
      sub(/^[^a-z]/, "", name)
      if (name in at && at[name] > of[n]) print "line " n " " name ")"
      text = substr(text, RSTART + RLENGTH)
    }
  }}' mtt.h)" "a room of mtt.h uses one below it"
none "$(grep -nE '^static [^={]*\);$' mtt.h)" "a static function is declared ahead"

# No guests: words of a wing that no room of the hall, >>base to >>report, may have outside of its messages.
# Lists name the rows of wings, MTT_EIGHT_OPS(X), and MTT_IF_EIGHT(...) marks what only such a build has.
# Comments may name rooms, >>exchange, and passes of wings, [exchange].
hall=$(awk '/^   >>base$/ {on = 1} /^   >>adapters$/ {on = 0}
  /^#ifdef MTT_NO_/ {refusal = 1} /^#endif/ {refusal = 0}
  !on || refusal || /^ +(X|MTT__FIELD)\(/ {next}
  {gsub(/"[^"]*"/, "\"\""); gsub(/MTT_IF_[A-Z]+\(.*|MTT__?[A-Z]+_[A-Z]+\(X\)|>>[a-z]+|\[[a-z]+\]/, "")
    print FNR " " $0}' mtt.h)
[ "$(wc -l <<< "$hall")" -gt 1000 ]; tell $? "mtt.h has no hall"
while read -r wing words; do
  none "$(grep -E "$words" <<< "$hall")" "a guest of the wing $wing in the hall"
done << 'WORDS'
ranks mtt_ranks_|socket|poll\(|fork\(|getaddrinfo|MPI|frame|[Ee]xchang|gathered|all_(to|gather)|__share|wire
text [Tt]okenizer|mtt_encode|mtt_tokens|mtt__bpe|[Cc]orpus|mtt_batches
models [Hh]ugging|safetensors|GGUF|gguf|mtt_model_open|mtt__st_
files mtt_json_|mtt_writer|mtt__map_|mtt__crc
generator mtt_sampl|mtt_generat(e|ion)|mtt__sequence|__few_|FEW_[RQC]|cached_attention|choose_id|gather_rows
FP8 quantiz|_eight\b|_EIGHT\b|narrow|[Ee]4[Mm]3|[Ee]5[Mm]2|merge_record|rescale_|scale_entry|round_also|dx_8
adapters lora_(a|b|s|rank|alpha|targets)|_adapte|is_target|_XA\b|LORA
WORDS

# A switch leaves a wing out whole: its functions, operations, roles and passes. Options and refusals stay.
without() { # SWITCH WORDS
  code=$(${CC:-cc} -E -P -DMTT_IMPLEMENTATION -D$1 mtt.h | sed 's/"[^"]*"/""/g')
  [ "$(wc -l <<< "$code")" -gt 5000 ]; tell $? "mtt.h without $1"
  none "$(grep -oE "$2" <<< "$code" | sort -u)" "what $1 leaves out is compiled"
}
without MTT_NO_RANKS \
  'mtt__\w*(exchang|wire|transfer|share\b|divide|fullest|arrived|gathered)\w*|OP_(all|add_c|sum_sq|merge)\w*'
without MTT_NO_SOCKETS '\b(socket|poll|fork|getaddrinfo)\(|mtt_ranks_\w+|mtt__(peer|frame|guest)\b'
without MTT_NO_FP8 \
  '\w*_(eight|EIGHT)\b|OP_(quantize|rescale|merge)\w*|mtt_\w*e[45]m[23]|mtt__(rule_absorb|record|merge_\w+)\b'
without MTT_NO_ADAPTERS '\w*_adapt\w*|mtt__lora\w*|\w+_XA\b|MTT__(QKV|PROJ|FC|MLP)_[AB]\b'
without MTT_NO_GENERATOR \
  'mtt__?generat\w*|mtt__few_\w+|OP_(gather|cached_attention|choose_id)\b|mtt_(choice|chosen)\b'

# Of the operating system, only >>os and >>ranks ask.
calls='open|stat|[fl]stat|mmap|munmap|unlink|rename|mkdir|access|flock|fsync|p(read|write)|execv|madvise'
none "$(awk '/^   >>base$/ {on = 1} /^   >>ranks$/ {on = 0}
  on {gsub(/"[^"]*"/, "\"\""); print FNR " " $0}' mtt.h |
  grep -E "[^.>_a-z]($calls|clock_gettime)\(|[^A-Z_](O_|PROT_|S_IS)[A-Z]|struct stat|MTT__SYS")" \
  "a call of the operating system outside >>os"

# The lesson of mtt_kernels.cu, >>toolbox to >>flash, has no word of FP8, which has a wing of its own.
lesson=$(awk '/^   >>toolbox$/ {on = 1} /^   >>rotary and cache   / {on = 0}
  on {gsub(/"[^"]*"/, "\"\""); print FNR " " $0}' mtt_kernels.cu)
[ "$(wc -l <<< "$lesson")" -gt 1000 ]; tell $? "mtt_kernels.cu has no lesson"
guests='e4m3|e5m2|_f8|fp8|8[- ]bits?([^0-9]|$)|(^|[^a-z])eight|quantiz|wgmma|hopper_'
none "$(grep -iE "$guests" <<< "$lesson")" "a guest of a wing in the lesson"

# Names that are defined: functions, macros, types, enumerators.
defined() {
  { grep -oE '^#define MTT__[A-Z0-9_]+' "$1" | awk '{print $2}'
    grep -E '^[a-zA-Z_].*\bmtt__[a-z0-9_]+\([^;]*$' "$1" | grep -oE 'mtt__[a-z0-9_]+\(' | tr -d '('
    grep -oE '^(typedef )?(struct|union|enum|class) mtt__[a-z0-9_]+ ?\{?$' "$1" | grep -oE 'mtt__[a-z0-9_]+'
    grep -oE '^\} mtt__[a-z0-9_]+;' "$1" | grep -oE 'mtt__[a-z0-9_]+'
    sed -n '/^\(static \)\?\(typedef \)\?enum /,/}/p' "$1" | grep -oE '\bMTT__[A-Z0-9_]+ *[,=}]' |
      grep -oE 'MTT__[A-Z0-9_]+'
  } | sort -u
}
none "$(comm -12 <(defined mtt.h) <(defined mtt_kernels.cu) )" "defined in both files"

# The comment above a kernel is its contract. Kernels are launched by the house's launcher.
none "$(awk '/^\/\* / {note = ""; inside = 1}
  inside {note = note "\n" substr($0, 3)}
  /\*\/$/ {inside = 0}
  /__global__/ {
    count = split("Math Shapes Launch Requires Traffic Determinism Reference", words, " ")
    for (w = 1; w <= count; w++) if (!index(note, "\n " words[w] ":")) {print "line " FNR " " words[w]; break}
  }' mtt_kernels.cu)" "a kernel without its contract"
[ "$(grep -c '<<<' mtt_kernels.cu)" -le 2 ]; tell $? "mtt_kernels.cu launches kernels past its launcher"

# OpenMP makes only the outer loop's variable each thread's own.
none "$(awk '/MTT__THREADS\(|omp parallel for/ && !/define/ {wait = 1; own = $0; next}
  wait && /^ *for \(/ {match($0, /^ */); depth = RLENGTH; inside = 1; wait = 0; next}
  inside && NF {
    match($0, /^ */)
    if (RLENGTH <= depth) {inside = 0; next}
    if (/^ +(const |static )*[a-z_0-9]+ \**[a-z_0-9]+( =|,|;|\[)/) own = own " " $0
    text = $0
    while (match(text, /(for|MTT__BLOCKS) ?\([a-z_0-9]+( =|,)( [a-z_0-9]+,)?/)) {
      split(substr(text, RSTART, RLENGTH), v, /[^A-Za-z_0-9]+/)
      for (i = 2; v[i] != ""; i++) if (own !~ "[^a-z_0-9]" v[i] "[^a-z_0-9]") print FILENAME ":" FNR " " v[i]
      text = substr(text, RSTART + RLENGTH)
    }
  }' mtt.h)" "threads share an inner loop's variable"

# A comma in the user's decimals must not change what a script computes: mawk then reads 5.0861 as 5.
none "$(grep -LE '^export (.* )?LC_ALL=C( |$)|^\. tests/lib\.sh$' \
  $(find .ci examples tests tools -name '*.sh' -o -path .ci/run))" \
  "a script that the user's locale can change"

# Numbers of the last run on a GPU are in its record alone.
record=$(grep -oE '"(passed|date|driver)": "?[0-9.-]+' tests/gpu_last_run.json | grep -oE '[0-9.-]{5,}$' |
  sed -E 'p; s/^([0-9]{2,3})([0-9]{3})$/\1,\2/' | sort -u)
[ "$(wc -l <<< "$record")" -gt 2 ]; tell $? "tests/gpu_last_run.json has no numbers"
none "$(grep -noE '[0-9]{2,3},[0-9]{3} checks' {,tests/,tools/,examples/learn/}README.md
  grep -nwF "$record" {,tests/,tools/,examples/learn/}README.md)" "a page repeats the record of the GPU's run"

none "$(tests/mutate.sh stale)" "a stale change in tests/mutate.sh"
none "$(grep -nE 'op->(in|out)\[' mtt.h mtt_kernels.cu {examples{,/*},tools{,/*},tests{,/*}}/*.[ch])" \
  "an operand by number"

echo "$passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ]
