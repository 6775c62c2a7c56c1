#!/usr/bin/env bash
# test_explorer.sh BUILD_DIR - tests the page and the listing of BUILD_DIR/schedule. Their numbers must be the
# plan's, and the page must work in a browser (Chromium, where it is installed). Runs in the repository root.
set -u
. tests/lib.sh
schedule=$(realpath "$1")/schedule oracles=$(realpath tests/oracles) root=$(pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
small="--batch-size 4 --seq-len 32 --d-model 32 --heads 2 --vocab-size 100"

expect() { # CODE PATTERN OPTION...: schedule's exit code, and what it must say
  local want=$1 pattern=$2 code; shift 2
  timeout 120 "$schedule" $small "$@" > out 2> err; code=$?
  if [ $code = "$want" ] && cat out err | grep -qE -- "$pattern"; then pass; return; fi
  fail "schedule $*: exit $code, expected $want and /$pattern/; it said: $(cat err out | tail -n 2)"
}

# Numbers: the page against mtt_schedule_json, the listing against the page, the plan against its tensors.
page() { # TECHNIQUE OPTION...
  local technique=$1; shift
  expect 0 'wrote page.html' --technique "$technique" --html page.html "$@"
  expect 0 '' --technique "$technique" --json "$@"
  mv out json
  expect 0 ' frees ' --technique "$technique" "$@"
  if python3 "$oracles/page.py" numbers page.html 0 json out > why 2>&1; then pass
  else fail "the page of $technique $*: $(tail -n 1 why)"; fi
}
if command -v python3 > /dev/null; then
  page fp32
  page fp32_checkpointing --layers 5
  page bf16_flash_selective --dropout 0.1
  page bf16_flash_segments_chunked_compact --layers 6 --device cuda
  page fp16_window16 --accumulate 3 --head tied --positions learned
  page fp8_flash_segments --layers 5
  page budget_split --batch-size 64 --memory-budget 8M
  expect 0 'wrote page.html' --technique fp32 --html page.html --compare bf16_flash_bs2 --layers 3
  for which in "0 fp32 4" "1 bf16_flash 2"; do
    read -r index technique batch <<< "$which"
    expect 0 '' --technique "$technique" --json --layers 3 --batch-size "$batch"
    check "plan $index of two is $technique" python3 "$oracles/page.py" numbers page.html "$index" out
  done
  while read -r one other options; do
    expect 0 'wrote one.html' --technique $one --html one.html --compare $other $options
    expect 0 '' --technique $other --json $options
    check "--compare $other beside $one" python3 "$oracles/page.py" numbers one.html 1 out
  done << TECHNIQUES
fp16_flash_window16_checkpointing_chunked_compact fp32
bf16_flash_window16 bf16_flash
budget_split budget --batch-size 64 --memory-budget 8M
TECHNIQUES
else
  skip "python3 is missing: apt-get install python3"
fi

# A page that cannot be written leaves the old one, a link is replaced and not followed, a pipe is refused.
expect 0 'wrote kept.html' --layers 1 --html kept.html
cp kept.html before.html
(ulimit -f 8; trap '' XFSZ; "$schedule" $small --layers 1 --html kept.html > out 2> err); code=$?
check "a page that is too large ends with $code, not 3, and says why: $(cat err)" \
  eval '[ $code = 3 ] && says err "^schedule: kept.html: cannot write it: File too large"'
check "the old page is whole" cmp kept.html before.html
check "and no part of the new one is left" [ "$(ls -A | grep -c 'kept\.html')" = 1 ]
echo mine > elsewhere; ln -s elsewhere link.html; ln -s nowhere dangling.html; mkfifo pipe.html
expect 0 'wrote link.html' --layers 1 --html link.html
expect 0 'wrote dangling.html' --layers 1 --html dangling.html
check "links are replaced" eval '[ ! -L link.html ] && [ ! -L dangling.html ] && cmp link.html kept.html'
check "what they name is not written to" eval '[ "$(cat elsewhere)" = mine ] && [ ! -e nowhere ]'
for mask in 002 077; do
  umask $mask
  expect 0 'wrote mask.html' --layers 1 --html mask.html --memory-viz mask.pickle --dump mask.dump
  umask 022
  check "umask $mask holds for pages, snapshots and dumps: $(stat -c %a mask.*)" \
    [ "$(stat -c %a mask.* | sort -u)" = $(printf %o $((8#666 & ~8#$mask))) -a "$(ls mask.* | wc -l)" = 3 ]
  rm mask.*
done
expect 3 'pipe.html: give the name of a regular file' --layers 1 --html pipe.html
expect 0 'adamw +[0-9]+ gradients -> m v [0-9]+ weights  frees [0-9]+ gradients$' --checkpointing

# Tensors of a step, and plans as snapshots of PyTorch.
if command -v python3 > /dev/null; then
  while read -r technique options; do
    [ "$technique $options" = "fp32 " ] && other=kept.safetensors || other=
    options="--technique $technique --layers 3 $options"
    expect 0 'wrote one.safetensors' $options --dump one.safetensors --memory-viz one.pickle
    expect 0 '' $options --json
    mv out json
    if python3 "$oracles/schedule_files.py" dump one.safetensors $other > why 2>&1; then pass
    else fail "the dump of $options: $(tail -n 1 why)"; fi
    check "the snapshot of $options" python3 "$oracles/schedule_files.py" viz one.pickle json
    mv one.safetensors kept.safetensors
  done << TECHNIQUES
fp32_checkpointing
fp32
fp32_flash --head tied
fp32 --head tied --norm-place none
fp32_checkpointing --head tied --norm-place post --dropout 0.1
bf16 --heads 4 --heads-kv 2
fp32 --lora-rank 8 --lora-targets mlp.*
bf16_checkpointing --lora-rank 8 --lora-targets mlp.*,attn.c_attn --norm-place post
bf16_flash_selective
fp8_flash_chunked
fp16_window8_segments_chunked_compact --head tied
TECHNIQUES
  expect 0 'wrote one.safetensors' --technique bf16_early --dump one.safetensors
  # a batch that the plan splits is trained as so many micro-batches
  split="--technique budget_split --batch-size 16 --memory-budget 1000K"
  expect 0 '' $split --json
  parts=$(grep -o '"micro_batches": [0-9]*' out | grep -o '[0-9]*$')
  check "a plan splits the batch" [ "${parts:-1}" -gt 1 ]
  expect 0 'wrote one.safetensors' $split --dump one.safetensors
  expect 0 'wrote two.safetensors' --technique fp32 --batch-size $((16 / ${parts:-1})) \
    --accumulate "${parts:-1}" --dump two.safetensors
  check "the dump of a split batch" python3 "$oracles/schedule_files.py" step one.safetensors two.safetensors
  expect 0 '' --device cuda --technique bf16_flash_checkpointing --json
  mv out json
  expect 0 'pytorch.org/memory_viz' --device cuda --technique bf16_flash_checkpointing --memory-viz one.pickle
  check "the snapshot of a plan for a GPU" python3 "$oracles/schedule_files.py" viz one.pickle json
fi
expect 0 '^  layers 0 to 3, each 0.02: x 0.02$' --kept --layers 5 --checkpointing
expect 0 '^  layers 0 to 1, each 0.28: x 0.02, ln_1 0.02, ln_1.stats 0.00, attn.qkv' --kept
expect 0 'a forward pass alone, which keeps nothing: at most 0.27 at once, of them weights 0.13$' --kept
expect 3 'absent' --dump absent/step.safetensors
expect 3 'absent' --memory-viz absent/plan.pickle
expect 2 'add --dump step.safetensors' --init kept.safetensors
expect 3 'absent' --init absent --dump one.safetensors
sample_text > text.txt
"${schedule%/*}/train" --data text.txt --dataset t --layers 2 --heads 2 --d-model 32 --steps 2 \
  --batch-size 2 --seq-len 16 --vocab-size 300 > train.log 2>&1
trained=$work/results/t_fp32_step2.safetensors
options=$small small="--batch-size 2 --seq-len 16"
expect 0 'wrote one.safetensors' --init $trained --dump one.safetensors
expect 2 '^schedule: --layers has another value than the model in' --init $trained --layers 3 --dump two
expect 0 '' --init $trained --layers 2 --flash --dump two
check "a dump begins with the weights of --init" \
  python3 "$oracles/schedule_files.py" weights one.safetensors $trained
rm one.safetensors
small=$options
expect 2 'leave out the other outputs' --after adjoints --kept
expect 2 'ranks' --ranks 2 --dump one.safetensors
check "what fails leaves no dump" [ ! -e one.safetensors ]

# Each text is checked, also one that nothing uses or that a later one replaces.
expect 2 'need a rank' --lora-targets ';id'
expect 2 '^schedule: --preset ;id: expected tiny' --preset ';id' --preset tiny
expect 2 '^schedule: --model ;id: expected gpt2' --model ';id' --model gpt2
expect 2 '";id" is no technique' --technique ';id' --technique bf16
expect 2 '";id"' --technique bf16 --technique=fp32_\;id --technique fp32
expect 2 '--freeze is given twice: join its patterns by commas' --freeze ';id' --freeze 'h.*'
expect 2 '--lora-targets is given twice' --lora-rank 8 --lora-targets '$(id)' --lora-targets 'attn.*'
expect 0 '' --freeze 'h.*' --freeze 'h.*' --preset gpt2 --preset tiny --model gpt2 --model llama-tiny

# What is wrong gets one message.
expect 2 'add --html memory.html' --compare fp32
expect 2 'fp33" is no technique' --html page.html --compare fp33
expect 3 'absent/: cannot find this folder: No such file or directory' --html absent/page.html
expect 3 '/dev/full: give the name of a regular file' --html /dev/full
( # only the last bytes do not fit
  trap '' XFSZ
  expect 0 'wrote cut.html' --html cut.html
  ulimit -f $(($(wc -c < cut.html) / 1024))
  expect 3 'cut.html: cannot write it: File too large' --html cut.html
  [ $failed = 0 ]
)
check "a page that is cut fails" [ $? = 0 ]
expect 2 'does not divide into 3 heads' --html other.html --compare bf16 --heads 3
check "what fails leaves no page" [ ! -e other.html ]
"$schedule" $small > /dev/full 2> err
check "a full disk fails the listing" [ $? = 3 ]

# The page that plans by itself says of random options what build/schedule says, to the byte.
planner=$root/examples/learn/memory.html
random_options() { # COUNT; @ is nothing, # a blank
  awk -v count="$1" '
    function one_of(list, words, n) { n = split(list, words, " "); return words[1 + int(n * rand())] }
    BEGIN {
      srand(41)
      for (; count > 0; count--) {
        heads = one_of("1 2 3 4 6 12")
        printf "--layers %s --heads %d --d-model %d --vocab-size %d --batch-size %d --seq-len %d",
          one_of("1 2 3 7 12 24"), heads, heads * one_of("16 32 64"), 90 + rand() * one_of("100 3000 60000"),
          1 + rand() * 40, one_of("8 33 128 1024")
        printf " --technique %s%s%s%s", one_of("fp32 tf32 bf16 fp16 fp8_flash"), one_of("@ _flash _window16"),
          one_of("@ _selective _checkpointing _segments _recursive"), one_of("@ _chunked _compact")
        printf " --device %s%s%s%s%s\n", one_of("cpu cuda"), one_of("@ @ #--norm#rms#--mlp#swiglu"),
          one_of("@ #--positions#rotary"), one_of("@ @ #--dropout#0.1"),
          one_of("@ @ #--ranks#2 #--accumulate#3")
      }
    }' | tr -d @ | tr '#' ' '
}
if command -v node > /dev/null; then
  random_options 200 > lines
  node "$oracles/planner.mjs" "$planner" < lines > theirs
  while read -r line; do
    if "$schedule" --json $line > one 2> err; then
      python3 -c 'import json; print(json.dumps(json.load(open("one"))["plan"], separators=(",", ":")))'
    else sed 's/^schedule: /refused: /' err; fi
  done < lines > ours
  echo "the planner in the page: $(wc -l < lines) plans, $(grep -c ^refused ours) refused"
  check "plans of the page: $(diff ours theirs | head -n 2 | cut -c 1-200)" cmp ours theirs
  check "most are plans" [ "$(grep -c ^refused ours)" -lt 100 ]
else
  skip "node is missing: apt-get install nodejs"
fi
mkdir -p examples/learn
cp "$planner" examples/learn
expect 0 'wrote own.html' --technique bf16_flash --layers 3 --html own.html --compare fp32
expect 0 '' --technique fp32 --layers 3 --json
check "the plans in that page" python3 "$oracles/page.py" numbers own.html 1 out
# It begins with all options of the command line: those of a preset, of a long list, of a model from a file.
expect 2 'expected tiny' --html evil.html --preset '</script><script>document.title=1</script>' --preset tiny
check "what is refused makes no page" [ ! -e evil.html ]
many=$(printf 'h.%d.attn.c_attn.*,' $(seq 0 399))
expect 0 'wrote begin1.html' --layers 400 --d-model 8 --heads 1 --html begin1.html --flash \
  --freeze "${many%,}"
check "its list has ${#many} bytes" [ ${#many} -gt 5000 ]
expect 0 'wrote begin2.html' --json --html=begin2.html --preset gpt2 --layers 3 --compare bf16
small="--batch-size 2 --seq-len 16"
expect 0 'wrote begin4.html' --init $trained --html begin4.html --dump two.safetensors --mlp gelu
small=
expect 0 'wrote begin3.html' --model gpt2 --layers 3 --technique bf16_flash_bs2 --html begin3.html \
  --memory-viz one.pickle
expect 0 'wrote begin5.html' --preset tiny --norm=rms --html begin5.html
small=$options
rm -r examples
for number in 1 10; do
  "$schedule" --quiz $number > out 2>&1
  check "question $number" says out '\?( Give its number.)?$'
done
"$schedule" --quiz 1 --answer 26 > out 2>&1
check "its answer" [ $? = 0 ] && check "with a reason" says out '^Right: 26\. It makes'
"$schedule" --quiz 1 --answer 25 > out 2>&1
check "a wrong one is code 1" [ $? = 1 ]
expect 2 'questions 1 to 10' --quiz 11
expect 2 'add --quiz' --answer 26

# An optimizer of one's own, by the public interface: its losses fall, and AdamW's begin at the same one.
check "own_optimizer.c builds" ${CC:-cc} -std=gnu99 -O2 -Wall -Wextra -Werror -o own \
  "$root/examples/learn/own_optimizer.c" -lm
sample_text > text.txt
./own text.txt > out 2> err
losses=($(sed -nE 's/^Lion.*loss //p' out))
check "three losses of each: $(cat err)" [ ${#losses[@]} = 3 -a "$(wc -l < out)" = 6 ]
check "Lion's fall: ${losses[*]}" awk -v a="${losses[0]}" -v b="${losses[2]}" 'BEGIN {exit !(a - b > 0.1)}'

# A name that ends strings, elements and lines stays a name. Each failed allocation is one status.
cat > hostile.c << 'C'
#include <stdlib.h>
static int left = 1 << 30;
static void *scarce(size_t count, size_t size) { return left-- > 0 ? calloc(count, size) : NULL; }
#define MTT_IMPLEMENTATION
#include "mtt.h"
#include "tools/explorer.h"
static void *env_alloc(void *user, size_t bytes) { (void)user; return scarce(1, bytes); }
static void env_free(void *user, void *block) { (void)user; free(block); }
int main(void)
{
    mtt_env env = {env_alloc, env_free, NULL, ""};
    mtt_model_desc model = {.layers = 1, .heads = 1, .d_model = 8, .vocab = 10};
    mtt_policy policy = {MTT_FP32};
    explorer_plan plan;
    char word[64];
    const char *name = "</script><b>\"\\\n'\x7f\xff";
    int room = 0;
    for (left = room; explorer_open(&env, &model, &policy, 2, 8, name, &plan); left = ++room)
        if (plan.schedule || room > 10000) return 1;
    if (room < 5) return 4;
    for (left = room = 0; explorer_save(&env, "hostile.html", NULL, "", &plan, 1); left = ++room)
        if (room > 10000) return 2;
    if (!room) return 3;
    explorer_word(word, "--a=</x>\t%\xff");
    if (strcmp(word, "--a=%3C/x%3E%09%25%FF ")) return 5;
    explorer_close(&plan);
    return plan.schedule != NULL;
}
C
check "the program with a hostile name builds" ${CC:-cc} -std=gnu99 -O1 -Wall -Wextra -Werror -I "$root" \
  hostile.c -o hostile -lm
check "it runs, through every failed allocation" ./hostile
check "the name ends no element" [ "$(grep -o '</script>' hostile.html | wc -l)" = 2 ]
grep -qF '"\u003c/script\u003e\u003cb\u003e\u0022\u005c\u000a'"'"'\u007f\u00ff"' hostile.html
check "the name is written as JSON" [ $? = 0 ]
check "the page loads nothing" not grep -qE 'https?://[^w]|@import|<link|src=' page.html

# In a browser: no error, the keys and the pointer move, light and dark differ.
browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome)
browse() { # NAME ARGUMENT...: standard output to NAME.out, messages of the page to NAME.console
  local name=$1; shift
  timeout 120 "$browser" --headless=new --no-sandbox --disable-gpu --hide-scrollbars --enable-logging=stderr \
    --user-data-dir="$work/profile" --window-size=1400,1400 "$@" > "$name.out" 2> "$name.err"
  grep CONSOLE "$name.err" > "$name.console"
}
steps() { # NAME: what the script in a page that was browsed has written
  grep -oE '^(ok|not ok): .*' $1.out > steps
  while IFS= read -r line; do
    case $line in ok:*) pass;; *) fail "$1, $line";; esac
  done < steps
  check "all steps of $1 ran" grep -qx 'ok: the end' steps
}
if [ -z "$browser" ]; then
  skip "Chromium is missing: apt-get install chromium"
elif ! command -v python3 > /dev/null; then
  skip "python3 is missing: apt-get install python3"
else
  expect 0 'wrote page.html' --technique fp32 --compare fp32_checkpointing --html page.html --layers 3
  python3 "$oracles/page.py" drive page.html > driven.html
  browse driven --virtual-time-budget=5000 --dump-dom "file://$work/driven.html"
  steps driven
  python3 "$oracles/page.py" plan own.html > planned.html
  browse planned --virtual-time-budget=20000 --dump-dom "file://$work/planned.html"
  steps planned
  # What a link makes Copy copy is a command of mtt alone, and a shell reads its words as they are.
  python3 "$oracles/page.py" links own.html > linked.html
  browse linked --disable-ipc-flooding-protection --virtual-time-budget=60000 --dump-dom \
    "file://$work/linked.html"
  steps linked
  mkdir -p build
  printf '%s\n' '#!/bin/sh' 'echo "$0 $*"' | tee build/train > build/train_cuda
  chmod +x build/train build/train_cuda
  touch h.x wte.x,h.0.x ./--freeze=x.bias
  grep '^copied: ' linked.out | sed 's/^copied: //' | sort -u > copied
  while IFS= read -r line; do
    check "a shell's words of $line" [ "$(sh -c "$line" 2>&1)" = "${line//\'/}" ]
  done < copied
  check "six commands: $(wc -l < copied)" [ "$(wc -l < copied)" = 6 ]
  check "some have patterns" [ "$(grep -c "'.*\*.*'" copied)" = 4 ]
  while read -r number words; do
    python3 "$oracles/page.py" begin begin$number.html $words > begun.html
    browse begun --virtual-time-budget=5000 --dump-dom "file://$work/begun.html"
    steps begun
  done << BEGINNINGS
1 --layers~400 --flash --freeze~'${many%,}'
2 --layers~3~--heads~2~--d-model~32 --batch-size~4 --seq-len~32 --preset~gpt2 --technique~fp32
3 --model~gpt2~--batch-size~2~--seq-len~1024~--technique~bf16_flash_bs2 --layers~3
4 --layers~2 --d-model~32 --vocab-size~300 --batch-size~2 --mlp~gelu
5 --layers~2~--heads~2~--d-model~64~--vocab-size~512~--batch-size~16~--seq-len~64 --norm=rms
BEGINNINGS
  browse light --screenshot=light.png "file://$work/page.html"
  browse dark --blink-settings=preferredColorScheme=0 --screenshot=dark.png "file://$work/page.html"
  browse hostile --dump-dom "file://$work/hostile.html"
  check "a hostile name is shown as it is" grep -qF '<h2>&lt;/script&gt;&lt;b&gt;' hostile.out
  for name in driven planned light dark hostile; do
    check "$name: no message on the console: $(head -n 1 $name.console)" [ ! -s $name.console ]
  done
  check "there is a picture" [ "$(wc -c < light.png)" -gt 20000 ]
  check "dark is not light" not cmp light.png dark.png
fi
closing_line
