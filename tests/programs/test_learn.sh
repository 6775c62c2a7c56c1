#!/usr/bin/env bash
# test_learn.sh BUILD_DIR - keeps examples/learn/README.md true: its numbers, commands, exercises and guide.
# Runs in the repository root.
set -u
. tests/lib.sh
build=$(realpath "$1") root=$(pwd) page=examples/learn/README.md
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
schedule=$build/schedule

# Commands of the page that have no placeholder run as they are.
while IFS= read -r command; do
  check "$command" "$schedule" ${command#build/schedule}
done < <(grep -oE '`build/schedule[^`]*`' $page | tr -d '`' |
  grep -vE ' N( |$)|--after bare|--dump|--memory-viz')
for link in $(grep -oE '\]\([^)#]+\)' $page | sed 's/^](//; s/)$//' | grep -v '^http'); do
  check "$page links to $link" [ -e "examples/learn/$link" ]
done

# Its lines of a listing are that of checkpointing.
"$schedule" --recompute layer > "$work/list"
lines=0
while IFS= read -r line; do
  lines=$((lines + 1))
  check "the listing has: $line" grep -qF -- "${line%% ...*}" "$work/list"
done < <(grep -E '^ +[0-9]+ (forward|backward) ' $page)
check "$lines lines of it" [ "$lines" = 4 ]

check "operation 25 changes logits in place" eval '"$schedule" | grep -q "^  25 .* -> logits "'

# The worked example of flash attention, for tiles of 1, 2 and 4 keys: exercise 12.
flash() { # TILE: m, l and O after each tile, then the output and lse
  awk -v tile=$1 'BEGIN {
    split("1 3 4 2", s); split("10 20 30 40", v); m = -1e30
    for (k = 1; k <= 4; k += tile) {
      top = m
      for (i = k; i < k + tile; i++) if (s[i] > top) top = s[i]
      l *= exp(m - top); o *= exp(m - top)
      for (i = k; i < k + tile; i++) { l += exp(s[i] - top); o += v[i] * exp(s[i] - top) }
      m = top
      if (k + tile <= 4) printf "%.4f %.3f\n", l, o
    }
    printf "%.4f %.3f\n%.3f %.4f\n", l, o, o / l, m + log(l)
  }'
}
for number in $(flash 2); do check "the page has $number" grep -qF "$number" $page; done
for tile in 1 2 4; do
  check "tiles of $tile keys end with 27.861 and 4.4402" [ "$(flash $tile | tail -n 1)" = "27.861 4.4402" ]
done
rows=$(awk 'BEGIN {
  split("1 3 4 2", s)
  for (i = 1; i <= 4; i++) { l += exp(s[i]); d += 10 * i * exp(s[i]) }
  for (i = 1; i <= 4; i++)
    printf "| %d | %.4f | %d | %.4f | %.4f |\n", i, p = exp(s[i]) / l, 10 * i, p * (10 * i - d / l), p
}')
while IFS= read -r row; do check "the page has the row $row" grep -qxF "$row" $page; done <<< "$rows"

# Questions: an answer made of the plan's JSON is right, one that is 5 % off is wrong.
cd "$work" || exit 1
plan() { # OPTION...: prints arena, state, peak operation, recomputed operations, largest logits, their share
  "$schedule" --json "$@" | python3 -c '
import json, sys
j = json.load(sys.stdin)
p, ops = j["plan"], j["timeline"]
logits = [op["bytes"]["logits"] for op in ops]
print(p["arena_bytes"], p["state_bytes"], p["peak_op"], sum(op["recomputed"] for op in ops), max(logits),
      logits[p["peak_op"]] / p["peak_bytes"])'
}
if command -v python3 > /dev/null; then
  gpt2="--layers 12 --heads 12 --d-model 768 --vocab-size 50257 --batch-size 16 --seq-len 1024"
  read -r arena state peak _ _ _ < <(plan)
  read -r flash _ < <(plan --flash)
  read -r _ _ _ again _ < <(plan --checkpointing)
  read -r eight _ < <(plan --checkpointing --layers 8)
  read -r sixteen _ < <(plan --checkpointing --layers 16)
  read -r _ _ _ _ _ share < <(plan --vocab-size 50257)
  read -r _ _ _ _ chunk _ < <(plan --vocab-size 50257 --chunked)
  read -r plain _ < <(plan $gpt2)
  read -r small _ < <(plan $gpt2 --technique bf16_flash_chunked_checkpointing)
  most=$("$build/train" --find-max-batch --memory-budget 14G ${gpt2/--batch-size 16/} \
    --technique fp16_flash_selective_chunked 2> err)
  answers=($peak $(awk "BEGIN {
    m = 1048576
    print $state / m, ($arena - $flash) / m, $again, ($sixteen - $eight) / 8 / m, 100 * $share, $chunk / m,
      $plain / m / 1024, $small / m / 1024, $most
  }"))
  check "ten answers: ${answers[*]}" [ ${#answers[@]} = 10 ]
  for i in {1..10}; do
    answer=${answers[i - 1]}
    check "question $i: $answer" "$schedule" --quiz $i --answer "$answer"
    check "question $i: not $answer times 1.05, and 1" \
      not "$schedule" --quiz $i --answer "$(awk "BEGIN { print $answer * 1.05 + 1 }")"
  done
else
  skip "python3 is missing: apt-get install python3"
fi

# Exercise 11: recomputation changes no digit, BF16 does.
sample_text > text.txt
train() { "$build/train" --data text.txt --dataset t --layers 2 --heads 2 --d-model 32 --vocab-size 300 \
  --seq-len 32 --batch-size 4 --steps 30 "$@" > out 2>&1; }
for technique in fp32 fp32_checkpointing bf16; do train --technique $technique; done
perplexity() { field results/t_$1_metrics.json perplexity; }
check "exercise 11: checkpointing leaves $(perplexity fp32)" \
  [ -n "$(perplexity fp32)" -a "$(perplexity fp32)" = "$(perplexity fp32_checkpointing)" ]
check "exercise 11: BF16 changes it" [ "$(perplexity fp32)" != "$(perplexity bf16)" ]

# Exercise 13: SGD in the place of Lion needs no state; its losses fall.
sed "s/const float mean = .*/(void)m;/; s/w\[i\] -= .*/w[i] -= 100 * lr * g[i];/; /m\[i\] = 0.99f/d
  s#../../mtt.h#$root/mtt.h#" "$root/examples/learn/own_optimizer.c" > sgd.c
check "exercise 13: SGD compiles" ${CC:-cc} -std=gnu99 -O2 -Wall -Wextra -Werror -o sgd sgd.c -lm
./sgd text.txt > out 2>&1
losses=($(sed -nE 's/^Lion.*loss //p' out))
check "exercise 13: SGD's losses fall: ${losses[*]}" \
  awk -v a="${losses[0]}" -v b="${losses[2]}" 'BEGIN {exit !(a - b > 0.05)}'

# Exercise 14: a gradient is the slope of the loss.
cat > gradient.c << C
#define MTT_IMPLEMENTATION
#include "$root/mtt.h"
#include <stdio.h>
int main(void)
{
    static int32_t tokens[8 * 64], targets[8 * 64];
    static float g[192 * 64], w[192 * 64];
    mtt_env env = {0};
    mtt_model_desc model = {.layers = 2, .heads = 4, .d_model = 64, .vocab = 256};
    mtt_policy policy = {.keep_gradients = 1};
    mtt_optim_desc optim = {.lr = 1e-3f};
    mtt_step_info up, down, far;
    mtt_trainer *t;
    int i, which;
    for (i = 0; i < 8 * 64; i++) tokens[i] = i * 7 % 256, targets[i] = (i + 1) * 7 % 256;
    if (mtt_trainer_create(&env, &model, &policy, &optim, mtt_cpu_backend(), 8, 64, &t)) return 2;
    mtt_trainer_set_lr(t, 0);
    if (mtt_train_step(t, tokens, targets, NULL)) return 2;
    which = mtt_parameter_find(t, "h.0.attn.c_attn.weight");
    if (mtt_gradient_get(t, which, g) || mtt_parameter_get(t, which, w)) return 2;
    for (i = 0; fabsf(g[i]) < 1e-4f; i++) continue;
    w[i] += 0.01f, mtt_parameter_set(t, which, w), mtt_evaluate(t, tokens, targets, &up);
    w[i] -= 0.02f, mtt_parameter_set(t, which, w), mtt_evaluate(t, tokens, targets, &down);
    w[i] += 3.01f, mtt_parameter_set(t, which, w), mtt_evaluate(t, tokens, targets, &far);
    printf("%g %g %g\n", (double)g[i], (up.loss - down.loss) / 0.02, (far.loss - down.loss) / 3.01);
    mtt_trainer_destroy(t);
    return 0;
}
C
check "exercise 14 compiles" ${CC:-cc} -std=gnu99 -O2 -o gradient gradient.c -lm
read -r gradient slope far < <(./gradient)
check "exercise 14: gradient $gradient, slope $slope" \
  awk -v g="$gradient" -v s="$slope" 'BEGIN {exit !(g != 0 && (s / g - 1) ^ 2 < 0.03 ^ 2)}'
check "exercise 14: a larger move disagrees: $far" \
  awk -v g="$gradient" -v s="$far" 'BEGIN {exit !((s / g - 1) ^ 2 > 0.03 ^ 2)}'

# Exercise 15: a layer's bytes, and those of its weight and moments.
peak() { "$schedule" --layers $1 --recompute layer --json | sed -n 's/.*"peak_bytes": \([0-9]*\).*/\1/p'; }
parameters() { "$schedule" --layers $1 | sed -n 's/^parameters \([0-9]*\),.*/\1/p'; }
arena() { "$schedule" --layers $1 --recompute layer --json | sed -n 's/.*"arena_bytes": \([0-9]*\).*/\1/p'; }
layer=$(awk "BEGIN { printf \"%.2f\", ($(peak 16) - $(peak 8)) / 8 / 1048576 }")
first=$(awk "BEGIN { printf \"%.2f\", ($(arena 8) - $(arena 4)) / 4 / 1048576 }")
later=$(awk "BEGIN { printf \"%.2f\", ($(arena 16) - $(arena 8)) / 8 / 1048576 }")
check "exercise 15: from 4 to 8 layers the arena grows by $first" [ $first = $layer ]
check "exercise 15: from 8 to 16 by $later" grep -q "from 8 layers up it grows by $later MiB" "$root/$page"
state=$(awk "BEGIN { printf \"%.2f\", 12 * ($(parameters 16) - $(parameters 8)) / 8 / 1048576 }")
check "exercise 15: $layer MiB, of which $state" \
  grep -q "15: $layer MiB, of which" "$root/$page"
check "exercise 15: $state" grep -q "$state are weight and moments" "$root/$page"

# Exercise 16: what recursion and segments add when layers double.
added() { "$schedule" --flash --early-update --layers $1 --recompute $2 --json | python3 -c '
import json, sys
p = json.load(sys.stdin)["plan"]
print("%.1f" % ((p["arena_bytes"] - p["state_bytes"]) / 2**20))'; }
if command -v python3 > /dev/null; then
  sizes=($(for layers in 16 32 64; do added $layers recursive; done))
  check "exercise 16: recursion takes ${sizes[*]}" \
    awk -v a=${sizes[0]} -v b=${sizes[1]} -v c=${sizes[2]} 'BEGIN {exit !(b - a == 2 && c - b == 2)}'
  check "exercise 16: segments" \
    grep -q "Segments take $(added 16 segments), $(added 32 segments) and $(added 64 segments) MiB" \
    "$root/$page"
fi

# Exercise 17: how long ranks wait for each other.
waits() { "$schedule" --model gpt2 --batch-size 16 --technique bf16_flash_chunked --device cuda --ranks 4 \
  --bandwidth 100 --exchange $1 | sed -nE 's/.* and ([0-9.]+) ms$/\1/p'; }
check "exercise 17" grep -q \
  "17: $(waits overlapped) ms, $(waits naive) and $(waits flat) of $(waits flat)\." "$root/$page"

# The guide, followed on a copy: an activation is four lines, and its gradient is the slope, too.
before='/,/^}/s/^    case MTT_MLP_SILU:/    case MTT_MLP_RELU:\n        for (k = 0; k < n; k++) '
after=';\n        break;\n&/'
sed -e 's/^\(typedef enum mtt_mlp {.*\) }/\1, MTT_MLP_RELU }/' \
  -e 's/MTT_MLP_[A-Z0-9]*, "\(gelu|[a-z0-9|]*\)"/MTT_MLP_RELU, "\1|relu"/' \
  -e "/^static void mtt__activation_block${before}y[k] = x[k] > 0 ? x[k] : 0$after" \
  -e "/^static void mtt__slope_block${before}if (x[k] <= 0) g[k] = 0$after" "$root/mtt.h" > mtt.h
check "the guide's four places: $(diff "$root/mtt.h" mtt.h | grep -c '^[0-9]')" \
  [ "$(diff "$root/mtt.h" mtt.h | grep -c '^[0-9]')" = 4 ]
sed "s#$root/mtt.h#mtt.h#; s/.vocab = 256}/.vocab = 256, .mlp = MTT_MLP_RELU}/" gradient.c > relu.c
check "the guide's activation compiles" ${CC:-cc} -std=gnu99 -O1 -I. -o relu relu.c -lm
read -r gradient slope _ < <(./relu)
check "its gradient $gradient, slope $slope" \
  awk -v g="$gradient" -v s="$slope" 'BEGIN {exit !(g != 0 && (s / g - 1) ^ 2 < 0.03 ^ 2)}'
closing_line
