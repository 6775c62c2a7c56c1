#!/usr/bin/env bash
# plots.sh RESULTS_DIR... - draws results.csv and timeline.csv, which tools/report.c wrote, as PNG and SVG in
# RESULTS_DIR/plots.
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

# Lines and points differ in dashes and shapes, areas in patterns: colour is never needed to tell them apart.
style='set encoding utf8; set grid lc rgb "#c8c8c8" lw 0.6; set tics nomirror; set border 3
set style fill pattern 1 border -1
set dashtype 6 (12,4); set dashtype 7 (2,2,8,2); set dashtype 8 (10,3,2,3,2,3); set dashtype 9 (4,6)
array shape[12] = [5, 4, 6, 8, 10, 12, 7, 9, 11, 1, 2, 3]
array ink[12] = ["#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9", "#7f3fbf", \
  "#444444", "#a00000", "#005000", "#000080"]
do for [i = 1:12] { set linetype i lw 1.8 dt 1 + (i - 1) % 9 pt shape[i] ps 1.3 lc rgb ink[i] }
set key outside right top vertical Left reverse samplen 4 spacing 1.15 noenhanced
set datafile separator "\t"; set title noenhanced'

draw() { # NAME SIZE COMMANDS: adds a plot to the script, in both formats
  local format
  for format in "pngcairo:png" "svg background 'white':svg"; do
    printf '%s\n' "reset; set terminal ${format%:*} size $2 font 'Sans,11' noenhanced" \
      "set output 'plots/$1.${format##*:}'" "$style" "$3" "unset multiplot; unset output"
  done >> script
}
rows() { awk -F '\t' -v OFS='\t' "$1" all; } # those for which an awk condition holds
distinct() { awk -F '\t' -v c="$1" '!seen[$c]++ { print $c }' "$2"; }
number() { distinct "$1" "$2" | wc -l; }

curves() { # NAME ROWS AXIS_COLUMN AXIS_TITLE COLUMN TITLE: a curve for each technique
  local t commands=
  [ "$(number "$3" "$2")" -gt 1 ] || return 0
  while read -r t; do
    awk -F '\t' -v t="$t" '$2 == t' "$2" | sort -t "$(printf '\t')" -n -k "$3" > "$1.$t"
    commands+="${commands:+, }'$1.$t' using $3:$5 with linespoints title '$t'"
  done < <(distinct 2 "$2")
  draw "$1" 1000,560 "set xlabel '$4 (logarithmic)'; set ylabel '$6'; set logscale x 2; set yrange [0:*]
    set offsets graph 0.02, graph 0.02, 0, 0
    set xtics ($(distinct "$3" "$2" | sort -n | paste -sd, -)); plot $commands"
}

# The range of an axis from 0 with room for labels, and about three tics at a round distance.
axis='$c + 0 > top { top = $c + 0 }
  END {
    if (!top) top = 1
    step = top / 2.9
    for (p = 1; p > step; p /= 10);
    while (p * 10 <= step) p *= 10
    tic = p * (step > 5 * p ? 10 : step > 2 * p ? 5 : step > p ? 2 : 1)
    printf "set xrange [0:%g]; set xtics 0, %g", top * 1.4, tic
  }'
bars() { # NAME ROWS TITLE [COLUMN AXIS_TITLE FORMAT]...: panels side by side, a bar for each technique
  local name=$1 data=$2 title=$3 commands='' labels=':ytic(2)' count high width from to
  shift 3
  count=$(wc -l < "$data") high=$((130 + 34 * count)) width=$((72 / ($# / 3)))
  [ "$count" -gt 1 ] || return 0
  for ((from = 26; $# > 0; from += width)); do
    to=$((from + width * 9 / 10))
    commands+="set lmargin at screen $from / 100.0; set rmargin at screen $to / 100.0; set xlabel '$2'
      $(awk -F '\t' -v c="$1" "$axis" "$data")
      plot '$data' using (\$$1 / 2):0:(\$$1 / 2):(0.36)$labels with boxxyerror \\
          fill pattern 4 lc rgb 'black' dt 1 notitle, \\
        '' using $1:0:(sprintf('$3', \$$1)) with labels left offset 0.6, 0 notitle
      unset ytics
"
    labels=
    shift 3
  done
  draw "$name" 1100,$high "set yrange [$count - 0.4:-0.6]; set ytics noenhanced scale 0; unset key
    set tmargin at screen 1 - 34.0 / $high
    set bmargin at screen 62.0 / $high; set multiplot title '$title' noenhanced
    $commands"
}
tradeoff() { # ROWS BATCH: memory against time; the front joins what nothing beats in both
  local t commands=
  awk -F '\t' '$11 == 1' "$1" | sort -t "$(printf '\t')" -g -k 7 > front
  while read -r t; do
    awk -F '\t' -v t="$t" '$2 == t' "$1" > "tradeoff.$t"
    commands+="'tradeoff.$t' using 7:6 with points title '$t', "
  done < <(distinct 2 "$1")
  draw memory_speed_tradeoff 1000,560 "set title 'Batch $2: lower left is better'
    set xlabel 'time of a step, ms'; set ylabel 'memory, MiB'
    set xrange [0:*]; set yrange [0:*]; set offsets 0, graph 0.05, graph 0.05, 0
    plot $commands'front' using 7:6 with steps lw 2 dt 3 lc rgb '#404040' title 'Pareto front'"
}

# A line for each technique that saves or costs memory, with a column for each batch.
by_batch='NR == FNR { batch[++n] = $1; next }
  { v[$2, $3] = $9; if (!seen[$2]++ && $9 != 0) name[++m] = $2 }
  END {
    for (i = 1; i <= m; i++) {
      line = name[i]
      for (k = 1; k <= n; k++) line = line OFS v[name[i], batch[k]]
      print line
    }
  }'
saved() { # ROWS: memory saved against the baseline of the same batch, a bar for each batch
  local b n=2 commands=
  distinct 3 "$1" > batches
  awk -F '\t' -v OFS='\t' "$by_batch" batches "$1" > saved
  [ -s saved ] || return 0
  while read -r b; do
    commands+="${commands:+, }'saved' using $n:xtic(1) fs pattern $((n * 2 - 3))"
    commands+=" lc rgb ink[$((n - 1))] dt 1 title 'batch $b'"
    n=$((n + 1))
  done < batches
  draw memory_saved 1000,600 "set style data histogram; set style histogram clustered gap 1
    set ylabel 'memory saved against the baseline, %'
    set xtics rotate by -35 noenhanced; set rmargin 14; set xzeroaxis lt -1; set key top left inside
    set yrange [*<0:0<*]; set offsets 0, 0, graph 0.18, 0; plot $commands"
}

highest='NR > 1 { s = 0; for (k = 3; k <= NF; k++) s += $k; if (s > top) top = s }
  END { print top / 1048576 * 1.05 }'
stacked='$1 == t {
    s = 0; line = n++
    for (k = 3; k <= NF; k++) { s += $k / 1048576; line = line OFS s }
    print line, $2
  }'
timelines() { # memory in use through a step, stacked by category, on the same scale for every technique
  local t k top half commands categories
  top=$(awk -F , "$highest" "$1/timeline.csv")
  categories=$(head -n 1 "$1/timeline.csv" | cut -d, -f 3- | tr , ' ')
  while read -r t; do
    awk -F , -v OFS='\t' -v t="$t" "$stacked" "$1/timeline.csv" > "line.$t"
    half=$(awk -F '\t' '$10 != "forward" { print $1; exit }' "line.$t")
    commands=
    for k in 8 7 6 5 4 3 2 1; do
      commands+="${commands:+, }'line.$t' using 1:$((k + 1)) with filledcurves y1=0"
      commands+=" fs pattern $((k - 1)) lc rgb ink[$k] dt 1 title word(categories, $k)"
    done
    # outlines, over all areas
    commands+=", for [k=2:9] 'line.$t' using 1:k with lines lw 0.8 lc rgb 'black' dt 1 notitle"
    draw "timeline_$t" 1000,480 "categories = '$categories'; set title '$t'
      set xlabel 'operation'; set ylabel 'memory in use, MiB'
      set xrange [0:$(($(wc -l < "line.$t") - 1))]; set yrange [0:$top]; set grid front
      half = $half; set arrow from half, 0 to half, $top nohead front lw 1.5 dt 2
      set label 'forward' at half, graph 1.02 right offset -1, 0
      set label 'backward, step' at half, graph 1.02 left offset 1, 0; plot $commands"
  done < <(awk -F , 'NR > 1 && !seen[$1]++ { print $1 }' "$1/timeline.csv")
}
add_to_page() { # RESULTS: the plots belong to comparison.md
  local file name
  {
    grep -v '^!\[' "$1/comparison.md"
    echo
    for file in "$plots"/*.png; do
      name=$(basename "$file" .png)
      echo "![$name](plots/$name.png)"
    done
  } | cat -s > page
  rm -f "$1/comparison.md" && cp page "$1/comparison.md" || fail 3 "cannot write $1/comparison.md"
}

# group technique batch length layers MiB ms thousand-tokens/s saved-% perplexity pareto largest-batch
columns='function number(s) { s += 0; return s > -1e15 && s < 1e15 ? s : 0 }
  NR == 1 { for (i = 1; i <= NF; i++) c[$i] = i; next }
  {
    memory = number($c["memory"])
    print $2, $3, number($c["batch_size"]), number($c["seq_len"]), number($c["layers"]), \
      number($c["device_bytes"] / 1048576), number($c["ms_median"]), number($c["tokens_per_s"] / 1000), \
      (memory > 0 ? 100 * (1 - memory) : 0), number($c["perplexity"]), $c["pareto"], \
      number($c["largest_batch"])
  }'
failed=
for results in "$@"; do
  [[ $results = /* ]] || results=$folder/$results
  plots=$results/plots
  [ -s "$results/results.csv" ] && [ -s "$results/timeline.csv" ] ||
    fail 3 "there is no $results/results.csv or timeline.csv; build/report --results-dir $results makes them"
  check "$results/results.csv"
  check "$results/timeline.csv"
  [ ! -L "$plots" ] || fail 3 "$plots is a link: remove it"
  rm -rf plots && mkdir plots
  awk -F , -v OFS='\t' "$columns" "$results/results.csv" > all
  : > script
  same=batch # the group in which only techniques differ
  [ -z "$(rows '$1 == "optimizations"')" ] || same=optimizations
  top=$(rows "\$1 == \"$same\"" | cut -f 3 | sort -n | tail -n 1) top=${top:-0}
  rows "\$1 == \"$same\" && \$3 == $top" > top
  rows "\$1 == \"$same\" && \$3 == $top && \$2 ~ /^bf16_(flash|window[0-9]+)\$/" > windows
  if [ -s top ]; then
    tradeoff top "$top"
    memory=(6 'memory, MiB' %.0f) time=(7 'time of a step, ms' %.1f)
    bars all_techniques top "Batch $top" "${memory[@]}" "${time[@]}"
    bars windows windows "Windows at batch $top" "${memory[@]}" "${time[@]}" \
      10 'validation perplexity' %.2f
  fi
  for group in batch:3:'batch, sequences' length:4:'sequence length, tokens' depth:5:'depth, layers'; do
    IFS=: read -r name column title <<< "$group"
    rows "\$1 == \"$name\"" > "$name"
    curves "memory_vs_$name" "$name" "$column" "$title" 6 'memory, MiB'
    curves "speed_vs_$name" "$name" "$column" "$title" 8 'thousand tokens/s'
  done
  rows "\$1 == \"$same\"" > same
  saved same
  rows '$1 == "largest"' > largest
  bars largest_batch largest 'Each technique at its own largest batch' \
    3 'batch, sequences' %.0f 6 'memory, MiB' %.0f 8 'thousand tokens/s' %.4g
  timelines "$results"
  gnuplot script 2> err || { echo "plots: $(grep . err | tail -n 1)" >&2; failed=1; }
  mkdir -p "$plots" && rm -f "$plots"/*.png "$plots"/*.svg && cp -R plots/. "$plots" ||
    fail 3 "cannot write to $plots"
  [ ! -s "$results/comparison.md" ] || add_to_page "$results"
  echo "plots: $(find "$plots" -name '*.png' | wc -l) in $plots" >&2
done
[ -z "$failed" ]
