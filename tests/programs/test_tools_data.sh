#!/usr/bin/env bash
# test_tools_data.sh BUILD_DIR - tests prepare, profile and schedule of BUILD_DIR, and in tools get_data.sh,
# bench.sh, profile.sh and quality.sh: files, reports, messages, exit codes. Prints what fails, what is
# skipped, and the closing line. Needs no network. Runs in the repository root.
set -u
. tests/lib.sh
root=$(pwd) build=$(realpath "$1") tools=$(realpath tools) data=$(realpath -m ../shared/data)
work=$(mktemp -d) server=
[ -d "$data" ] || data=$root/data
trap '[ -n "$server" ] && kill $server 2> /dev/null; rm -rf "$work"' EXIT
cd "$work" || exit 1

expect() { # CODE PATTERN COMMAND...: its exit code, and what it must say
  local want=$1 pattern=$2; shift 2
  timeout 120 "$@" > out 2> err < "${input:-/dev/null}"; code=$?
  if [ $code = "$want" ] && cat out err | grep -qE -- "$pattern"; then pass; return; fi
  fail "$*: exit $code, expected $want and /$pattern/; it said: $(cat err out | tail -n 2 | cut -c1-300)"
}
prepare() { local want=$1 pattern=$2; shift 2; expect "$want" "$pattern" "$build/prepare" "$@"; }
get() { local want=$1 pattern=$2; shift 2; expect "$want" "$pattern" "$tools/get_data.sh" -o got "$@"; }
whole() { # PREFIX: has all its files
  for part in train.tokens valid.tokens test.tokens tokenizer.json; do [ -s "$1.$part" ] || return 1; done
}
same() { # the ids and the tokenizer; bytes 36..39 of a token file depend on the options
  for part in train.tokens valid.tokens test.tokens; do cmp -i 64 "$1.$part" "$2.$part" || return 1; done
  cmp "$1.tokenizer.json" "$2.tokenizer.json"
}

awk 'BEGIN {
  srand(7)
  n = split("Al a be ta Gam ma żół ć del ta gęś ją kot", w, " ")
  for (d = 0; d < 60; d++) {
    for (i = 0; i < 600; i++) printf "%s%s", w[1 + int(rand() * n)], rand() < 0.5 ? " " : ""
    print "\n"
  }
}' > text.txt
polish='Za\u017c\u00f3\u0142\u0107 g\u0119\u015bl\u0105 ja\u017a\u0144'
for d in $(seq 0 59); do printf '{"text": "%s %d", "body": "other %d"}\n' "$polish" $d $d; done > text.jsonl

# prepare: the command line
prepare 2 'input and --output' --output o
prepare 2 'did you mean --vocab-size' --input text.txt --output o --vocab-sise 3
prepare 0 '--strip-accents' --help
prepare 2 'add --vocab-file vocab.bpe .get it with tools/get_data.sh' --input text.txt --output o \
  --tokenizer gpt2
prepare 2 'needs --tokenizer gpt2 or wordpiece' --input text.txt --output o --vocab-file x
prepare 3 'expected bpe, gpt2, wordpiece or the path' --input text.txt --output o --tokenizer wordpeace
prepare 3 'text.txt is not a vocab.bpe: get one with tools/get_data.sh vocab.bpe' --input text.txt --output \
  o --tokenizer gpt2 --vocab-file text.txt
prepare 3 'text.txt is not a vocab.txt: get one with tools/get_data.sh bert-vocab.txt' --input text.txt \
  --output o --tokenizer wordpiece --vocab-file text.txt
prepare 3 'absent.txt.*No such file' --input absent.txt --output o
prepare 2 '3 ids cannot hold' --input text.txt --output o --vocab-size 3
prepare 2 '20 ids cannot hold the characters.*ask for [0-9]+ or more' --input text.txt --output o \
  --tokenizer wordpiece --vocab-size 20
prepare 3 'no field "missing"' --input text.jsonl --output o --field missing
prepare 2 'text.txt is plain text, which has no field "text": leave out' --input text.txt --output o \
  --field text
prepare 3 'absent/: cannot find this folder' --input text.txt --output absent/o
check "no hidden file is named" not says err '\.tmp'
printf '{"text":""}\n%.0s' {1..60} > empty.jsonl
prepare 3 'empty.jsonl has no text' --input empty.jsonl --output o
{ cat text.txt; printf '\0'; } > nul.txt
prepare 3 "nul.txt is not text, .*first is at byte $(wc -c < text.txt)\)" --input nul.txt --output o
gzip -c text.jsonl > packed.jsonl.gz; prepare 3 'by gzip -dc' --input packed.jsonl.gz --output o
prepare 3 'packed.jsonl.gz is not UTF-8 text' --input text.txt --output o --tokenizer packed.jsonl.gz
awk 'BEGIN { printf "{"; for (i = 0; i < 300; i++) printf "\"t%d\": %d, ", i, i; print "\"x\": 300}" }' > \
  encoder.json
prepare 3 'this is a vocabulary: pass vocab.bpe' --input text.txt --output o --tokenizer encoder.json
check "what fails leaves no files" [ -z "$(find . -name 'o.*')" ]
if [ -c /dev/full ]; then
  small="--batch-size 1 --seq-len 16 --vocab-size 100"
  for command in prepare\ --help schedule "profile --device cpu --layers 1 --steps 2 --only-step $small"; do
    "$build"/$command > /dev/full 2> err; code=$?
    check "$command to a full disk" eval '[ $code = 3 ] && says err "cannot write all of standard output"'
  done
fi

# prepare: what it makes
prepare 0 '^vocabulary 300,' --input text.txt --output bpe --vocab-size 300
check "four files of a BPE" whole bpe
check "bytes of the report are those of the text" \
  [ "$(awk '$1 == "all" { print $3 }' out)" = "$(wc -c < text.txt)" ]
check "the splits add up" \
  awk '$1 ~ /train|valid|test/ { d += $2; t += $4 } $1 == "all" { exit !(d == $2 && t == $4 && d > 0) }' out
check "tokens of the report are those of the file" \
  [ "$(awk '$1 == "train" { print 64 + 2 * $4 }' out)" = "$(wc -c < bpe.train.tokens)" ]
check "it says that the text is plain" \
  says out "^plain text, $(awk '$1 == "all" { print $2 }' out) documents$"
cp out first.report; files=$(stat -c %i bpe.*)
prepare 0 'bpe is up to date' --input text.txt --output bpe --vocab-size 300
check "the second time nothing is made" [ "$(stat -c %i bpe.*)" = "$files" ]
check "the report is the same" cmp out first.report
prepare 0 '^vocabulary 300,' --input text.txt --output bpe --vocab-size 300 --seed 1
check "another seed makes them again" [ "$(stat -c %i bpe.*)" != "$files" -a ! -s err ]
input=text.txt prepare 0 '^vocabulary 300,' --input - --output bpe --vocab-size 300
check "standard input makes them again" [ ! -s err ]
prepare 0 '^vocabulary 300,' --input text.txt --output llama --vocab-size 300 --pattern llama3
check "it cuts as Llama 3" grep -q 'p{N}{1,3}' llama.tokenizer.json
awk 'BEGIN { # 50,000 merges, as many as GPT-2 has: of two letters, then of three
  print "#version: 0.2"
  for (i = 36; i < 127; i++) for (k = 36; k < 127; k++) printf "%c %c\n", i, k
  for (n = 91 * 91; n < 50000; n++)
    printf "%c%c %c\n", 36 + n % 91, 36 + int(n / 91) % 91, 36 + int(n / 8281) % 91}' > two.bpe
prepare 0 vocabulary --input text.txt --output two --tokenizer gpt2 --vocab-file two.bpe --pattern gpt2
check "the vocabulary's own pattern needs no note" [ ! -s err ]
prepare 0 vocabulary --input text.txt --output two --tokenizer gpt2 --vocab-file two.bpe --pattern qwen
check "another one does" says err 'note: the pattern of two.bpe is gpt2, not qwen: leave out --pattern'
echo '{"config": {"pattern": "x", "num_vocab_tokens": 2, "version": "v3"}, "vocab": [{"rank": 0,
  "token_bytes": "AA==", "token_str": "a"}], "special_tokens": []}' > tekken.json
prepare 3 'tekken.json is a tekken.json of Mistral, which mtt does not read' --input text.txt --output o \
  --tokenizer tekken.json
prepare 2 'pattern is for BPE' --input text.txt --output o --pattern qwen --tokenizer wordpiece
prepare 0 '^vocabulary 300,' --input text.txt --output word --vocab-size 300 --tokenizer wordpiece
check "four files of a WordPiece" whole word
check "it keeps capitals" grep -q '"A":' word.tokenizer.json
prepare 0 '^vocabulary 300,' --input text.txt --output again --tokenizer word.tokenizer.json
check "its own tokenizer.json makes the same files" same word again
input=text.txt prepare 0 '^vocabulary 300,' --input - --output again --vocab-size 300 --tokenizer wordpiece
check "standard input makes the same files" same word again
prepare 0 '^vocabulary 300,' --input text.txt --output low --vocab-size 300 --tokenizer wordpiece --lowercase
check "--lowercase has no capitals" [ "$(grep -c '"A":' low.tokenizer.json)" = 0 ]
check "--lowercase is in the tokenizer" grep -q '"strip_accents":false,"lowercase":true' low.tokenizer.json
check "Polish letters are kept" grep -q '"ż":' low.tokenizer.json
prepare 0 vocabulary --input text.jsonl --output accents --tokenizer wordpiece --vocab-size 60 --strip-accents
check "--strip-accents leaves l with a stroke alone" \
  eval '! grep -q "\"ż\":" accents.tokenizer.json && grep -q "ł" accents.tokenizer.json'
prepare 0 vocabulary --input text.jsonl --output body --field body --tokenizer wordpiece --vocab-size 40 \
  --seed 4
check "--field takes another text" grep -q '"other"' body.tokenizer.json
{ printf '\357\273\277\r\n \t\n'; sed 's/$/\r\n/' text.jsonl; } > blank.jsonl
for options in "" "--field body"; do
  prepare 0 "^60 JSONL documents, field $([ -z "$options" ] && echo text || echo body)$" --input blank.jsonl \
    --output blank --vocab-size 270 $options
done
printf '\n"Well", he said.\n%s\n\n' $(seq 2000) > spoken.txt
prepare 0 '^plain text, [234][0-9] documents$' --input spoken.txt --output spoken --vocab-size 270
{ cat text.txt; printf 'za\277\363\263\346\n'; } > latin2.txt
prepare 0 "4 bytes are not UTF-8, the first at byte $(($(wc -c < text.txt) + 2)) .*iconv -c -f UTF-8 -t" \
  --input latin2.txt --output latin2 --vocab-size 270
check "the warning is on standard error" says err '^prepare: warning: latin2.txt: '
while read -r coding bytes; do # the encoding that is proposed: - = none, since the others are UTF-8
  { for i in $(seq 300); do echo "line $i"; done; printf "$bytes"; } > coding.txt
  [ $coding = - ] && proposal='the other characters are UTF-8, .*iconv -c -f UTF-8' ||
    proposal="perhaps by iconv -f $coding -t UTF-8 coding.txt"
  prepare 0 "$proposal" --input coding.txt --output coding --vocab-size 270
done << 'CODINGS'
ISO-8859-2 za\277\363\263\346\040g\352\266l\261\040ja\274\361
WINDOWS-1250 za\277\363\263\346\040g\352\234l\271\040ja\237\361
WINDOWS-1250 \214liwa,\040\217dziebko
CP852 za\276\242\210\206\040g\251\230l\245\040ja\253\344
- \355\240\275\355\270\200\040\355\240\275\355\270\201
- overlong\040\300\257\040and\040\340\200\257
- za\305\274\303\263\305\202\304\207\040\305\040g\304\231\305\233l\304\205
CODINGS
check "one byte is, not are" says err 'coding.txt: 1 byte is not UTF-8, the first'

# ends of text: documents end there, and only there if they give enough; elsewhere they are noted
for i in $(seq 100); do
  printf 'Story %d.\n\nIt has %d lamps and boats.\n<|endoftext|>\n' $i $((i * 7 % 31))
done > ends.txt
prepare 0 '^plain text, 100 documents, separated by <\|endoftext\|>$' --input ends.txt --output ends \
  --vocab-size 270
check "there is no note" [ ! -s err ]
prepare 0 '^plain text, 100 documents, separated by <\|endoftext\|>$' --input ends.txt --output ends \
  --vocab-size 270
sed 's/$/\r/' ends.txt > windows_ends.txt
input=windows_ends.txt prepare 0 '^plain text, 100 documents, separated by <\|endoftext\|>$' --input - \
  --output ends --vocab-size 270
prepare 0 '^plain text, 30 documents, separated by .*text\|> and, as there are few, by blank lines$' \
  --input <(head -n 60 ends.txt | sed "s/boats/boats, bridges, cats, lions, dogs and seeds/") \
  --output few --vocab-size 262
while IFS='>' read -r name change; do # the note's command makes 100 documents of every form
  sed "$change" ends.txt > form.txt
  [ $name = joined ] && tr -d '\n' < ends.txt > form.txt
  prepare 0 "note: form.txt: .* is ordinary text (99|100) times: .* sed '" --input form.txt --output form \
    --vocab-size 270 $([ $name = words ] && echo --tokenizer wordpiece)
  (eval "$(grep -o "sed '.*" err)")
  prepare 0 '^plain text, 100 documents, separated by' --input NEW.txt --output form --vocab-size 270 \
    $([ $name = words ] && echo --tokenizer wordpiece)
done << 'FORMS'
joined>
line_end>:a;N;$!ba;s/\n<|/<|/g
line_begin>/endoftext/{N;s/>\n/>/}
llama>s/endoftext/end_of_text/
words>
FORMS
sed 's/.*/{"text": "&<|endoftext|>"}/' <(seq 100) > ends.jsonl
prepare 0 '^100 JSONL documents, field text, without <\|endoftext\|> at their ends$' --input ends.jsonl \
  --output ends --vocab-size 262
sed 's/.*/{"text": "& <|endoftext|> &"}/' <(seq 100) > ends.jsonl
prepare 0 'note: ends.jsonl: <\|endoftext\|> is ordinary text 100 times: .* give each a line of its own$' \
  --input ends.jsonl --output ends --vocab-size 262
sed 's/.*/\x1e{"text": "record &"}/' <(seq 60) > sequence.json
prepare 0 '^60 JSONL documents, field text$' --input sequence.json --output sequence --vocab-size 262
if command -v python3 > /dev/null; then
  python3 -c "
import base64
for i in range(256): print(base64.b64encode(bytes([i])).decode(), i, end='\r\n')" > own.tiktoken
  prepare 2 'own.tiktoken does not name its pattern: pass gpt2, smollm, llama3 or qwen .prepare --pattern' \
    --input text.txt --output o --tokenizer own.tiktoken
  for pattern in gpt2 qwen; do
    prepare 0 '^vocabulary 257,' --input text.txt --output own --tokenizer own.tiktoken --pattern $pattern
  done
fi
printf '%s\n' '[PAD]' '[UNK]' '[CLS]' '[SEP]' '[MASK]' a '##l' '##a' > vocab.txt
printf '\357\273\277%s\r\n' '[PAD]' > windows.txt; tail -n +2 vocab.txt | sed 's/$/\r/' >> windows.txt
prepare 0 '^vocabulary 8,' --input text.txt --output list --tokenizer vocab.txt --lowercase
prepare 0 '^vocabulary 8,' --input text.txt --output again --tokenizer wordpiece --vocab-file vocab.txt \
  --lowercase
check "a vocab.txt by either option" same list again
prepare 0 '^vocabulary 8,' --input text.txt --output again --tokenizer windows.txt --lowercase
check "a vocab.txt with Windows line ends and a mark" same list again
prepare 3 'expected a tokenizer.json, a vocab.bpe, a .tiktoken file' --input text.txt --output o --tokenizer \
  text.txt
printf '[PAD]\n[UNK]\n[UNK]\n' > twice.txt
prepare 3 'twice.txt:3: ' --input text.txt --output o --tokenizer twice.txt
model="--layers 1 --d-model 32 --heads 2 --seq-len 32 --batch-size 4 --steps 3"
expect 0 '"bits_per_byte": [0-9.]*[1-9]' "$build/train" --data word $model --sample 5
check "the trainer takes the vocabulary" grep -q '"parameters": ' out
expect 0 '"dataset": "list"' "$build/train" --data list $model
if [ -r "$data/vocab.bpe" ]; then
  prepare 0 '^vocabulary 50257,' --input text.txt --output gpt2 --tokenizer gpt2 --vocab-file \
    "$data/vocab.bpe"
  prepare 0 '^vocabulary 50257,' --input text.txt --output again --tokenizer "$data/vocab.bpe"
  check "gpt2 and its path are the same" same gpt2 again
else skip "$data/vocab.bpe is missing: tools/get_data.sh vocab.bpe"; fi

# profile and bench: on the CPU, at a size of seconds, and with a Python that says what PyTorch would
export OMP_WAIT_POLICY=passive
export PROFILE=$build/profile TRAIN=$build/train PYTHON=$work/python FIGURES=$work/figures.tsv \
  PAGE=$work/page.md STEPS=4
bench() { local want=$1 pattern=$2; shift 2; expect "$want" "$pattern" "$tools/bench.sh" "$@"; }
tiny="--device cpu --layers 1 --heads 2 --d-model 32 --vocab-size 300 --seq-len 32 --batch-size 2"
expect 0 '^\{"ms": [0-9.]+, "tokens_per_s": [0-9.]+, "arena_bytes": [0-9]+, "loss": [0-9.]+\}$' \
  "$build/profile" $tiny --only-step --steps 3
expect 0 '^\| adamw ' "$build/profile" $tiny --steps 2
expect 0 '^\| all_to_all ' "$build/profile" $tiny --steps 2 --ranks 2
expect 0 '^\| optimizer \| [0-9.]+ \| [0-9.]+ \| 0\.[0-9]+ \|' "$build/profile" $tiny --steps 2 --ranks 2
for options in --checkpointing '--early-update --bf16 --chunked' '--fp8 --flash --mlp swiglu'; do
  expect 0 "^\\| attn.c_attn \\|" "$build/profile" $tiny --steps 2 --d-model 128 --batch-size 16 $options
  sums=$(awk -F '|' '/^. (forward|backward|optimizer) /{n++; phases += $5}
    / %/ && NF == 8 {parts += $3 + $4 + $5 + $6}
    END {print (n >= 3 && phases > 0.05 && (phases - parts) ^ 2 < 1e-4)}' out)
  check "FLOPs of phases are those of components, $options" [ "$sums" = 1 ]
done
expect 0 '^rank 1 alone: a step [0-9.]+ ms$' "$build/profile" $tiny --steps 2 --ranks 2
expect 0 '^\{"ms": [0-9]+\.[0-9]+\}$' "$build/profile" $tiny --steps 2 --flash --only flash
check "attention takes time" grep -q '[1-9]' out
expect 0 '^\{"ms": [0-9.]+, "tokens_per_s": [0-9.]+, "arena_bytes": [0-9]+\}$' \
  "$build/profile" $tiny --generate 40
expect 2 '--steps 1: expected a whole number, 2 or more' "$build/profile" $tiny --steps 1
printf '%s\n' before '<!-- bench:begin -->' old '<!-- bench:end -->' after > page.md; cp page.md page.old
mkdir none; printf "#!/bin/sh\nexit 9\n" > none/nvidia-smi; chmod +x none/nvidia-smi
PATH=$work/none:$PATH bench 3 'missing: a GPU'
bench 2 'no case a129' a129
printf '#!/bin/sh\nexit 1\n' > python; chmod +x python
DEVICE=cpu bench 0 '^\| tiny, 4 x 64 \| flash \| [0-9.]+ \| 5 \|$' tiny
check "it says that PyTorch is absent" grep -q 'no PyTorch' err
cat > python << 'PYTHON'
#!/usr/bin/env bash
[ "$1" != -c ] || exit 0
echo "$@" >> calls
cat > "${!#}" << 'JSON'
{
 "device": "it",
 "pytorch": "9.8+cu7",
 "cuda": "7.6",
 "speed": [
  {
   "program": "PyTorch bf16, compiled",
   "note": "out of memory",
   "case": "tiny",
   "batch": 4,
   "seq_len": 64
  },
  {
   "program": "PyTorch bf16, compiled, graphs",
   "ms": 2000.5,
   "mib": 1000,
   "case": "tiny",
   "batch": 4,
   "seq_len": 64
  }
 ]
}
JSON
PYTHON
DEVICE=cpu bench 0 \
  '^\| tiny, 4 x 64 \| 2000.50 \(graphs\) \| 1,049 \| flash \| [0-9.]+ \| 5 \| [0-9.]+x \| 0 % \|$' tiny
check "FP8 beside it" says out '^\|  \| \| \| FP8, flash \| [0-9.]+ \| [0-9]+ \| [0-9.]+x \| [01] % \|$'
check "it names the versions" says out ', PyTorch 9\.8\+cu7 for CUDA 7\.6\.$'
check "it says how it measured" says out '^Each time is the mean of the second half of 4 steps, without'
DEVICE=cpu bench 0 '^\| tiny, 4 x 64, dropout 0.1 \| 2000.50 \(graphs\) .* flash \| ' tiny_dropout
check "PyTorch has the same dropout" says calls '--speed tiny --pytorch bf16 --dropout 0.1 --modes compile'
check "chosen cases leave the page alone" cmp page.md page.old
DEVICE=cpu bench 0 '^\| attention, heads 12:4 of 64, 4 x 64 \| flash \| [0-9.]+ \| – \|$' tiny_gqa
check "PyTorch's attention by both kernels" says calls '--speed tiny_gqa .* --modes eager --sdpa flash cudnn'
DEVICE=cpu bench 0 '^New tokens: the time of one of each sequence' tiny_generate
bench 0 "^Planned largest batch .*model C [0-9,]+ sequences in 25.26 GB, model D" largest
printf '%s\t%s\t%s\t%s\n' a128 'mtt flash' 10.234 4902000000 \
  a128 'PyTorch bf16, compiled, graphs, cuDNN' 20.36 8322547712 long 'mtt flash' - 'no | room' \
  a32 'mtt flash_chunked:8192' 1.5 1000000 >> figures.tsv
bench 0 "table is in $PAGE" --table
row="| 20.36 (graphs, cuDNN) | 8,323 | flash | 10.23 | 4,902 | 1.99x | 59 % |"
check "the table is in the page" grep -q "^| model A, 128 x 256 $row\$" page.md
check "the rows of a chunk" grep -q "^| model A, 32 x 256 | .* flash, chunked, 8192 rows a chunk | 1.50" \
  page.md
check "and what failed" grep -q "^| GPT-2 124M, 1 x 32768 | – | | flash | no / room | | | |\$" page.md
check "in the place of the old one, between the markers" \
  [ "$(sed '/bench:begin/,/bench:end/{//!d}' page.md)" = "$(grep -v old page.old)" -a \
    "$(grep -c '^old$' page.md)" = 0 ]
cp page.md page.old
bench 0 "table is in $PAGE" --table
check "twice is once" cmp page.md page.old
check "performance.md has the markers" \
  [ "$(grep -cE '^<!-- bench:(begin|end) -->$' "$tools/performance.md")" = 2 ]
grep '^tiny' figures.tsv > other.tsv # cases that the page does not have
FIGURES=$work/other.tsv expect 2 'no figures of these cases' "$tools/bench.sh" --table
check "without figures the page stays" cmp page.md page.old
(ulimit -f 0; trap '' XFSZ; "$tools/bench.sh" --table > /dev/null 2> err)
check "a page that cannot be written stays" cmp page.md page.old
echo bare > page.md
bench 2 'no pair of lines' --table
check "a page without markers stays" [ "$(cat page.md)" = bare ]

# profile.sh: two techniques side by side; the card's samples before the steps do not count
mkdir smi
printf '#!/bin/sh\necho "345, 80.5"; while :; do printf "1620, 690\\n1640, 700.0\\n"; sleep 0.02; done\n' > \
  smi/nvidia-smi
chmod +x smi/nvidia-smi
beside() { PATH=$work/smi:$PATH DEVICE=cpu expect "$1" "$2" "$tools/profile.sh" "${@:3}"; }
beside 0 '^profile.sh CASE'
beside 2 'there is no case a129: a128 ' a129
beside 2 'tiny_gqa is not a training step' tiny_gqa
beside 0 '^\| clock, MHz \| \| \| 1630 \| \| \| 1630 \| \|$' tiny
check "watts" says out '^\| power, W \| \| \| 695 \| \| \| 695 \| \|$'
check "an operation of both" \
  says out '^\| linear_backward_weight \| 64 > 192 \| 2 \| [0-9.]+ \| [0-9.]+ % \| 2 \| [0-9.]+ \| [0-9.]+ %'
check "an operation of FP8 alone" says out '^\| quantize \| 64 > 64 \| \| \| \| 1 \| [0-9.]+ \| [0-9.]+ % \|$'
check "the sum is that of its rows" awk -F ' *[|] *' '/%/ { ms[5] += $5; ms[8] += $8 }
  /operations alone/ { exit ($5 - ms[5]) ^ 2 + ($8 - ms[8]) ^ 2 > 0.001 } END { if (!ms[5]) exit 1 }' out
beside 0 '^\| adamw .* - \|$' $tiny --steps 2

# quality: two techniques and two seeds, side by side
quality() { # CODE PATTERN VARIABLE=VALUE... ARGUMENT...
  local want=$1 pattern=$2; shift 2
  DEVICE=cpu RESULTS=$work/quality SEEDS="0 1" GPUS="0 1" expect "$want" "$pattern" env -u STEPS "$@"
}
number() { sed -n "s/.*\"$2\": \([0-9.]*\).*/\1/p" "quality/tiny_s1_$1_metrics.json"; } # TECHNIQUE KEY
quality 2 'there is no absent.train.tokens' "$tools/quality.sh" absent tiny
quality 2 'there is no model gpt3' "$tools/quality.sh" bpe gpt3
if command -v gnuplot > /dev/null; then
  quality 0 'on GPU 1' "$tools/quality.sh" bpe tiny
  loss=$(awk "BEGIN { printf \"%.4f\", $(number fp8_flash val_loss) }")
  quality 0 "^\| tiny \| fp8_flash \| 1 \| $loss \| .* \| 0 \| 0 \| " "$tools/quality.sh" bpe tiny
  check "complete runs are left as they are" not says err 'on GPU'
  more=$(awk "BEGIN { printf \"%.2f\", \
    100 * ($(number fp8_flash perplexity) / $(number bf16_flash_chunked perplexity) - 1) }")
  check "FP8's perplexity differs by $more %" says quality/quality.md " fp8_flash \| 1 .* \| [+]?$more \|"
  check "means" [ "$(grep -c ' | mean | .* to .*)' quality/quality.md)" = 2 ]
  check "the curves" grep -q 'perplexity above the first' quality/tiny.svg
  echo '{"step": 200, "loss": 1, "grad_norm": null, "clipped": 7, "ms": 1}' >> \
    quality/tiny_s1_fp8_flash.jsonl
  quality 0 '^\| tiny \| fp8_flash \| 1 .* \| 1 \| 7 \| ' "$tools/quality.sh" bpe tiny
  quality 2 'has tiny with other settings' STEPS=9 "$tools/quality.sh" bpe tiny
  rm quality/tiny_s1_fp8_flash_metrics.json
  quality 1 'there is no result of tiny fp8_flash 1' TRAIN=false "$tools/quality.sh" bpe tiny
else skip "quality, gnuplot is missing: apt-get install gnuplot-nox"; fi

# schedule: what checkpointing recomputes
expect 0 'GFLOP a step, 0.0 % of them recomputed' "$build/schedule"
expect 0 ' again ' "$build/schedule" --recompute layer
expect 0 ' again ' "$build/schedule" --technique bf16_checkpointing
expect 2 'did you mean --layers' "$build/schedule" --layer 2
for program in schedule profile; do
  expect 2 '--lora-targets and --lora-alpha need a rank' "$build/$program" --lora-targets nonsense
  expect 2 '--lora-targets and --lora-alpha need a rank' "$build/$program" --lora-alpha 3
  expect 2 '--split needs --recompute budget' "$build/$program" --split
  OMP_NUM_THREADS=99999 expect 2 'OMP_NUM_THREADS is 99999' "$build/$program" --layers 1
done
expect 0 'note: --window-size 64 changes nothing: --seq-len is 64$' "$build/schedule" --window64 --seq-len 64
expect 0 'note: --window-size saves no memory without --flash' "$build/schedule" --window-size 16 --json
expect 0 '' "$build/schedule" --window-size 16 --flash --seq-len 64
check "a window that has an effect has no note" [ ! -s err ]
expect 0 'note: --window-size 64 changes nothing' "$build/profile" $tiny --window64 --steps 2 --only-step
expect 0 '^forward  linear: h.0.ln_1 h.0.attn.c_attn.weight ' "$build/schedule" --after forward
check "the forward pass alone" not says out 'backward'
expect 0 '^ +> forward  quantize_weights: ' "$build/schedule" --fp8 --before eight --after eight
expect 0 '= forward  embed:' "$build/schedule" --fp8 --before eight --after eight
expect 0 '^forward  linear: .*lora_A' "$build/schedule" --lora-rank 8 --after adapters
expect 0 '' "$build/schedule" --lora-rank 8 --before adapters
check "before the adapters there are none" not says out lora_A
check "before the first pass the list is empty" [ -z "$("$build/schedule" --before forward)" ]
expect 2 'no pass nothing: take forward generate adapters eight adjoints ' "$build/schedule" --after nothing
expect 2 'leave out the other outputs' "$build/schedule" --after step --json

# get_data: files by their address
get 0 'tinyshakespeare.txt +public domain'
expect 0 'vocab.bpe +GPT-2' "$tools/get_data.sh"
get 1 'unknown name nonsense' nonsense
expect 1 'there is no option --all' "$tools/get_data.sh" --all
long=$(printf 'z%.0s' $(seq 5000))
expect 1 '^get_data: there is no option --.\[31m[?]z*z \(--help lists all\)$' "$tools/get_data.sh" \
  --$'\033[31m\n'$long
check "and the message is short" [ "$(wc -c < err)" -lt 200 ]
expect 2 '^experiments: there is no suite or option --.\[31m[?]z*z \(--help' \
  "$root/examples/assignment/experiments.sh" --$'\033[31m\n'$long
check "and the message is short" [ "$(wc -c < err)" -lt 200 ]
if ! command -v curl > /dev/null && ! command -v wget > /dev/null; then
  skip "curl is missing: apt-get install curl"
  closing_line
  exit
fi
mkdir site; here=file://$work/site
cp text.txt text.jsonl site; sum=$(sha256sum < text.txt | cut -d ' ' -f 1)
get 0 'got/text.txt, [0-9]+ bytes, checksum correct' "$here/text.txt#sha256=$sum"
check "the file has come whole" cmp text.txt got/text.txt
get 0 'is already there' "$here/text.txt"
get 0 'is already there' "$here/text.txt#sha256=$sum"
echo junk > got/text.txt; cp got/text.txt got/vocab.bpe
get 1 "text.txt is already there, but its checksum is [0-9a-f]*, not $sum" "$here/text.txt#sha256=$sum"
get 1 'vocab.bpe is already there, but its checksum is [0-9a-f]*, not 1ce1664' vocab.bpe
check "what was there is left alone" [ "$(cat got/text.txt got/vocab.bpe)" = $'junk\njunk' ]
rm -r got
get 0 'checksum correct' "$here/text.txt#SHA256=$(tr a-f A-F <<< "$sum")"
check "a checksum may be in capitals" cmp text.txt got/text.txt
rm -r got
get 1 'expected 64 hexadecimal digits' "$here/text.txt#sha256=1234"
get 1 "is $sum, not 1{64}; it was removed" "$here/text.txt#sha256=$(printf '1%.0s' {1..64})"
check "a wrong checksum leaves nothing" [ -z "$(ls got)" ]
part() { echo "got/text.txt.$(sha256sum <<< "$1" | cut -c 1-8).part"; } # ADDRESS
printf OTHER > "$(part "$here/elsewhere/text.txt")"
printf OTHER > got/text.txt.part
get 0 'got/text.txt, ' "$here/text.txt"
check "a download of another address is not continued" cmp text.txt got/text.txt
rm got/*
head -c 5000 text.txt > "$(part "$here/text.txt")"
get 0 'checksum correct' "$here/text.txt#sha256=$sum"
check "a cut download continues" cmp text.txt got/text.txt
rm got/*; echo victim > victim
ln -s ../victim "$(part "$here/text.txt")"
get 1 'part or .* is a link: remove it' "$here/text.txt"
check "a link in the place of a part is not followed" [ "$(cat victim)" = victim ]
rm got/*
expect 0 '^./-x/text.txt, ' "$tools/get_data.sh" -o -x "$here/text.txt"
cp text.txt got
printf '\n<!DOCTYPE html>\r\n<title>Not found</title>\n' > site/page.jsonl
get 1 'page.jsonl is a web page, not data: <!DOCTYPE html>' "$here/page.jsonl"
echo 'Service unavailable' > site/words.jsonl
get 1 'not JSON: Service unavailable' "$here/words.jsonl"
: > site/empty.txt;             get 1 'empty.txt is empty' "$here/empty.txt"
gzip -c text.txt > site/text2.txt.gz
cp site/text2.txt.gz site/hidden.txt; get 1 'hidden.txt is gz' "$here/hidden.txt"
printf 'a\0b' > site/nul.txt;   get 1 'nul.txt is binary' "$here/nul.txt"
cp text.txt site/plain.gz;      get 1 'plain.gz is text' "$here/plain.gz"
get 1 'cannot download' "$here/absent.txt"
check "what fails leaves no files" [ "$(ls got)" = text.txt ]
get 0 'got/text2.txt, ' "$here/text2.txt.gz"
check ".gz is unpacked" cmp text.txt got/text2.txt
head -c 5000000 /dev/zero | tr '\0' a | gzip -c > site/bomb.txt.gz
ln -s ../victim got/bomb.txt.part
get 1 'bomb.txt.gz unpacks to more than 1048576 bytes' "$here/bomb.txt.gz"
check "a bomb leaves only what came" [ "$(ls got | grep bomb)" = bomb.txt.gz ]
get 1 'unpacks to more than 4999999 bytes' --unpack-limit 4999999 "$here/bomb.txt.gz"
get 0 'got/bomb.txt, 5000000 bytes' --unpack-limit 5000000 "$here/bomb.txt.gz"
get 1 'unpack-limit needs a number' --unpack-limit lots "$here/bomb.txt.gz"
check "a link in the place of a text is not followed" [ "$(cat victim)" = victim ]
if command -v zstd > /dev/null; then
  { head -n 20 text.jsonl | zstd -c; tail -n +21 text.jsonl | zstd -c; } > site/two.jsonl.zst
  get 0 'got/two.jsonl, ' "$here/two.jsonl.zst"
  check "both frames of a .zst are unpacked" cmp text.jsonl got/two.jsonl
  check "the packed file is gone" [ ! -e got/two.jsonl.zst ]
  head -c 100 site/two.jsonl.zst > site/cut.jsonl.zst
  get 1 'cut.jsonl.zst is damaged' "$here/cut.jsonl.zst"
  check "a damaged file leaves no text" [ ! -e got/cut.jsonl.part ]
  zstd -qc site/page.jsonl > site/packed.jsonl.zst
  get 1 'web page' "$here/packed.jsonl.zst"
  printf '{"file_size": %d}' "$(wc -c < site/two.jsonl.zst)" > site/two.manifest
  rm got/two.jsonl
  SPEAKLEASH=$here get 0 'got/two.jsonl, ' speakleash:two
  rm got/two.jsonl; echo '{"file_size": 77}' > site/two.manifest
  SPEAKLEASH=$here get 1 'bytes, but its manifest says 77' speakleash:two
  mkdir bin; for tool in bash env timeout curl head od tr sed wc grep cat mv rm mkdir sha256sum cut tail; do \
    ln -s "$(command -v $tool)" bin/; done
  PATH=$work/bin get 1 'zstd is needed to unpack .*: apt install zstd' "$here/two.jsonl.zst"
  if [ -r "$data/speakleash_sample.jsonl.zst" ]; then
    get 0 'speakleash_sample.jsonl, ' "file://$data/speakleash_sample.jsonl.zst"
    check "200 documents of two frames" [ "$(wc -l < got/speakleash_sample.jsonl)" = 200 ]
    prepare 0 '^all +200 ' --input got/speakleash_sample.jsonl --output sl --vocab-size 400
  else skip "speakleash_sample.jsonl.zst is missing: tools/get_data.sh speakleash:NAME gets one"; fi
else skip "zstd is missing: apt-get install zstd"; fi

# get_data: servers. Python's own cannot continue a file, so it sends all again. Ours cuts its first answer.
cutting='
import http.server, re
class Handler(http.server.BaseHTTPRequestHandler):
    cut = True
    def do_GET(self):
        data = open("site/" + self.path, "rb").read()
        start = int((re.match("bytes=([0-9]+)", self.headers.get("Range", "")) or [0, 0])[1])
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(data) - start))
        if start: self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        self.wfile.write(data[start:start + 7000 if Handler.cut else None])
        print(start, flush=True)
        Handler.cut = False
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print("port", server.server_port, "is open", flush=True)
server.serve_forever()'
if command -v python3 > /dev/null; then
  python3 -c "$cutting" > log 2>&1 & server=$!
  for _ in $(seq 100); do port=$(sed -n 's/^port \([0-9]*\).*/\1/p' log); [ -n "$port" ] && break; sleep \
    0.1; done
  rm -rf got
  get 1 'the first 7000 bytes are kept' "http://127.0.0.1:$port/text.txt#sha256=$sum"
  get 0 'checksum correct' "http://127.0.0.1:$port/text.txt#sha256=$sum"
  check "a cut download continues from there" grep -qx 7000 log
  check "it is whole then" cmp text.txt got/text.txt
  { kill $server && wait $server; } 2> /dev/null
  python3 -u -m http.server --bind 127.0.0.1 --directory site 0 > log 2>&1 & server=$!
  for _ in $(seq 100); do port=$(sed -n 's/.* port \([0-9]*\).*/\1/p' log); [ -n "$port" ] && break; sleep \
    0.1; done
  rm -rf got; mkdir got; head -c 5000 text.txt > "$(part "http://127.0.0.1:$port/text.txt")"
  get 0 'checksum correct' "http://127.0.0.1:$port/text.txt#sha256=$sum"
  check "a server without ranges sends all again" cmp text.txt got/text.txt
  get 1 'cannot download' "http://127.0.0.1:$port/absent.jsonl"
else skip "python3 is missing: apt-get install python3"; fi

closing_line
