#!/usr/bin/env bash
# test_convert.sh BUILD_DIR - tests convert of BUILD_DIR: bytes of its files, refusals, exit codes. Prints
# what fails and the closing line. Runs in the repository root. oracle_convert.py loads the files in other
# programs.
set -u
. tests/lib.sh
build=$(realpath "$1") work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1

expect() { # CODE PATTERN ARGUMENT...: the exit code of convert, and what it must say
  local want=$1 pattern=$2; shift 2
  timeout 120 "$build/convert" "$@" > out 2>&1; code=$?
  if [ $code = "$want" ] && says out "$pattern"; then pass; return; fi
  fail "convert $*: exit $code, expected $want and /$pattern/; it said: $(tail -n 2 out | cut -c1-300)"
}
train() { # NAME OPTION...: leaves NAME.safetensors
  local name=$1 file; shift
  "$build/train" --data text --dataset "$name" --results-dir "$name" --layers 2 --heads 2 --d-model 64 \
    --vocab-size 300 --seq-len 32 --batch-size 4 --steps 2 "$@" > /dev/null 2> log || fail "$(tail -n 1 log)"
  file=$(echo "$name"/*_step2.safetensors); ln -s "$file" "$name.safetensors"
  ln -sf "$name/$name.tokenizer.json" "$name.tokenizer.json"
}
number() { od -An -v -t u$3 -j $2 -N $3 "$1" | tr -d ' '; } # FILE OFFSET BYTES
tensor() { # FILE NAME: the bytes of a tensor of a safetensors file
  local size=$(number "$1" 0 8) begin end
  read -r begin end <<< "$(tail -c +9 "$1" | head -c $size |
    sed -n "1s/.*[{,]\"$2\":{[^}]*\"data_offsets\":\[\([0-9]*\),\([0-9]*\)\].*/\1 \2/p")"
  tail -c +$((9 + size + begin)) "$1" | head -c $((end - begin))
}
last() { tail -c $((($2 + 31) / 32 * 32)) "$1" | head -c $2; } # FILE BYTES: the last tensor, padded to 32
decoded() { # TYPE < BYTES: values as text
  case $1 in
    f32) od -An -v -w4 -t f4;;
    *) od -An -v -w${2:-2} -t u1;; esac | awk -v type=$1 '
    function half(low, high,  e, f) {
      e = int(high % 128 / 4); f = (high % 4) * 256 + low
      return (high > 127 ? -1 : 1) * (e ? (1 + f / 1024) * 2 ^ (e - 15) : f / 1024 * 2 ^ -14)
    }
    function brain(low, high,  e) {
      e = high % 128 * 2 + int(low / 128)
      return (high > 127 ? -1 : 1) * (e ? (1 + low % 128 / 128) * 2 ^ (e - 127) : 0)
    }
    type == "f32" {print $1}
    type == "f16" {print half($1, $2)}
    type == "bf16" {print brain($1, $2)}
    type == "q8_0" {d = half($1, $2); for (i = 3; i <= 34; i++) print d * ($i > 127 ? $i - 256 : $i)}'
}
near() { # FILE FILE RELATIVE BLOCK: values differ at most by that share of the largest of their block
  paste "$1" "$2" | awk -v share=$3 -v block=$4 '
    function judge(  i) {for (i = 0; i < n; i++) if (d[i] > share * most + 1e-7) bad++; n = most = 0}
    {d[n++] = $1 > $2 ? $1 - $2 : $2 - $1; a = $1 < 0 ? -$1 : $1; if (a > most) most = a; count++}
    n == block {judge()}
    END {exit bad || count != 300 * 64}'
}
alone() { [ -z "$(find . -name '*.tmp*')" ]; }
put() { printf "$3" | dd of="$1" bs=1 seek=$2 conv=notrunc 2> /dev/null; } # FILE OFFSET BYTES
offset() { # FILE NAME: where a tensor's data begins
  echo $((8 + $(number "$1" 0 8) + $(tail -c +9 "$1" | head -c $(number "$1" 0 8) |
    sed -n "1s/.*[{,]\"$2\":{[^}]*\"data_offsets\":\[\([0-9]*\),.*/\1/p")))
}

sample_text > text
cc -O1 -shared -fPIC "$OLDPWD/tests/platforms/faults.c" -o faults.so -ldl || fail "faults.c does not compile"
plain="--no-head-bias"
train run $plain --positions learned --max-seq 48 --technique bf16_flash
train tied $plain --head tied
train bias
train windowed $plain --technique fp32_window8
train wide $plain --technique fp32_flash_window32
cp text "$work/keep"

expect 0 '^usage: convert CHECKPOINT' --help
expect 2 'name a model and what to write' run.safetensors
expect 2 '--type q8: expected f32.f16.bf16.q8_0' run.safetensors a.gguf --type q8
expect 2 '--type q8_0 is for GGUF' run.safetensors folder --type q8_0
expect 2 'neither a folder nor a name that ends in .gguf' run.safetensors keep
expect 2 'has learned 48 positions' run.safetensors a.gguf --context 49
expect 3 'cannot open it' absent.safetensors a.gguf
expect 3 'does not fit a file of' text a.gguf
expect 3 'no_head_bias is 0 in the model, but 1 in gpt2' bias.safetensors a.gguf
expect 3 'windows of 8 keys.*--window-size' windowed.safetensors a.gguf
expect 0 '32 positions' wide.safetensors wide.gguf
check "what is refused leaves nothing" [ ! -e a.gguf -a ! -e folder ]

# a folder
expect 0 'note: the run trained 32 of 48 positions' run.safetensors folder
check "it says what it wrote" says out '^folder: gpt2 with 2 layers of 64, 2 heads, 300 ids, 48 positions: '
check "five files" [ "$(cd folder && echo *)" = \
  "config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json" ]
for file in config generation_config tokenizer_config tokenizer; do
  check "$file.json is JSON" is_json folder/$file.json
done
check "the tokenizer is the run's" cmp folder/tokenizer.json run/run.tokenizer.json
for word in '"n_positions": 48' '"n_inner": 256' '"vocab_size": 300' 'gelu_new' '"resid_pdrop": 0.0' \
  '"tie_word_embeddings": false' '"eos_token_id": 0'; do
  check "config.json has $word" says folder/config.json "$word"
done
check "the token that ends a text" says folder/tokenizer_config.json '"eos_token": "<\|endoftext\|>"'
for name in wte.weight wpe.weight h.1.attn.c_attn.weight h.0.mlp.c_proj.bias ln_f.bias; do
  tensor run.safetensors $name > a; tensor folder/model.safetensors transformer.$name > b
  check "$name has the FP32 values of the checkpoint" [ -s a -a "$(sum < a)" = "$(sum < b)" ]
done
tensor run.safetensors lm_head.weight > head; tensor folder/model.safetensors lm_head.weight > b
check "the head, too" cmp head b
check "no moments" not grep -q optim folder/model.safetensors
count=$(sed -n 's/.*positions: \([0-9]*\) parameters.*/\1/p' out)
size=$(number folder/model.safetensors 0 8)
check "the size of the file" [ "$(wc -c < folder/model.safetensors)" = $((8 + size + 4 * count)) ]
cp -r folder first
expect 0 folder run.safetensors folder
check "the same again" diff -r folder first
expect 0 '32 positions' run.safetensors short --context 32
tensor short/model.safetensors transformer.wpe.weight > b; tensor run.safetensors wpe.weight > a
check "--context takes the first positions" [ "$(sum < b)" = "$(head -c $((4 * 32 * 64)) a | sum)" ]

# the sinusoidal table
expect 0 '32 positions' tied.safetensors table
check "a tied head is not written" not grep -q lm_head table/model.safetensors
check "config.json says so" says table/config.json '"tie_word_embeddings": true'
tensor table/model.safetensors transformer.wpe.weight | decoded f32 > a
check "0.02 times sines and cosines" awk -v C=64 '{t = int((NR - 1) / C); i = (NR - 1) % C
  x = t * exp(-log(10000) * int(i / 2) * 2 / C); want = 0.02 * (i % 2 ? cos(x) : sin(x))
  if ($1 - want > 1e-8 || want - $1 > 1e-8) bad++} END {exit bad || NR != 32 * C}' a
expect 0 '40 positions' tied.safetensors longer --context 40
tensor longer/model.safetensors transformer.wpe.weight | decoded f32 > b
check "it can be longer" eval 'head -n 2048 b | cmp - a && [ $(wc -l < b) = 2560 ]'

# GGUF: header, alignment, and the head by the formula of each type
decoded f32 < head > want
while read -r type share block bytes file; do
  expect 0 "in ${file#*:}" run.safetensors $type.gguf --type $type
  check "$type: magic and version" [ "$(head -c 4 $type.gguf)$(number $type.gguf 4 4)" = GGUF3 ]
  check "$type: tensors and keys" [ "$(number $type.gguf 8 8) $(number $type.gguf 16 8)" = "29 19" ]
  check "$type: ends at a multiple of 32" [ $(($(wc -c < $type.gguf) % 32)) = 0 ]
  last $type.gguf $bytes | decoded $type $((bytes * block / 19200)) > got # bytes of a block
  check "$type: the head" near want got $share $block
done << 'TYPES'
f32 0 1 76800 :float32
f16 0.00048828125 1 38400 :float16
bf16 0.00390625 1 38400 :bfloat16
q8_0 0.0045 32 20400 :q8_0
TYPES
expect 0 'in float16' run.safetensors default.gguf
check "f16 is the default" cmp default.gguf f16.gguf
check "f32 has all matrices" [ $(($(wc -c < f32.gguf) - $(wc -c < f16.gguf))) -gt 100000 ]
for word in general.architecture tokenizer.ggml.merges blk.1.ffn_down.weight output_norm.bias; do
  check "it has $word" grep -q "$word" f16.gguf
done

# Llama and Qwen3: a folder is a model again, and gives the same files
while read -r name type options; do
  train $name $plain --norm rms --mlp swiglu --positions rotary $options
  mkdir $name.d
  expect 0 "^$name.d/$name: $type with 2 layers" $name.safetensors $name.d/$name
  check "$name: config.json is JSON" is_json $name.d/$name/config.json
  check "$name: its type" says $name.d/$name/config.json "\"model_type\": \"$type\""
  for to in f32 q8_0; do
    expect 0 "$type with" $name.safetensors $name.$to.gguf --type $to
    expect 0 "$type with" $name.d/$name $name.again.gguf --type $to --context 32
    check "$name: $to, converted through a folder" cmp $name.$to.gguf $name.again.gguf
  done
  expect 0 "$type with" $name.d/$name $name.d/again --context 32
  check "$name: the same folder" diff -r $name.d/$name $name.d/again
done << 'FAMILIES'
llama llama --heads-kv 1 --no-biases
pairs llama --rotary-interleaved --head tied --rotary-theta 500000
qwen3 qwen3 --qk-norm --no-biases --d-head 16 --rotary-interleaved
scaled llama --no-biases --rotary-factor 8 --rotary-low 1.5 --rotary-high 3 --rotary-original 64
FAMILIES
train turns $plain --norm rms --mlp swiglu --positions rotary --qk-norm --no-biases --rotary-factor 8
expect 3 "scales rotary positions, which llama.cpp's qwen3 lacks" turns.safetensors a.gguf
expect 0 '^turns.d: qwen3 with' turns.safetensors turns.d
check "a scaled Qwen3" says turns.d/config.json '"rope_type": "llama3", .*"factor": 8, .*embeddings": 8192}'
expect 0 '' turns.d turns.again --context 32
check "a scaled Qwen3 through a folder" diff -r turns.d turns.again
tensor llama.safetensors h.1.mlp.c_fc.weight | decoded f32 > a
tensor llama.d/llama/model.safetensors model.layers.1.mlp.up_proj.weight | decoded f32 > b
check "up is the second half of c_fc, transposed" awk 'NR == FNR {a[NR - 1] = $1; next}
  {i = FNR - 1; if ($1 != a[i % 64 * 512 + 256 + int(i / 64)]) bad++} END {exit bad || FNR != 16384}' a b
train other $plain --norm rms
expect 3 'norm is rms in the model, but layer in gpt2' other.safetensors a.gguf
train biased $plain --norm rms --mlp swiglu --positions rotary --qk-norm
expect 3 'no_biases is 0 in the model, but 1 in qwen3' biased.safetensors a.gguf

# the tokenizer
mv run.tokenizer.json away; cp run/run.tokenizer.json run/other.json; rm run/run.tokenizer.json
expect 3 'no tokenizer beside.*--tokenizer FILE, or none' run.safetensors a.gguf
expect 0 '' run.safetensors a.gguf --tokenizer run/other.json
check "a tokenizer by name" cmp a.gguf f16.gguf
expect 0 '' run.safetensors bare --tokenizer none
check "no tokenizer" [ "$(cd bare && echo *)" = "config.json generation_config.json model.safetensors" ]
expect 0 '' run.safetensors bare.gguf --tokenizer none
check "no tokenizer in GGUF" grep -q no_vocab bare.gguf
"$build/prepare" --input text --output big --vocab-size 310 > /dev/null 2>&1
expect 3 'has 310 ids, but the model 300' run.safetensors a.gguf --tokenizer big.tokenizer.json
"$build/prepare" --input text --output word --vocab-size 300 --tokenizer wordpiece > /dev/null 2>&1
expect 3 "byte-level BPE only: convert to a folder" run.safetensors a.gguf --tokenizer \
  word.tokenizer.json
expect 0 '' run.safetensors words --tokenizer word.tokenizer.json
check "WordPiece in a folder" says words/tokenizer_config.json '"eos_token": "\[SEP\]"'

# what the folder of another program says of its chat
cp -r llama.d/llama chat
sed -i 's/"eos_token_id": 0/"eos_token_id": [297, 0]/' chat/config.json
echo '{"do_sample": false, "temperature": 0.6, "eos_token_id": [298, 297, 0], "bos_token_id": 7}' \
  > chat/generation_config.json
printf '{"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 77, "eos_token": {"content": "%s"},
  "padding_side": "left",
  "chat_template": "{%% for m in messages %%}\\u003cm\\"%%s{{ m }}{%% endfor %%}\\n"}' \
  "$(sed 's/.*"\([^"]*\)": *298[,}].*/\1/; s/.*"\([^"]*\)":298[,}].*/\1/' chat/tokenizer.json | tail -n 1)" \
  > chat/tokenizer_config.json
expect 0 . chat chat2
check "ids that end a turn" says chat2/config.json '"eos_token_id": \[298, 297, 0\]'
check "in generation_config.json, too" says chat2/generation_config.json '"eos_token_id": \[298, 297, 0\]'
for word in '"do_sample": false' '"temperature": 0.6' '"bos_token_id": 7'; do
  check "generation_config.json keeps $word" says chat2/generation_config.json "$word"
done
for word in '"model_max_length": 77' '"padding_side": "left"' '"chat_template": ".% for m in.*\\n"'; do
  check "tokenizer_config.json keeps $word" says chat2/tokenizer_config.json "$word"
done
for file in config generation_config tokenizer_config; do check "$file is JSON" is_json chat2/$file.json; done
expect 0 . chat2 chat3
check "the same through a folder" diff -r chat2 chat3
tune() { # NAME INIT OPTION...
  local name=$1 from=$2; shift 2
  "$build/train" --data text --dataset $name --results-dir $name --init $from --batch-size 4 --seq-len 16 \
    --steps 2 "$@" > /dev/null 2> log || fail "$(tail -n 1 log)"
}
# Checkpoints carry it: of a run, resumed, with adapters, merged, begun from a checkpoint, and copied.
tune said chat; tune said chat --resume --steps 3
tune again said/said_fp32_best.safetensors
tune adapted again/again_fp32_step2.safetensors --lora-rank 8; tune adapted chat --lora-rank 8
mkdir copied; cp adapted/adapted_fp32_merged.safetensors adapted/adapted_fp32_tokenizer.json copied
for path in said/said_fp32_step3 again/again_fp32_best adapted/adapted_fp32.old/adapted_fp32_merged \
  copied/adapted_fp32_merged; do
  rm -rf carried; expect 0 . $path.safetensors carried
  for file in config generation_config tokenizer_config tokenizer; do
    check "$path carries $file.json" cmp carried/$file.json chat2/$file.json
  done
  expect 0 'of id 297 only by its text' $path.safetensors carried.gguf
  check "$path: template in GGUF" grep -q '{% for m in messages %}<m"%s{{ m }}' carried.gguf
done
"$build/train" --data text --dataset own --results-dir own --init chat --tokenizer word.tokenizer.json \
  --batch-size 4 --seq-len 16 --steps 1 > /dev/null 2> log
check "another tokenizer has no use for it, and that is said" says log 'chat template.* another tokenizer'
expect 0 . own/own_fp32_best.safetensors own.d
check "... and its folder has none" not says own.d/tokenizer_config.json chat_template
cp chat/generation_config.json kept.json
echo '{"eos_token_id": [298, 300, 0]}' > chat/generation_config.json
tune beyond chat
check "an id beyond the model is said" says log 'eos_token_id of chat has 300, which is left out'
expect 0 . beyond/beyond_fp32_best.safetensors beyond.d
check "... and left out" says beyond.d/config.json '"eos_token_id": \[298, 0\]'
mv kept.json chat/generation_config.json
expect 0 . chat short.d --context 16
check "--context is for the tokenizer, too" says short.d/tokenizer_config.json '"model_max_length": 16'
u32_of() { # FILE KEY: the value of a key of GGUF
  local at=$(grep -abo "$2" "$1" | head -n 1 | cut -d: -f1)
  [ -z "$at" ] || number "$1" $((at + ${#2} + 4)) 4
}
expect 0 'note: a GGUF file has no temperature: pass 0.6 to' chat chat.gguf
check "it says that do_sample is lost" says out 'no do_sample: pass false'
check "it says that an end of a turn is known by name alone" says out 'of id 297 only by its text'
check "GGUF: the end of a turn" [ "$(u32_of chat.gguf tokenizer.ggml.eos_token_id)" = 298 ]
check "GGUF: eot" [ "$(u32_of chat.gguf tokenizer.ggml.eot_token_id)" = 298 ]
check "GGUF: the chat template, without escapes" grep -q '{% for m in messages %}<m"%s{{ m }}' chat.gguf
check "GGUF of a run has no eot" [ -z "$(u32_of f16.gguf tokenizer.ggml.eot_token_id)" ]
printf 'a "template"\tof {{ turns }}\n' > chat/chat_template.jinja
expect 0 . chat jinja
check "chat_template.jinja comes first" says jinja/tokenizer_config.json \
  '"chat_template": "a ."template."(\\u0009)of .. turns ...u000a"'
check "jinja: JSON" is_json jinja/tokenizer_config.json
expect 0 . chat jinja.gguf
check "GGUF: chat_template.jinja" grep -q 'a "template".of {{ turns }}' jinja.gguf
expect 0 'without a tokenizer the chat template is left out' chat bare.d --tokenizer none
mkdir chat/additional_chat_templates
printf 'a "tool"' > chat/additional_chat_templates/tool_use.jinja
rm -rf jinja; expect 0 . chat jinja
check "additional_chat_templates beside it" says jinja/tokenizer_config.json \
  '"chat_template": \[\{"name": "default", "template": "a ..*"name": "tool_use", "template": "a ."tool.""\}\]'
check "several files: JSON" is_json jinja/tokenizer_config.json
expect 0 'of several chat templates, the default one alone' chat jinja.gguf
check "GGUF: the default file" grep -q 'a "template".of {{ turns }}' jinja.gguf
tune jinja_run chat
rm -rf carried; expect 0 . jinja_run/jinja_run_fp32_best.safetensors carried
check "checkpoints carry all files" cmp carried/tokenizer_config.json jinja/tokenizer_config.json
# Texts that no file of text may be made of, for each reader; the file itself is named.
unreadable() { # PATTERN WHAT
  for target in bad.d bad.gguf; do expect 3 "$1" chat $target; check "$2: no $target" [ ! -e $target ]; done
  "$build/generate" chat --count 1 > out 2>&1; check "$2: generate" says out "$1"
  "$build/train" --data text --dataset bad --results-dir bad --init chat > out 2>&1
  check "$2: train" says out "$1"
}
for file in chat_template.jinja additional_chat_templates/tool_use.jinja; do
  cp chat/$file kept
  printf 'x\0TAIL' > chat/$file; unreadable "$file is no text: it has a NUL" "a NUL in $file"
  printf 'x\377\376y' > chat/$file; unreadable "$file is no text" "bytes in $file"
  cp kept chat/$file
done
for file in generation_config tokenizer_config config; do
  cp chat/$file.json kept
  LC_ALL=C sed "1s/{/{\"x\": \"$(printf '\377')\", /" kept > chat/$file.json
  unreadable "$file.json is no text" "bytes in $file.json"
  cp kept chat/$file.json
done
rm -r chat/additional_chat_templates
rm chat/chat_template.jinja
cp chat/tokenizer_config.json kept
for value in 5 true '["x"]' '{"a": 1}' '[{"name": "default"}]' '[{"name": 1, "template": "x"}]' \
  '"x\\u0000TAIL"'; do
  sed 's|"chat_template": ".*"|"chat_template": '"$value|" kept > chat/tokenizer_config.json
  unreadable 'chat_template of tokenizer_config.json must be a text without a NUL' "chat_template $value"
done
sed 's/"chat_template": ".*"/"chat_template": null/' kept > chat/tokenizer_config.json
expect 0 . chat nothing.d; expect 0 . chat nothing.gguf
check "null is no template" eval '! grep -q chat_template nothing.d/tokenizer_config.json nothing.gguf'
sed 's/"chat_template": ".*"/"chat_template": {"tool": "T", "default": "D%"}/' kept \
  > chat/tokenizer_config.json
expect 0 'the default one alone' chat object.gguf
check "an object of templates: the default one" grep -q 'D%' object.gguf
cp kept chat/tokenizer_config.json
list='[{"name": "tool", "template": "T"}, {"name": "default", "template": "D\1"}]'
sed -i 's/"chat_template": "\(.*\)\\n"/"chat_template": '"$list/" chat/tokenizer_config.json
expect 0 'of several chat templates, the default one alone' chat several.gguf
check "GGUF: the default template" grep -q 'D{% for m in' several.gguf
expect 0 . chat several
check "a folder keeps all" says several/tokenizer_config.json '"name": "tool"'
echo '{"eos_token_id": [0, 300]}' > chat/generation_config.json
expect 3 "eos_token_id has 300, but the model's ids end at 299" chat a.gguf
echo '{"eos_token_id": "x"}' > chat/generation_config.json
expect 3 'eos_token_id of .* must be an id' chat a.gguf
echo '{' > chat/generation_config.json
expect 3 'generation_config.json: byte 2' chat a.gguf

# names and positions of what was fine-tuned
name() { local at=$(grep -abo general.name "$1" | head -n 1 | cut -d: -f1)
  tail -c +$((at + 25)) "$1" | head -c $(number "$1" $((at + 16)) 8); }
cp -r llama.d/llama Model-1.5B
for path in Model-1.5B Model-1.5B/ Model-1.5B///; do
  expect 0 . $path named.gguf
  check "the name of $path" [ "$(name named.gguf)" = Model-1.5B ]
done
(cd Model-1.5B; "$build/convert" . ../named.gguf > out 2>&1)
check "the name of ." [ "$(name named.gguf)" = Model-1.5B ]
rm -rf Model-1.5B/out
cp run.safetensors v1.5.safetensors
expect 0 . v1.5.safetensors named.gguf --tokenizer none
check "of a file, the ending alone is cut" [ "$(name named.gguf)" = v1.5 ]
cp -r llama.d/llama base
sed -i 's/"max_position_embeddings": 32/"max_position_embeddings": 8192/' base/config.json
tune full base
expect 0 ' 8192 positions' full/full_fp32_step2.safetensors full.d
tune full base --resume --steps 3
expect 0 ' 8192 positions' full/full_fp32_step3.safetensors full.gguf
check "llama.context_length" [ "$(u32_of full.gguf llama.context_length)" = 8192 ]
tune lora base --lora-rank 8
expect 0 ' 8192 positions' $(echo lora/*_merged.safetensors) lora.d --tokenizer full/full_fp32_tokenizer.json
check "no --init: those trained" says llama.d/llama/config.json '"max_position_embeddings": 32'

# the default model of train on a CPU
"$build/train" --data text --dataset default --results-dir default --steps 1 > /dev/null 2> log
expect 0 'gpt2 with 4 layers of 128' default/default_fp32_step1.safetensors default.d

# a target that is the source, or another model
cp -r folder source; cp run.safetensors source.gguf
ln -s source link; cp -al source hard; mkdir holds; cp tied.safetensors holds/model.safetensors
mkdir part; cp folder/model.safetensors part
mkdir adapter; echo '{}' > adapter/adapter_config.json; mkdir -p other.d/additional_chat_templates
mkdir shards; echo '{"weight_map": {}}' > shards/model.safetensors.index.json
mkdir words.d; cp word.tokenizer.json words.d/tokenizer.json
mkdir jinja.d; echo x > jinja.d/chat_template.jinja
mkdir pipe.d; mkfifo pipe.d/tokenizer.json
all() { # all files of the targets
  find source link hard holds part adapter shards words.d jinja.d pipe.d folder llama.d -type f \
    -exec sha256sum {} +
  find . -name '.*'
}
all > want
while read -r from to pattern; do
  expect 3 "$pattern" $from $to --tokenizer run/other.json
  check "convert $from $to changes nothing" cmp <(all) want
done << 'TARGETS'
source source is the source itself
source source/ is the source itself
source folder/../source is the source itself
source link is the source itself
link source is the source itself
source hard is a file of the source: name another folder
source.gguf source.gguf is a file of the source
run.safetensors run is of another model
holds/model.safetensors holds is a file of the source
run.safetensors holds is there without its other files
run.safetensors part is there without its other files
run.safetensors adapter adapter_config.json is of another model: remove it, or name another folder
run.safetensors shards index.json is of another model
run.safetensors other.d additional_chat_templates is of another model
run.safetensors words.d tokenizer.json is of another model, or was written with other options
run.safetensors jinja.d chat_template.jinja is of another model
run.safetensors pipe.d tokenizer.json is of another model
run.safetensors llama.d/llama is of another model, or was written with other options: remove llama.d/llama
tied.safetensors folder config.json is of another model
TARGETS
expect 3 'config.json is of another model, or was' run.safetensors folder --type f16 \
  --tokenizer run/other.json
check "nor does another type" cmp <(all) want
ln -s source/model.safetensors linked.gguf
expect 3 'linked.gguf is a file of the source' source linked.gguf
rm linked.gguf; ln source/model.safetensors linked.gguf
expect 3 'linked.gguf is a file of the source' source linked.gguf
check "nor do links to its files" cmp <(all) want
rm pipe.d/tokenizer.json linked.gguf

# weights that are too large or changed
cp -r folder big.d
sed -i 's/"crc32":"00000000"/"craa2":"00000000"/' big.d/model.safetensors # no checksums, as of other programs
at=$(offset big.d/model.safetensors transformer.h.1.mlp.c_proj.weight)
while read -r bytes to pattern; do
  put big.d/model.safetensors $at "$bytes"
  cp f16.gguf big.gguf
  case $to in folder) target=big.out;; *) target=big.gguf;; esac
  expect 3 "$pattern" big.d $target --type $to
  check "$pattern: the earlier file stays" cmp f16.gguf big.gguf
done << 'WEIGHTS'
\0\0\x80\x49 f16 a weight of 1.04858e.06, too large for f16: pass --type bf16
\0\0\x80\x4f q8_0 ffn_down.weight has a weight of 4.29497e.09, too large for q8_0: pass --type bf16
\xff\xff\x7f\x7f bf16 a weight of 3.40282e.38, too large for bf16: pass --type f32
\0\0\x80\x7f f32 values that are not finite
WEIGHTS
mkdir sums; cp -r folder sums/f
at=$(offset sums/f/model.safetensors transformer.h.0.attn.c_attn.weight)
put sums/f/model.safetensors $((at + 5)) '\x55'
expect 3 'h.0.attn.c_attn.weight does not match its checksum' sums/f sums.gguf
at=$(grep -abo crc32.transformer.ln_f.bias sums/f/model.safetensors | cut -d: -f1)
rm -r sums/f; cp -r folder sums/f; put sums/f/model.safetensors $((at + 10)) x
expect 3 'ln_f.bias does not match its checksum' sums/f sums.gguf

# kill -9, or a failure, at each call on a file of the target
export FAULT_FOLDER=$work/t/ FAULT_MARK=$work/mark
goal() { case $1 in *.gguf) "$build/convert" $2 $work/t/m.gguf;; *) "$build/convert" $2 $work/t/m;; esac; }
train newer $plain --positions learned --max-seq 48 --technique bf16_flash --lr 1e-2
cp run/other.json run/run.tokenizer.json; mv away run.tokenizer.json
is_whole() { # WANT: the target is that, to the byte
  cmp -s t/m.gguf $1.gguf 2> /dev/null && return
  [ -d t/m ] && diff -r -x '.*' t/m $1.m > /dev/null
}
is_none() { [ ! -e t/m.gguf -a ! -e t/m/config.json ]; }
for source in run newer; do
  mkdir t; goal .gguf $source.safetensors > log 2>&1; goal m $source.safetensors > log 2>&1
  mv t/m.gguf $source.gguf; mv t/m $source.m; rm -r t
done
check "two models to tell apart" not cmp -s run.m/model.safetensors newer.m/model.safetensors
same=$(sum run.safetensors newer.safetensors) deaths=0 failures=0
for form in gguf m; do for before in none run; do for how in kill fail; do
  for ((n = 1; n < 400; n++)); do
    rm -rf t mark; mkdir t
    [ $before = none ] || cp -r $before.$form t/$([ $form = m ] && echo m || echo m.gguf)
    (export FAULT_AT=$n LD_PRELOAD=$work/faults.so; [ $how = fail ] || export FAULT_KILL=1
      goal .$form newer.safetensors) > out 2>&1; code=$?
    [ -e mark ] || break
    site="$how at $(cat mark), $form over $before"
    [ $how = fail ] && failures=$((failures + 1)) || deaths=$((deaths + 1))
    if ! is_whole newer; then
      check "$site: neither the old nor the new model" \
        $([ $before = none ] && echo is_none || echo is_whole run)
      check "$site: exit code 0 without the new one" [ $code != 0 ]
    fi
    [ $how = kill ] || grep -q ^unlink mark || check "$site: temporaries stay" alone
    goal .$form newer.safetensors > out 2>&1
    check "$site: the next call does it: $(tail -n 1 out)" is_whole newer
    check "$site: the next call leaves no temporaries" alone
  done
done; done; done
check "the sources are as they were" [ "$same" = "$(sum run.safetensors newer.safetensors)" ]
check "$deaths deaths and $failures failures are too few" [ $deaths -gt 100 -a $failures -gt 100 ]
echo "convert was killed at $deaths calls and failed at $failures: nothing lost, nothing wrong"
rm -rf t

# two at once: one wins, the other one is refused by name
unset FAULT_MARK
export FAULT_SLOW=fsync FAULT_FOLDER=$work/t
both=0 wrong=0
for ((round = 0; round < ${ROUNDS:-12}; round++)); do
  rm -rf t; mkdir t
  case $((round % 2)) in 0) form=.gguf;; *) form=m;; esac
  LD_PRELOAD=$work/faults.so goal $form run.safetensors > one 2>&1 & id=$!
  sleep 0.$(printf %03d $((round * 17 % 120)))
  LD_PRELOAD=$work/faults.so goal $form newer.safetensors > two 2>&1; second=$?
  wait $id; first=$?
  case "$first $second" in # the file is of one that says so
    "0 0") is_whole run || is_whole newer;;
    "0 "*) is_whole run;;
    *" 0") is_whole newer;;
    *) false;;
  esac || wrong=$((wrong + 1))
  for log in one two; do
    case $log in one) code=$first;; two) code=$second;; esac
    [ $code = 0 ] || says $log 'another process is writing .*/t/m' || wrong=$((wrong + 1))
  done
  [ $first = 0 -a $second = 0 ] || both=$((both + 1))
done
check "$wrong wrong outcomes of $round rounds with two at once" [ $wrong = 0 ]
check "rounds in which one was refused: $both" [ $both -gt 0 ]
unset FAULT_FOLDER FAULT_SLOW
rm -rf t

# temporaries that somebody else put there are not written to
echo mine > victim
for kind in 'ln -s victim' 'ln victim' 'cp victim' mkfifo; do
  $kind .planted.gguf.tmp
  expect 0 . run.safetensors planted.gguf --tokenizer none
  check "a temporary made by $kind is not written to" \
    [ "$(cat victim)" = mine -a ! -L planted.gguf -a "$(stat -c %h planted.gguf)" = 1 ]
  check "... and gives no other model" cmp planted.gguf bare.gguf
  rm planted.gguf
done
ln victim .other.tokenizer.json.tmp
"$build/prepare" --input text --output other --vocab-size 300 > /dev/null 2>&1
check "nor by the library" [ "$(cat victim)" = mine -a -s other.tokenizer.json ]
rm victim

# damage and full disks
patched() { # OFFSET BYTE: a copy with one byte changed
  cp run.safetensors bad.safetensors
  printf "$2" | dd of=bad.safetensors bs=1 seek=$1 conv=notrunc 2> /dev/null
}
size=$(number run.safetensors 0 8)
patched $((8 + size + 100)) '\x55'; cp a.gguf before
expect 3 'wte.weight does not match its checksum' bad.safetensors a.gguf --tokenizer none
patched $((8 + $(grep -abo '"step":"2"' run.safetensors | head -n 1 | cut -d: -f1))) 3
expect 3 'metadata has no checksum or another one' bad.safetensors a.gguf --tokenizer none
head -c $((8 + size + 5000)) run.safetensors > bad.safetensors
expect 3 'data that is missing at the end of the file' bad.safetensors a.gguf --tokenizer none
head -c 100 run.safetensors > bad.safetensors
expect 3 'cut off' bad.safetensors a.gguf --tokenizer none
full() { (trap '' XFSZ; ulimit -f 100; "$build/convert" run.safetensors "$@" > out 2>&1); code=$?; }
full a.gguf --tokenizer none
check "a full disk is an error" eval '[ $code = 3 ] && says out "a.gguf: cannot write it: File too large"'
check "what fails leaves the earlier file" cmp a.gguf before
full unfinished --tokenizer none
check "nor does a folder stay that was made for nothing" [ $code = 3 -a ! -e unfinished ]
(ulimit -f 100; "$build/convert" run.safetensors a.gguf > out 2>&1); code=$?
check "a limit on files is no death" [ $code = 3 ]
for signal in INT TERM HUP USR1 USR2 XCPU; do # during the first sync, which takes a while
  FAULT_FOLDER=$work/ FAULT_SLOW=fsync LD_PRELOAD=$work/faults.so \
    "$build/convert" run.safetensors signalled > out 2>&1 & id=$!
  for ((i = 0; i < 200; i++)); do [ ! -e signalled ] || break; sleep 0.01; done
  kill -$signal $id; wait $id; code=$?
  check "SIG$signal: $code, nothing stays, or all is there" eval \
    '[ $code = 130 -a ! -e signalled ] || [ $code = 0 -a -e signalled/config.json ]'
  check "SIG$signal leaves no temporaries" alone
  rm -rf signalled
done
for mask in 002 077; do
  (umask $mask; mkdir masked; cd masked || exit 1
    for to in m m.gguf; do "$build/convert" ../run.safetensors $to; done) > out 2>&1
  file=$(printf %o $((8#666 & ~8#$mask))) folder=$(printf %o $((8#777 & ~8#$mask)))
  check "umask $mask holds for what convert writes" \
    [ -s masked/m.gguf -a -z "$(find masked -type f ! -perm $file -o -type d ! -perm $folder)" ]
  rm -rf masked
done
if [ -c /dev/full ]; then
  "$build/convert" run.safetensors said.gguf --tokenizer none > /dev/full 2> out
  check "output that is lost is a failure" [ $? = 3 ]
  rm said.gguf
fi
check "no temporary files are left" alone

closing_line
