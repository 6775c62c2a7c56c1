#!/usr/bin/env bash
# test_generate.sh BUILD_DIR - what BUILD_DIR/generate promises on its command line: text, options, messages,
# exit codes. Prints what fails, what is skipped, and the closing line. Runs in the repository root.
set -u
. tests/lib.sh
build=$(realpath "$1") work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
export OMP_WAIT_POLICY=passive
sample_text > text.txt

run() { timeout 120 "$build/generate" "$@" > out 2> err < /dev/null; code=$?; }
expect() { # CODE PATTERN ARGUMENT...: the exit code, and what it must say
  local want=$1 pattern=$2; shift 2
  run "$@"
  if [ $code = "$want" ] && cat out err | grep -qE -- "$pattern"; then pass; return; fi
  fail "generate $*: exit $code, expected $want and /$pattern/;" \
    "it said: $(cat err out | tail -n 2 | cut -c1-300)"
}
text() { run "$@"; tr -d '\0' < out; }

"$build/train" --data text.txt --layers 2 --heads 2 --d-model 32 --seq-len 64 --batch-size 4 --steps 30 \
  --vocab-size 300 --positions learned --head tied --no-head-bias --max-seq 64 --lr 1e-2 \
  --sample 30 --temperature 0 --prompt alabeta > trained 2> err || fail "train: $(tail -n 1 err)"
model=results/text.txt_fp32_best.safetensors
run $model --prompt alabeta --count 30
check "the same greedy text as a full pass for each token" [ "$(tail -n 1 trained)" = "$(cat out)" ]
expect 0 '^alabeta.' $model --prompt alabeta --count 200 --precision bf16
check "text past the context, a byte a token at least" [ "$(wc -c < out)" -gt 200 ]
full() { text $model --prompt alabeta --count 200 "$@" | wc -c; }
check "--full-context stop ends there" [ "$(full --full-context stop)" -lt "$(full --full-context slide)" ]
drawn() { text $model --prompt alabeta --count 60 --temperature 1 "$@"; }
check "the same seed, the same text" [ "$(drawn --seed 3)" = "$(drawn --seed 3)" ]
check "another seed, another text" [ "$(drawn --seed 3)" != "$(drawn --seed 4)" ]
check "--min-p 1 leaves the likeliest" [ "$(drawn --min-p 1)" = "$(text $model --prompt alabeta --count 60)" ]
check "--repetition-penalty changes the text" [ "$(drawn --repetition-penalty 2)" != "$(drawn)" ]
long=$(text $model --prompt alabeta --count 60)
stop=${long:30:3} after=${long#alabeta}
check "--stop ends the text before it" \
  [ "$(text $model --prompt alabeta --count 60 --stop "$stop")" = "alabeta${after%%"$stop"*}" ]
expect 0 'parameters [0-9]+, arena [0-9]+ bytes' $model --plan --count 1
expect 0 'GFLOP a chunk of prompts, [0-9.e-]+ a token of each sequence' $model --plan --count 1
expect 0 'usage: generate MODEL' --help
if [ -c /dev/full ]; then
  "$build/generate" $model > /dev/full 2> err; code=$?
  check "text that is lost is a failure" [ $code = 3 ]
fi
# A model may say what commands a terminal.
sed 's/ /\x1b[2J\xc2\x9b /g' text.txt > commands.txt
"$build/train" --data commands.txt --layers 1 --heads 2 --d-model 32 --seq-len 64 --batch-size 4 --steps 60 \
  --vocab-size 300 --lr 1e-2 > /dev/null 2> err || fail "train: $(tail -n 1 err)"
commanding="$build/generate results/commands.txt_fp32_best.safetensors --prompt alabeta --count 100"
$commanding > out 2> err
check "a pipe gets the text as it is" [ "$(grep -c $'\x1b' out)" -gt 0 ]
if command -v script > /dev/null; then
  script -qec "$commanding" /dev/null < /dev/null > shown 2> err
  check "a terminal gets no commands" \
    [ "$(LC_ALL=C tr -d '\r' < shown)" = "$(sed 's/\x1b/?/g; s/\xc2\x9b/??/g' out)" ]
else skip "script is missing: no terminal"
fi
expect 2 'the model comes first'
expect 2 'did you mean --prompt' $model --promt x
expect 2 '--precision fp16: expected fp32.bf16 \(of weights and cache\)' $model --precision fp16
expect 2 '--precision tf32: expected fp32.bf16' $model --precision tf32
expect 2 'context is 65, but learned positions end at max_seq 64' $model --context 65
expect 2 '--min-p 2: expected a number from 0 to 1' $model --min-p 2
expect 3 'nothing: cannot open it' nothing
expect 3 'nothing: cannot read it' $model --tokenizer nothing
cp $model alone.safetensors
expect 3 'there is no tokenizer beside the model: pass --tokenizer' alone.safetensors
expect 0 . alone.safetensors --tokenizer results/text.txt.tokenizer.json --count 1

# a tokenizer of another vocabulary than the model's 300 ids
for size in 400 260; do "$build/prepare" --input text.txt --output v$size --vocab-size $size > out 2>&1; done
expect 3 'v400.tokenizer.json has 345 ids, but the model 300: use' $model --tokenizer v400.tokenizer.json
check "nothing is written before it is refused" [ ! -s out ]
expect 0 . $model --tokenizer v260.tokenizer.json --count 20 --temperature 3
"$build/train" --init $model --data text.txt --tokenizer v400.tokenizer.json --results-dir other --steps 1 \
  > out 2> err; code=$?
check "training on refuses a larger tokenizer" eval '[ $code = 3 ] && says err "345 ids, but the model 300"'
check "before the text is encoded" eval 'not says err encoding && [ ! -e other/text.txt.train.tokens ]'

# a folder of other programs
if "$build/convert" $model folder > out 2> err; then
  check "a converted folder gives the same text" \
    [ "$(text folder --prompt alabeta --count 40)" = "$(text $model --prompt alabeta --count 40)" ]
  long=$(text folder --prompt alabeta --count 40)
  run folder --prompt alabeta --count 1
  drawn=$(sed 's/^alabeta//; s/ /\xc4\xa0/' out)
  id=$(sed 's/\\u0120/\xc4\xa0/g' folder/tokenizer.json | grep -o "\"$drawn\": *[0-9]*" | grep -o '[0-9]*$')
  ends() { # CONFIG GENERATION: eos_token_id in both files; null: none
    sed -i "s/\"eos_token_id\": .*/\"eos_token_id\": $1/" folder/config.json
    echo "{\"eos_token_id\": $2}" > folder/generation_config.json
    text folder --prompt alabeta --count 40
  }
  check "the id of the first token, $drawn" [ -n "$id" ]
  for pair in "[0] [299,$id]" "0 $id" "[3,$id] null" "$id null" "$id []"; do
    check "text ends before an id of eos_token_id: $pair" [ "$(ends $pair)" = alabeta ]
  done
  for pair in "$id 0" "[$id] [299]" "0 null"; do
    check "generation_config.json comes first: $pair" [ "$(ends $pair)" = "$long" ]
  done
  rm folder/generation_config.json
  check "without it, config.json" eval \
    'sed -i "s/\"eos_token_id\": .*/\"eos_token_id\": [$id]/" folder/config.json &&
     [ "$(text folder --prompt alabeta --count 40)" = alabeta ]'
  echo '{"eos_token_id": [299, 300, 5000]}' > folder/generation_config.json
  expect 0 "note: eos_token_id has 5000, but the model's ids end at 299: correct it" folder --count 1
  check "each is said" says err 'eos_token_id has 300,'
  echo "{\"eos_token_id\": [299, $id]}" > folder/generation_config.json
  "$build/train" --init folder --data text.txt --results-dir tuned --dataset x --steps 1 --seq-len 16 \
    --lr 1e-12 > out 2> err || fail "train: $(tail -n 1 err)"
  for path in tuned/x_fp32_best tuned/x_fp32_step1; do
    check "text of a checkpoint ends where the folder's ends: $path" \
      [ "$(text $path.safetensors --prompt alabeta --count 40)" = alabeta ]
  done
  "$build/train" --init folder --data text.txt --results-dir tuned --dataset y --steps 1 --seq-len 16 \
    --lr 1e-12 --lora-rank 8 > out 2> err || fail "train: $(tail -n 1 err)"
  check "that of a merged file, too" \
    [ "$(text tuned/y_fp32_merged.safetensors --prompt alabeta --count 40)" = alabeta ]
  for path in tuned/y_fp32_adapter tuned/y_fp32_adapter/adapter_model.safetensors; do
    expect 3 'is an adapter, without the weights of its model: give the merged file' $path
    "$build/convert" $path o.gguf > out 2>&1; check "convert: $path" says out 'is an adapter, without'
    "$build/train" --init $path --data text.txt --results-dir o > out 2>&1
    check "train: $path" says out 'is an adapter, without'
  done
  echo '{"eos_token_id": 1.5}' > folder/generation_config.json
  expect 3 'eos_token_id .* must be an id' folder
  echo '{} {}' > folder/generation_config.json
  expect 3 'generation_config.json: byte 3: something follows' folder
  rm folder/generation_config.json; mkfifo folder/generation_config.json
  expect 3 'generation_config.json: cannot read it' folder
  rm folder/generation_config.json folder/tokenizer.json
  expect 3 'there is no tokenizer beside the model' folder
else fail "convert: $(tail -n 1 err)"; fi

closing_line
