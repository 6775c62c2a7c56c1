# same_files.sh - what the tests of other systems share: the same calls of programs on this system and on the
#                 other one, each in a folder of its own, must leave the same files. $build has the programs:
#                 NAME for this system, NAME$ending for the other one, whose programs $runs runs.
export LC_ALL=C # decimals have a point
rm -rf "$build"/{here,there} && mkdir "$build"/{here,there}
exact=(-std=gnu99 -O1 -ffp-contract=off -DMTT_PORTABLE) # bits depend on which products run, and are fused
build_programs() { # COMPILER
  local program name
  for program in examples/{hello,train,generate,assignment/report} \
    tools/{prepare,convert,schedule,trainer,profile}; do
    name=${program##*/}
    gcc "${exact[@]}" $program.c -o "$build/$name" -lm &
    check "$name, no warning" $1 "${exact[@]}" -Wall -Wextra -Werror -I"$build" $program.c \
      -o "$build/$name$ending" -lm
    wait
  done
}
call() { # here|there PROGRAM ARGUMENT...
  local run=("$build/$2")
  [ $1 = here ] || run=($runs "$build/$2$ending")
  (cd "$build/$1" && "${run[@]}" "${@:3}" >> out.$2 2>> err < /dev/null)
}
run_test() { # NAME [quick]: the test NAME$ending
  local log=$build/$1.log line
  timeout 1800 $runs "$build/$1$ending" ${2:-} > "$log" 2>&1
  line=$(tr -d '\r' < "$log" | tail -n 1)
  echo "$1, run by $runs: $line"
  if [[ $line =~ ^[1-9][0-9]*\ passed,\ 0\ failed ]]; then pass; else fail "$1: $(tail -n 3 "$log")"; fi
}
files() { (cd "$build/$1" && find . -type f | sort); }
timeless() { sed -E 's/"(ms|time|training_time|ms_per_step|tokens_per_s)": [0-9.]+/"\1": 0/g' "$1"; }
same_files() {
  local small system words file same=0
  sample_text | head -c 60000 > "$build/text.txt"
  small='--data data --layers 2 --heads 4 --d-model 64 --seq-len 32 --batch-size 4 --no-head-bias'
  cat > "$build/calls" << CALLS
prepare --input text.txt --output words --tokenizer wordpiece --vocab-size 300
prepare --input text.txt --output data --vocab-size 400
trainer $small --technique fp32 --steps 8 --save-every 3 --eval-every 4 --sample 20 --log csv
trainer $small --technique fp32 --steps 10 --eval-every 4 --resume
trainer $small --technique bf16_flash_checkpointing --steps 4
trainer $small --technique fp16_flash_chunked --steps 4
trainer $small --technique fp8_flash --steps 4
trainer $small --technique bf16_flash_compact --steps 4
trainer $small --technique bf16 --lora-rank 8 --steps 4
train $small --technique bf16_flash --results-dir tiny --steps 4 --sample 20
convert results/data_fp32_best.safetensors model.gguf
convert results/data_fp32_best.safetensors folder
generate results/data_fp32_best.safetensors --prompt ab --count 40 --seed 3
generate results/data_fp32_best.safetensors --prompt ab --count 40 --seed 4 --temperature 0.8 --top-k 50
generate results/data_fp32_best.safetensors --prompt ab --count 40 --precision bf16 --context 16
generate folder --prompt ab --count 40 --seed 4 --temperature 1 --top-p 0.9 --repetition-penalty 1.1
schedule --technique bf16_flash --preset tiny
report --results-dir results
CALLS
  for system in here there; do
    cp "$build/text.txt" "$build/$system"
    while read -r -a words; do
      check "$system: ${words[*]}" call $system "${words[@]}"
    done < "$build/calls"
  done
  for file in $(files here); do
    case $file in
      ./out.train* | ./out.report | ./err | *.csv | */comparison* | */table.*) ;; # they have times
      *_metrics.json | *.jsonl)
        check "there is another $file" cmp <(timeless "$build/here/$file") <(timeless "$build/there/$file");;
      *)
        same=$((same + 1))
        check "there is another $file" cmp "$build/here/$file" "$build/there/$file";;
    esac
  done
  check "the same names" cmp <(files here) <(files there)
  check "at least 50 files are compared" [ $same -ge 50 ]
  echo "$same files of this system and of the other one were compared"
}
