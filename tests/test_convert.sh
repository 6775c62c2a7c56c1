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

sample_text > text
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
expect 0 '32 positions' tied.safetensors tied
check "a tied head is not written" not grep -q lm_head tied/model.safetensors
check "config.json says so" says tied/config.json '"tie_word_embeddings": true'
tensor tied/model.safetensors transformer.wpe.weight | decoded f32 > a
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
expect 3 'has 310 ids, the model 300' run.safetensors a.gguf --tokenizer big.tokenizer.json
"$build/prepare" --input text --output word --vocab-size 300 --tokenizer wordpiece > /dev/null 2>&1
expect 3 "byte-level BPE only: convert to a folder" run.safetensors a.gguf --tokenizer \
  word.tokenizer.json
expect 0 '' run.safetensors words --tokenizer word.tokenizer.json
check "WordPiece in a folder" says words/tokenizer_config.json '"eos_token": "\[SEP\]"'

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
check "a full disk is an error" eval '[ $code = 3 ] && says out "cannot write a.gguf: File too large"'
check "what fails leaves the earlier file" cmp a.gguf before
full folder --tokenizer none
check "a folder that is not whole has no config.json" [ $code = 3 -a ! -e folder/config.json ]
echo mine > victim; ln -s victim linked.gguf.tmp
expect 0 . run.safetensors linked.gguf --tokenizer none
check "a link is not followed" [ "$(cat victim)" = mine -a ! -L linked.gguf ]
rm victim linked.gguf
if [ -c /dev/full ]; then
  "$build/convert" run.safetensors said.gguf --tokenizer none > /dev/full 2> out
  check "output that is lost is a failure" [ $? = 3 ]
  rm said.gguf
fi
check "no temporary files are left" alone

closing_line
