#!/usr/bin/env bash
# profile.sh - where the time of a training step goes, for several techniques side by side.
usage() {
  cat << 'TEXT'
profile.sh CASE...       cases of bench.sh, as in gpt2_16 gpt2_64: each operation's ms in BF16 and in FP8, and
                         time, memory, clock and power of a step
profile.sh --OPTION...   one model and technique, with rates: the options of build/profile, listed by --help
Variables: TECHNIQUES (bf16_flash fp8_flash); STEPS (100) for time, clock and power; DEVICE (cuda); PROFILE, a
program built elsewhere (build/profile).
TEXT
}
set -u -o pipefail
export LC_ALL=C # decimals have a point
root=$(cd "$(dirname "$0")/.." && pwd)
profile=${PROFILE:-$root/build/profile} device=${DEVICE:-cuda} gpu=${CUDA_VISIBLE_DEVICES:-0}
read -ra compared <<< "${TECHNIQUES:-bf16_flash fp8_flash}"
fail() { echo "profile: $2" >&2; exit "$1"; }
. "$root/tools/cases.sh"
case ${1:-} in
  '') usage; exit;;
  --help) usage; echo; exec "$profile" --help;;
  -*) exec "$profile" "$@";;
esac
for name; do [ -n "${model[$name]:-}" ] || fail 2 "there is no case $name: $all"
  [[ ! ${model[$name]} =~ --(only|generate) ]] || fail 2 "$name is not a training step"; done
work=$(mktemp -d) watch=
trap '[ -z "$watch" ] || kill $watch 2> /dev/null; rm -rf "$work"' EXIT

measure() { # CASE TECHNIQUE: into files of $work
  local step=(--device "$device" ${model[$1]} --technique "$2")
  nvidia-smi -i "${gpu%%,*}" --query-gpu=clocks.sm,power.draw --format=csv,noheader,nounits -lms 100 \
    > "$work/$2.watch" 2> "$work/err" & watch=$!
  "$profile" "${step[@]}" --only-step --steps "${STEPS:-100}" > "$work/$2.step" || fail 1 "$1 $2: no step"
  kill $watch 2> "$work/err"; watch=
  "$profile" "${step[@]}" --steps 10 > "$work/$2.table" || fail 1 "$1 $2: no table"
}
# Files come in the order of the techniques: .step, .watch, .table. The card idles before the steps: samples
# count from 90 % of the highest power.
table='function number(key) { return match($0, "\"" key "\": ") ? substr($0, RSTART + RLENGTH) + 0 : 0 }
  function total(title, format, of,  i) {
    printf "| %s | |", title
    for (i = 1; i <= n; i++) printf " | " (i in of ? format : "–") " | |", of[i]
    print ""
  }
  FILENAME ~ /step$/ { step[++n] = number("ms"); bytes[n] = number("arena_bytes") / 1e6 }
  FILENAME ~ /watch$/ && split($0, sample, ", ") == 2 && sample[2] > 0 {
    hertz[n, ++samples[n]] = sample[1]; watt[n, samples[n]] = sample[2]
    if (sample[2] > most[n]) most[n] = sample[2]
  }
  FILENAME ~ /table$/ && split($0, c, " *[|] *") > 7 && c[4] ~ /^[0-9]+$/ {
    key = c[2] " | " c[3]; seen[key]
    times[key, n] += c[4]; ms[key, n] += c[5]; sum[n] += c[5]
    if (ms[key, n] > top[key]) top[key] = ms[key, n]
  }
  END {
    split(names, name, " "); sort = "sort -t \"\t\" -k 1rg | cut -f 2-"
    line = "| operation | widths |"; rule = "|---|---|"
    for (i = 1; i <= n; i++) line = line " " name[i] ": times | ms | share |"
    for (i = 1; i <= n; i++) rule = rule "---:|---:|---:|"
    print line "\n" rule
    for (key in seen) {
      line = top[key] "\t| " key " |"
      for (i = 1; i <= n; i++)
        line = line ((key, i) in ms ? sprintf(" %d | %.3f | %.1f %% |", times[key, i], ms[key, i], \
          100 * ms[key, i] / sum[i]) : " | | |")
      print line | sort
    }
    close(sort)
    for (i = 1; i <= n; i++)
      for (k = 1; k <= samples[i]; k++) {
        if (watt[i, k] < 0.9 * most[i]) continue
        count[i]++
        clock[i] += (hertz[i, k] - clock[i]) / count[i]
        power[i] += (watt[i, k] - power[i]) / count[i]
      }
    total("operations alone", "%.3f", sum); total("a step", "%.3f", step); total("memory, MB", "%.0f", bytes)
    total("clock, MHz", "%.0f", clock); total("power, W", "%.0f", power)
  }'
for name; do
  files=()
  for technique in "${compared[@]}"; do
    measure "$name" "$technique"
    files+=("$work/$technique".{step,watch,table})
  done
  printf '\n%s\n\n' "${title[$name]}"
  awk -v names="${compared[*]}" "$table" "${files[@]}" || fail 1 "no table"
done
