#!/usr/bin/env bash
# plots.sh RESULTS_DIR... - draws results.csv and timeline.csv, which report.c wrote, and the losses in
# the logs. The plots go to RESULTS_DIR/plots, as PNG and SVG.
#
# Techniques and numbers become parts of commands and of file names. So a table may hold nothing but letters,
# digits and _ . + - (check). RESULTS_DIR may have any name: all work is done in a temporary folder.
set -u -o pipefail
export LC_ALL=C # ranges of letters and decimal points of awk, grep and sort
fail() { echo "plots: $2" >&2; exit "$1"; }
command -v gnuplot > /dev/null ||
  fail 3 "gnuplot is missing; on Debian or Ubuntu: sudo apt-get install gnuplot-nox"
[ $# -gt 0 ] || { echo "plots.sh RESULTS_DIR..." >&2; exit 2; }
folder=$PWD work=$(mktemp -d) && cd "$work" || exit 3
trap 'rm -rf "$work"' EXIT
check() { # TABLE
  grep -aqvE '^[A-Za-z0-9_.+,-]*$' "$1"
  [ $? = 1 ] || fail 3 "$1 has more in it than names and numbers: build/report makes it again"
}

# Every curve, bar and point has its name beside it, and areas that touch differ in brightness: no plot needs
# colour. The colours are those of Okabe and Ito, or near them: colour-blind readers can tell them apart.
style='set encoding utf8; set border 3; set tics nomirror noenhanced; set title noenhanced; unset key
set grid lt 1 dt 1 lc rgb "#c8c8c8" lw 1; set datafile separator "\t" missing "-"
set style textbox opaque noborder margins 0.5, 0.5 fillcolor rgb "white"
array area[8] = ["#202020", "#56b4e9", "#d55e00", "#a4dccb", "#7a4a9c", "#e0ac00", "#909090", "#ffffff"]'
# The colour of a technique, in every plot, is that of the strongest of its words.
ink='function ink(t) {
    if (t ~ /^fp8/) return "0x7b4fa3"
    if (t ~ /_budget$/) return "0x8a6d00"
    if (t ~ /selective/) return "0xcc79a7"
    if (t ~ /checkpointing_chunked/) return "0x6e6e6e"
    if (t ~ /chunked/) return "0x0072b2"
    if (t ~ /checkpointing|segments/) return "0xd55e00"
    if (t ~ /window/) return "0x009e73"
    if (t ~ /flash/) return "0x56b4e9"
    return t ~ /^(fp|tf)32$/ ? "0x000000" : "0xe69f00"
  }'

draw() { # NAME SIZE FONT_SIZE COMMANDS: adds a plot to the script, in both formats
  local format
  for format in "pngcairo:png" "svg fontscale 1.33 background 'white':svg"; do
    printf '%s\n' "reset; set terminal ${format%:*} size $2 font 'Sans,$3' noenhanced" \
      "set output 'plots/$1.${format##*:}'" "$style" "$4" "unset multiplot; unset output"
  done >> script
}
rows() { awk -F '\t' -v OFS='\t' "$1" all; } # those for which an awk condition holds
values() { awk -F '\t' -v c="$1" '!seen[$c]++ { print $c }' "$2"; } # COLUMN ROWS: each once
largest() { cut -f "$1" "$2" | sort -g | tail -n 1; } # COLUMN ROWS
baseline() { grep -xE -m 1 '(fp|tf)32'; }
only() { [ "$(values "$1" "$2" | wc -l)" != 1 ] || values "$1" "$2"; } # COLUMN ROWS: if it has one value
place() { # ROWS: what all of them share
  local batch length
  batch=$(only 3 "$1") length=$(only 4 "$1")
  printf '%s' "$where"
  [ -z "$batch$length" ] || printf ', %s' "${batch:+$batch }sequences${length:+ of $length tokens}"
}

# Commands for an axis from 0 to ROOM times the largest value, with round tics. None if the values differ by
# less than FLAT of it: such a plot says nothing.
round='function round(step,   p) { # up to 1, 2 or 5 times a power of 10
    if (step <= 0) return 1
    for (p = 1; p > step; p /= 10);
    while (p * 10 <= step && p < 1e15) p *= 10
    return p * (step > 5 * p ? 10 : step > 2 * p ? 5 : step > p ? 2 : 1)
  }'
axis='{ if ($c + 0 > top) top = $c + 0; if (NR == 1 || $c + 0 < low) low = $c + 0 }
  END {
    if (low >= top * (1 - flat)) exit
    printf "set %srange [0:%g]; set %stics %g", axis, top * room, axis, round(top / 5)
  }'
axis() { # x|y COLUMN ROOM FLAT ROWS
  awk -F '\t' -v axis="$1" -v c="$2" -v room="$3" -v flat="$4" "$round$axis" "$5"
}

# Small multiples: a panel for each technique of ROWS. PLOT draws the file `name` in the colour `ink`, and the
# file `base`, the baseline's, dotted. The files are NAME.TECHNIQUE.
panels() { # NAME ROWS TITLE X_TITLE Y_TITLE SETTINGS PLOT
  local count across down high base
  count=$(values 2 "$2" | wc -l) base=$1.$(values 2 "$2" | baseline)
  [ "$count" -gt 0 ] || return 0
  [ -s "$base" ] || echo 0 > "$base" # no baseline: nothing is dotted
  across=$((count < 4 ? count : count % 4 && count < 10 ? 3 : 4)) down=$(((count - 1) / across + 1))
  high=$((135 + down * 150))
  draw "$1" 1000,$high 11 "set grid noxtics; set multiplot layout $down,$across title \"$3\" noenhanced \\
      margins 0.085, 0.985, 56.0 / $high, 1 - 78.0 / $high spacing 0.025, 40.0 / $high
    techniques = '$(values 2 "$2" | paste -sd ' ' -)'; base = '$base'
    inks = '$(awk -F '\t' '!seen[$2]++ { print $13 }' "$2" | paste -sd ' ' -)'; $6
    do for [i = 1:$count] {
      name = '$1.' . word(techniques, i); ink = int(word(inks, i))
      left = i % $across == 1 || $across == 1; lowest = i + $across > $count
      set title word(techniques, i) offset 0, -0.7
      set xlabel (lowest ? '$4' : ''); set format x (lowest ? '%g' : '')
      set ylabel (left ? '$5' : ''); set format y (left ? '%g' : '')
      plot $7
    }"
}

# Names of points stand in a column beside the plot, in the order of their heights, each with a line to its
# point in the colour of both.
names='{ x[NR] = $7; y[NR] = $6; name[NR] = $2 ($11 > 0 ? " *" : ""); ink[NR] = $13 }
  $6 > top { top = $6 }
  $7 > far { far = $7 }
  END {
    if (!far) far = 1
    if (top <= low) top = low + 1
    gap = (top - low) / 14; place = top + gap
    for (i = 1; i <= NR; i++) place = at[i] = y[i] < place - gap ? y[i] : place - gap
    for (i = NR; i && at[i] < low + (NR - i) * gap; i--) at[i] = low + (NR - i) * gap
    printf "set xrange [0:%g]; set yrange [%g:%g]\n", far * 1.05, low, top + (top - low) * 0.08
    for (i = 1; i <= NR; i++) {
      printf "set arrow from %g, %g to %g, %g nohead lc rgb %s dt 3\n", x[i], y[i], far * 1.09, at[i], ink[i]
      printf "set label \"%s\" at %g, %g left noenhanced\n", name[i], far * 1.1, at[i]
    }
  }'
lines() { # NAME ENDS TITLE X_TITLE Y_TITLE LOW HIGH USING: one figure, a line for each file NAME.TECHNIQUE
  [ "$(wc -l < "$2")" -gt 1 ] || return 0
  sort -t "$(printf '\t')" -rg -k 6 "$2" > "$1.ends"
  draw "lines_$1" 1000,560 11 "set rmargin at screen 0.72; unset grid; set title \"$3\"
    set xlabel '$4'; set ylabel '$5'; $(awk -F '\t' -v low="$6" -v top="$7" "$names" "$1.ends")
    plot $(awk -F '\t' -v name="$1" -v q="'" -v using="$8" '{
      printf "%s%s%s.%s%s %s with linespoints lw 2 pt %d ps 0.8 lc rgb %s dt %d", (NR > 1 ? ", " : ""), q, \
        name, $2, q, using, NR + 3, $13, seen[$13]++ % 4 + 1 }' "$1.ends")"
}

spaced='NR == 1 || last - $1 >= top / 7 { print last = $1 }' # values that have room for their labels
curves() { # NAME ROWS AXIS_COLUMN AXIS_TITLE COLUMN TITLE UNIT
  local t top
  [ "$(values "$3" "$2" | wc -l)" -gt 1 ] || return 0
  for t in $(values 2 "$2"); do
    awk -F '\t' -v t="$t" '$2 == t' "$2" | sort -t "$(printf '\t')" -n -k "$3" > "$1.$t"
    tail -n 1 "$1.$t" > "$1.$t.end" # gnuplot 5.4 crashes where a list of boxed labels is empty
    awk -F '\t' -v OFS='\t' -v x="$3" -v y="$5" '{ a = $x; $6 = $y; $7 = a; $11 = 0; print }' "$1.$t.end"
  done > ends
  top=$(largest "$3" "$2")
  panels "$1" "$2" "$6 over ${1##*_}\n$(place "$2"); dotted: the baseline" "$4" "$7" "
    set xrange [0:$top * 1.06]; $(axis y "$5" 1.2 -1 "$2")
    set xtics ($(values "$3" "$2" | sort -rg | awk -v top="$top" "$spaced" | paste -sd, -))" \
    "base using $3:$5 with lines lw 2 dt 3 lc rgb 'black', \\
      name using $3:$5 with linespoints lw 2 pt 7 ps 0.8 lc rgb ink, \\
      name.'.end' using $3:$5:(sprintf('%.0f', \$$5)) with labels boxed right offset 0.5, 0.8"
  lines "$1" ends "$6 over ${1##*_}, all techniques\n$(place "$2")" "$4" "$7" 0 \
    "$(largest "$5" "$2")" "using $3:$5"
}

# Step, seconds, the mean training loss of EACH steps, validation loss, and the last validation loss, which
# only the metrics may have. A log may hold anything, and null is no number.
log='function value(key) {
    if (!match($0, "\"" key "\": -?[0-9][-+.0-9e]*")) return ""
    number = substr($0, RSTART + length(key) + 4, RLENGTH - length(key) - 4) + 0
    return number > -1e15 && number < 1e15 ? number : ""
  }
  {
    loss = value("loss"); validation = value("val_loss"); seconds += value("ms") / 1000
    if (value("step") != "") step = value("step")
    if (loss != "") { sum += loss; n++ }
    if (n == each) { print step, seconds, sum / n, "-", "-"; n = sum = 0 }
    if (validation != "") { print step, seconds, "-", final = validation, "-"; known = step }
  }
  END { if (final && (!known || known == step)) print step, seconds, "-", final, final }'
span='NR == 1 { low = $1 }
  END {
    s = $1 > low ? $1 - low : 1
    printf "set yrange [%g:%g]; set ytics %g", low - s / 8, $1 + s / 20, round(s / 4)
  }'
losses() { # ROWS: loss against steps and against time
  local t run final file axis column title
  : > losses; : > every
  while IFS=$'\t' read -r t run final; do
    file=$results/$run.jsonl
    [ -f "$file" ] || continue
    awk -v OFS='\t' -v each=$(($(wc -l < "$file") / 60 + 1)) -v final="$final" "$log" "$file" > loss
    [ "$(wc -l < loss)" -gt 2 ] || continue # a log without losses
    tee "loss_vs_steps.$t" "loss_vs_time.$t" < loss >> every
    awk -F '\t' -v t="$t" '$2 == t' "$1" >> losses
  done < <(cut -f 2,14,16 "$1")
  for axis in 'steps:1:optimizer step' ${timed:+'time:2:seconds of training'}; do
    IFS=: read -r axis column title <<< "$axis"
    panels "loss_vs_$axis" losses "Training loss (line) and validation loss (circles, and the last value)\n$(
      place losses); dotted: training loss of the baseline" "$title" 'loss, nats' "
      set xrange [0:$(largest "$column" every) * 1.03]
      $(cut -f 3,4 every | tr '\t' '\n' | grep '[0-9]' | sort -g | awk "$round$span")" \
      "base using $column:3 with lines lw 2 dt 3 lc rgb 'black', \\
        name using $column:3 with lines lw 1.5 lc rgb ink, \\
        name using $column:4 with points pt 6 ps 0.9 lw 1.5 lc rgb 'black', \\
        name using $column:5:(sprintf('%.2f', \$5)) with labels right offset 0.5, 1.8"
  done
  while IFS=$'\t' read -r t run; do # where each line of training losses ends
    awk -F '\t' -v OFS='\t' -v row="$(awk -F '\t' -v t="$t" '$2 == t { print; exit }' losses)" '
      $3 != "-" { x = $1; y = $3 }
      END { $0 = row; $6 = y; $7 = x; $11 = 0; print }' "loss_vs_steps.$t"
  done < <(cut -f 2,14 losses) > ends
  lines loss_vs_steps ends "Training loss, all techniques\n$(place losses)" 'optimizer step' 'loss, nats' \
    $(awk '$3 != "-" { print $3 }' every | sort -g | awk 'NR == 1 { low = $1 }
      END { print low - ($1 - low) / 12, $1 }') 'using 1:3'
}

# The margin that the longest name needs, as a part of the width.
margin='length($2) > n { n = length($2) }
  END { left = 0.02 + 0.0086 * n; print (left < 0.27 ? 0.27 : left > 0.6 ? 0.6 : left) }'
flat=0.02 # a panel of bars that differ by less is left out
bars() { # NAME ROWS TITLE [COLUMN AXIS_TITLE LABEL]...: panels side by side, a bar for each technique
  local name=$1 rows=$2 title=$3 commands='' count high range left k=0
  shift 3
  count=$(wc -l < "$rows") high=$((142 + 30 * count))
  left=$(awk -F '\t' "$margin" "$rows")
  [ "$count" -gt 1 ] || return 0
  for (( ; $# > 0; )); do
    range=$(axis x "$1" 1.75 $flat "$rows")
    [ -z "$range" ] || commands+="
      set lmargin at screen $left + $k * width; set rmargin at screen $left - 0.02 + $((++k)) * width
      set xlabel \"$2\"; $range; unset xtics
      plot '$rows' using (\$$1 / 2):0:(\$$1 / 2):(0.36):(int(strcol(13)))$([ $k != 1 ] || echo ':ytic(2)') \\
          with boxxyerror fs solid 1 border lc rgb 'black' lc rgb variable, \\
        '' using (\$$1 > 0 ? \$$1 : 0):0:($3) with labels left offset 0.5, 0
      unset ytics"
    shift 3
  done
  [ $k = 0 ] || draw "$name" 1000,$high 11 "width = (1.01 - $left) / $k; unset grid
    set yrange [$count - 0.4:-0.6]; set ytics scale 0
    set tmargin at screen 1 - 66.0 / $high; set bmargin at screen 62.0 / $high
    set multiplot title \"$title\" noenhanced $commands"
}

tradeoff() { # ROWS: memory against time
  sort -t "$(printf '\t')" -rg -k 6 "$1" > tradeoff
  draw memory_speed_tradeoff 1000,520 11 "set rmargin at screen 0.72; unset grid
    set title \"Memory against time: lower left is better\n$(place "$1"); *: nothing is smaller and faster\"
    set xlabel 'time of a step, ms'; set ylabel 'memory, MiB'; $(awk -F '\t' "$names" tradeoff)
    plot 'tradeoff' using 7:6:(int(strcol(13))) with points pt 7 ps 1.6 lc rgb variable, \\
      '' using 7:6 with points pt 6 ps 1.6 lc rgb 'black'"
}

# An operation is a stair: its two ends, each with the sums up to each category, and a height if recomputed.
stairs='$1 == t {
    s = 0; line = ""
    for (k = 3; k <= NF - 2; k++) line = line OFS (s += $k / 1048576)
    line = line OFS ($NF ? 1.1 * top : 0)
    print n + 0 line "\n" ++n line
  }'
# Commands that name phases, layers and the categories that can be seen. Of many layers, some have numbers.
marks='function label(x, y, how, text) { printf "set label \"%s\" at %g, graph %g %s\n", text, x, y, how }
  function end_layer() {
    if (layer < 0 && from && first == "forward") layer = "head"
    else if (layer < 0 || layer % every) layer = ""
    else if (first == "forward" && every > 1 && layer + every > last) layer = "" # the next one is named
    label((from + n) / 2, -0.045, "center", layer)
    printf "set xtics add (\"\" %d)\n", n
    from = n; first = $2; layer = $(NF - 1)
  }
  function end_phase() {
    if (phase == "step") label(n, 1.045, "right", "optimizer")
    else label((start + n) / 2, 1.045, "center", phase)
    if (start) printf "set arrow from %d, graph 0 to %d, graph 1 nohead front lw 1.5 dt 2\n", start, start
    start = n; phase = $2
  }
  NR == 1 {
    every = last < 5 ? 1 : int(last / 12) + 2
    for (k = 3; k <= NF - 2; k++) category[count++] = $k
  }
  $1 != t { next }
  !n { phase = first = $2; layer = $(NF - 1) }
  $2 != phase { end_phase() }
  $(NF - 1) != layer { end_layer() }
  { n++; again += $NF; for (k = 0; k < count; k++) if ($(k + 3) > seen[k]) seen[k] = $(k + 3) }
  END {
    end_layer(); end_phase()
    printf "again = %d; keys = \"", again
    for (k = 0; k < count; k++) printf "%s ", (seen[k] / 1048576 > top / 500 ? category[k] : "-")
    print "\""
  }'
highest='(!t || $1 == t) && NR > 1 { s = 0; for (k = 3; k <= NF - 2; k++) s += $k; if (s > top) top = s }
  END { printf top < 100 * 1048576 ? "%.1f" : "%.0f", top / 1048576 }'
peak() { awk -F , -v t="$1" "$highest" "$table"; } # TECHNIQUE: in MiB; without a name, of all
timelines() { # TABLE: memory in use through a step, stacked by category, on one scale for all techniques
  local table=$1 base top last t title
  base=$(cut -d , -f 1 "$table" | baseline) top=$(peak '')
  last=$(awk -F , 'NR > 1 { print $(NF - 1) }' "$table" | sort -n | tail -n 1)
  for t in $(cut -d , -f 1 "$table" | sed 1d | uniq); do
    awk -F , -v OFS='\t' -v t="$t" -v top="$top" "$stairs" "$table" > "line.$t"
    title="$t: peak $(peak "$t") MiB"
    [ "$t" = "${base:-$t}" ] ||
      title+=$(awk "BEGIN { printf \", %.0f %% of ${base}'s\", 100 * $(peak "$t") / $(peak "$base") }")
    draw "timeline_$t" 1000,600 18 "set title \"$title\n$(place top)\" offset 0, 0.8; set xtics scale 0 ('' 0)
      set label 'layer' at graph -0.01, graph -0.045 right; set ylabel 'memory in use, MiB' offset 1, 0
      set key outside center bottom horizontal Left reverse samplen 0.6 width -1 font ',17'
      set xrange [0:$(($(wc -l < "line.$t") / 2))]; $(axis y 1 1.1 -1 - <<< "$top"); set style fill solid 1
      $(awk -F , -v t="$t" -v last="$last" -v top="$top" "$marks" "$table")
      $([ -z "$base" ] || [ "$t" = "$base" ] || printf '%s\n' "line = $(peak "$base")" \
        "set arrow from graph 0, first line to graph 1, first line nohead front dt 3 lw 2" \
        "set label 'peak of $base' at graph 0.01, first line offset 0, 0.6")
      plot 'line.$t' using 1:10 with filledcurves y1=0 lc rgb '#e2e2e2' title (again ? 'recomputed' : ''), \\
        for [k=8:1:-1] '' using 1:(column(k + 1)) with filledcurves y1=0 lc rgb area[k] notitle, \\
        for [k=1:8] '' using 1:(column(k + 1)) with lines lw 0.8 lc rgb 'black' notitle, \\
        for [k=1:8] keyentry with boxes fs solid 1 border lc rgb 'black' fc rgb area[k] \\
          title (word(keys, k) eq '-' ? '' : word(keys, k))"
  done
}
caption() { # PLOT: a sentence
  local words=${1//_vs_/ against }
  words=${words//_/ }
  case $1 in
    all_techniques) echo "What each technique takes.";;
    largest_batch) echo "Each technique trains at its own largest batch.";;
    lines_*) echo "All techniques in one figure: ${words#lines }.";;
    loss_vs_*) echo "Training and validation loss of each technique, against ${1#loss_vs_}.";;
    memory_saved) echo "Memory that each technique saves against the baseline.";;
    memory_speed_tradeoff) echo "Memory against the time of a step: lower left is better.";;
    timeline_*) echo "Memory through a step of ${1#timeline_}, operation by operation.";;
    windows_compared) echo "Windows compared with full attention.";;
    *) echo "${words^}, a panel for each technique.";;
  esac
}
replace() { # FILE PATH: a path that cannot be written keeps what it has
  rm -f "$2.tmp" && cp "$1" "$2.tmp" && mv -f "$2.tmp" "$2" || { rm -f "$2.tmp"; fail 3 "cannot write $2"; }
}
add_to_page() { # RESULTS: the plots belong to comparison.md
  local file name words n=0
  {
    sed '/^!\[/d; /^\*Figure [0-9]*\. /d' "$1/comparison.md"
    for file in "$plots"/*.png; do
      name=$(basename "$file" .png)
      words=$(caption "$name")
      printf '\n![%s](plots/%s.png)\n*Figure %d. %s*\n' "$words" "$name" $((++n)) "$words"
    done
  } | cat -s > page
  replace page "$1/comparison.md"
}

# group technique batch length layers MiB ms thousand-tokens/s %-of-baseline perplexity pareto largest-batch
# ink name steps validation-loss
number='function number(s) { s += 0; return s > -1e15 && s < 1e15 ? s : 0 }'
columns='NR == 1 { for (i = 1; i <= NF; i++) c[$i] = i; next }
  {
    print $2, $3, number($c["batch_size"]), number($c["seq_len"]), number($c["layers"]), \
      number($c["device_bytes"] / 1048576), number($c["ms_median"]), number($c["tokens_per_s"] / 1000), \
      100 * number($c["memory"]), number($c["perplexity"]), number($c["pareto"]), \
      number($c["largest_batch"]), ink($3), $1, number($c["steps"]), number($c["val_loss"])
  }'
said() { # KEY PATTERN: a value of the summary that matches
  sed -n "1s/^{.*\"$1\": \"\($2\)\", .*/\1/p" "$results/experiment_summary.json" 2> err
}
describe() { # sets where, device and budget, by the names of the runs and the suite's summary
  local suite
  where="text $(awk -F '\t' '{ sub("_" $2 ".*", "", $14); print $14; exit }' all)"
  suite=$(said suite '[a-e][, smal]*') device=$(said device '[a-z]*') budget=$(said budget '[0-9.]*[KMG]*')
  case $device in cpu) where="on a CPU, $where";; cuda) where="on a GPU, $where";; esac
  [ -z "$suite" ] || where="suite $suite, $where"
  [[ $budget != *[0-9] ]] ||
    budget=$(awk "BEGIN { b = $budget / 1e9; printf b < 1e4 ? \"%.4g GB\" : \"%.0f GB\", b }")
}

failed=
for results in "$@"; do
  [[ $results = /* ]] || results=$folder/$results
  plots=$results/plots
  [ -s "$results/results.csv" ] && head -n 1 "$results/timeline.csv" 2> err | grep -q ',layer,recomputed$' ||
    fail 3 "there is no $results/results.csv or timeline.csv; build/report --results-dir $results makes them"
  check "$results/results.csv"
  check "$results/timeline.csv"
  [ ! -L "$plots" ] || fail 3 "$plots is a link: remove it"
  rm -rf plots && mkdir plots
  awk -F , -v OFS='\t' "$number$ink$columns" "$results/results.csv" > all
  describe
  : > script
  same=batch # the group in which only techniques differ
  [ -z "$(rows '$1 == "optimizations"')" ] || same=optimizations
  rows "\$1 == \"$same\"" > same
  top=$(largest 3 same)
  rows "\$1 == \"$same\" && \$3 == ${top:-0}" > top
  timed=1 # a CPU's times say nothing about techniques on a GPU; rounds at least compare them on this one
  [ "$device" != cpu ] || [ -n "$(rows '$1 ~ /^round/')" ] || timed=
  time=(7 'time of a step, ms' 'sprintf($7 < 1000 ? "%.1f" : "%.0f", $7)')
  [ -n "$timed" ] || time=()
  if [ -s top ]; then
    panel=(6 'memory, MiB' 'sprintf("%.0f%s", $6, $9 > 0 && $9 != 100 ? sprintf(" (%.0f %%)", $9) : "")'
      "${time[@]}" 12 "largest batch,\nplanned${budget:+ in $budget}" 'sprintf("%.0f", $12)')
    [ $same != batch ] || # sweeps have too few steps for a quality
      panel+=(10 "perplexity after $(largest 15 top)\nsteps: early, no ranking"
        'sprintf($10 < 100 ? "%.2f" : "%.0f", $10)')
    bars all_techniques top "What each technique takes (%: of the baseline's memory)\n$(place top)" \
      "${panel[@]}"
    [ "$device" = cpu ] || tradeoff top # a CPU has no fast 16-bit arithmetic
    losses top
    awk -F '\t' -v OFS='\t' '
      $9 > 0 && $9 != 100 { $7 = $6 * (100 / $9 - 1); $6 = 100 - $9; print }' top > saved
    bars memory_saved saved "Memory saved against the baseline\n$(place saved)" \
      6 'saved, %' 'sprintf("%.0f %%", $6)' 7 'saved, MiB' 'sprintf("%.0f", $7)'
    awk -F '\t' -v OFS='\t' '$2 ~ /_(flash|window[0-9]+)$/ && $2 !~ /^fp8/ {
      window = $2 ~ /flash$/ ? $4 : substr($2, index($2, "window") + 6)
      if (window + 0 >= $4) $2 = $2 " (all " $4 ")"; else some = 1
      lines = lines $0 "\n" }
      END { if (some) printf "%s", lines }' top > windows
    flat=-1
    bars windows_compared windows "Windows compared with full attention\n$(place windows)" \
      6 'memory, MiB' 'sprintf("%.0f", $6)' "${time[@]}" \
      10 "perplexity after $(largest 15 top)\nsteps: early, no ranking" \
      'sprintf($10 < 100 ? "%.2f" : "%.0f", $10)'
    flat=0.02
  fi
  for group in batch:3:'batch, sequences' length:4:'sequence length, tokens' depth:5:layers; do
    IFS=: read -r name column title <<< "$group"
    rows "\$1 == \"$name\"" > "$name"
    curves "memory_vs_$name" "$name" "$column" "$title" 6 Memory MiB
    [ "$device" = cpu ] || curves "speed_vs_$name" "$name" "$column" "$title" 8 Speed 'thousand tokens/s'
  done
  rows '$1 == "largest"' > largest
  bars largest_batch largest "Each technique at its own largest batch\n$(place largest)" \
    3 'batch, sequences' 'sprintf("%.0f", $3)' 8 'thousand tokens/s' 'sprintf($8 < 100 ? "%.2f" : "%.0f", $8)'
  timelines "$results/timeline.csv"
  gnuplot script 2> err || { echo "plots: $(grep . err | tail -n 1)" >&2; failed=1; }
  mkdir -p "$plots" || fail 3 "cannot write to $plots"
  for file in plots/*; do [ ! -f "$file" ] || replace "$file" "$plots/${file##*/}"; done
  for file in "$plots"/*.png "$plots"/*.svg; do [ -e "plots/${file##*/}" ] || rm -f "$file"; done
  [ ! -s "$results/comparison.md" ] || add_to_page "$results"
  echo "plots: $(find "$plots" -name '*.png' | wc -l) in $plots" >&2
done
[ -z "$failed" ]
