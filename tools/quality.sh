#!/usr/bin/env bash
# quality.sh TOKENS [MODEL...] - does a technique cost quality? Trains models with each technique, from equal
# weights on equal batches, and compares validation losses. TOKENS: the prefix of files of build/prepare.
#   models: gpt2 (124M, 16 x 1024), d (32 x 1024), small (4 layers, 64 x 128); these without a name; and tiny
# Variables: TECHNIQUES (bf16_flash_chunked fp8_flash), the first is the baseline; SEEDS (0 1 2); STEPS (1500;
# small: 10000); GPUS (0), "0 1" trains two runs at a time; DEVICE (cuda); TRAIN (build/train_cuda); RESULTS
# (results/quality), which gets quality.md and MODEL.svg.
# The same command leaves complete runs as they are. Exit status: 1 if a run failed; 2 for a wrong call, or if
# RESULTS has runs of a model with other settings.
set -u -o pipefail
export LC_ALL=C # decimals have a point
[ "${BASH_VERSINFO[0]}" -ge 4 ] || { echo "quality: needs bash 4: brew install bash" >&2; exit 2; }
gpus=(${GPUS:-0}) techniques=(${TECHNIQUES:-bf16_flash_chunked fp8_flash}) runs=() logs=()
train=${TRAIN:-build/train_cuda} results=${RESULTS:-results/quality}
declare -A model=([gpt2]="--preset gpt2 --batch-size 16 --steps ${STEPS:-1500}"
  [d]="--preset d --batch-size 32 --lr 3e-4 --steps ${STEPS:-1500}"
  [small]="--preset a --batch-size 64 --seq-len 128 --steps ${STEPS:-10000}"
  [tiny]="--layers 1 --heads 2 --d-model 32 --seq-len 32 --batch-size 2 --steps ${STEPS:-200}")
fail() { echo "quality: $2" >&2; exit "$1"; }
[ $# -gt 0 ] || { sed -n '2,9s/^# //p' "$0"; exit 2; }
tokens=$1; shift
[ -s "$tokens.train.tokens" ] || fail 2 "there is no $tokens.train.tokens: build/prepare makes it of a text"
[ $# -gt 0 ] || set -- gpt2 d small
for name; do
  [ -n "${model[$name]:-}" ] || fail 2 "there is no model $name"
  for technique in "${techniques[@]}"; do
    for seed in ${SEEDS:-0 1 2}; do runs+=("$name $technique $seed"); done
  done
done
run() { # MODEL TECHNIQUE SEED: on the GPU `gpu`, unless it is complete
  local name=$1_s$3_$2
  [ ! -s "$results/${name}_metrics.json" ] || return 0
  echo "quality: $name on GPU $gpu" >&2
  CUDA_VISIBLE_DEVICES=$gpu "$train" --device "${DEVICE:-cuda}" --data "$tokens" --results-dir "$results" \
    --dataset "$1_s$3" --technique "$2" --seed "$3" ${model[$1]} --lr-schedule cosine --eval-every 100 \
    --no-checkpoint --no-memory-profiling > "$results/$name.out" 2>&1 || tail -n 1 "$results/$name.out" >&2
}
mkdir -p "$results" || fail 2 "cannot write to $results"
for name; do
  settings=$results/$name.settings
  [ -s "$settings" ] || echo "${model[$name]} --data $tokens" > "$settings" || fail 2 "cannot write $settings"
  [ "$(cat "$settings")" = "${model[$name]} --data $tokens" ] ||
    fail 2 "$results has $name with other settings: $(cat "$settings"): choose another RESULTS"
done
for k in "${!gpus[@]}"; do
  gpu=${gpus[k]}
  for ((i = k; i < ${#runs[@]}; i += ${#gpus[@]})); do run ${runs[i]}; done &
done
wait
for i in "${!runs[@]}"; do
  read -r name technique seed <<< "${runs[i]}"
  [ -s "$results/${name}_s${seed}_${technique}_metrics.json" ] || fail 1 "there is no result of ${runs[i]}"
  logs+=(model="$name" technique="$technique" seed="$seed" "${name}_s${seed}_$technique.jsonl")
done
cd "$results" && awk -v first="${techniques[0]}" '
  function value(key) { # of a line of a log, where a number that is not finite is null
    return match($0, "\"" key "\": [0-9]") ? substr($0, RSTART + length(key) + 4) + 0 : 0
  }
  FNR == 1 { name[++n] = model " | " technique; print (used[model]++ ? "\n\n#" : "#") > (model ".dat") }
  /"ms"/ { steps[n]++; ms[n] += value("ms"); clipped[n] += value("clipped"); lost[n] += /"grad_norm": null/ }
  /"val_loss"/ {
    s[n] = seed; loss[n] = value("val_loss"); step = value("step")
    if (technique == first) base[seed, step] = loss[n]
    more[n] = 100 * (exp(loss[n] - base[seed, step]) - 1)
    print step, loss[n], more[n] > (model ".dat")
  }
  END {
    print "| model | technique | seed | loss | perplexity | to the first, % | skipped | clipped | ms a step |"
    print "|---|---|---:|---:|---:|---:|---:|---:|---:|"
    for (i = 1; i <= n; i++) {
      printf "| %s | %d | %.4f | %.2f | %+.2f | %d | %.0f | %.2f |\n", name[i], s[i], loss[i], exp(loss[i]), \
        more[i], lost[i], clipped[i], ms[i] / steps[i]
      sum += loss[i]; all += more[i]; low = count && low < more[i] ? low : more[i]
      high = count++ && high > more[i] ? high : more[i]
      if (name[i] == name[i + 1]) continue
      printf "| %s | mean | %.4f | %.2f | %+.2f (%+.2f to %+.2f) | | | |\n", name[i], sum / count, \
        exp(sum / count), all / count, low, high
      sum = all = count = 0
    }
  }' "${logs[@]}" > quality.md.tmp && mv -f quality.md.tmp quality.md && cat quality.md || exit 1
for name; do
  gnuplot << PLOT && mv -f "$name.svg.tmp" "$name.svg" || fail 1 "no curves: gnuplot is missing, or failed"
    set terminal svg size 1000,760 font 'Sans,14' background 'white' noenhanced; set output '$name.svg.tmp'
    last = ${#runs[@]} / $# - 1; seeds = (last + 1) / ${#techniques[@]}; names = '${techniques[*]}'
    array ink[6] = [0x000000, 0xe69f00, 0x7b4fa3, 0x0072b2, 0xd55e00, 0x009e73] # those of plots.sh
    set border 3; set tics nomirror; set grid lt 1 lc rgb '#c8c8c8'
    set xrange [0:*] noextend; set lmargin 9; set rmargin 3
    set multiplot layout 2,1 title '$name: a line for each of '.seeds.' seeds'
    set ylabel 'validation loss, nats'; set key samplen 1.5
    plot for [i=0:last] '$name.dat' index i using 1:2 with lines lw 1.5 lc rgb ink[int(i/seeds)%6+1] \\
      title (i % seeds ? '' : word(names, int(i/seeds)+1))
    set ylabel 'perplexity above the first, %'; set xlabel 'optimizer step'; unset key
    plot for [i=0:last] '$name.dat' index i using 1:3 with lines lw 1.5 lc rgb ink[int(i/seeds)%6+1]
PLOT
done
