#!/usr/bin/env bash
# windows.sh BUILD_DIR - builds the library and the programs for 64-bit Windows with MinGW, and runs them
#                        under Wine: tests, and training whose files must be those of Linux, byte for byte
set -u
cd "$(dirname "$0")/.." || exit 1
. tests/lib.sh
build=$(mkdir -p "$1/windows" && cd "$1/windows" && pwd)
cc=x86_64-w64-mingw32-gcc cxx=x86_64-w64-mingw32-g++
for tool in $cc $cxx wine; do
  command -v $tool > /dev/null || { skip "Windows: no $tool"; closing_line; exit; }
done
export WINEDEBUG=-all WINEPREFIX=$build/wine
cp "$(stb_header)" "$build" || exit 1
rm -rf "$build"/{lin,win} "$build"/*.exe && mkdir "$build"/{lin,win}
exact=(-std=gnu99 -O1 -ffp-contract=off) # bits depend on which products are fused with sums
strict=(-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror -I"$build" -fsyntax-only)
printf '#define MTT_IMPLEMENTATION\n#include "%s/mtt.h"\n' "$PWD" > "$build/mtt.c"
for dialect in c99 gnu99 c11 c17; do
  check "mtt.h as $dialect, no warning" $cc -std=$dialect "${strict[@]}" -fopenmp "$build/mtt.c"
done
for dialect in c++11 c++17; do
  check "mtt.h as $dialect, no warning" $cxx -std=$dialect -xc++ "${strict[@]}" "$build/mtt.c"
done
# clang as MSVC calls it, clang-cl: no __GNUC__, but vectors. The headers are MinGW's, which want __GNUC__.
if command -v clang++ > /dev/null; then
  { printf '#include <%s.h>\n' errno fcntl limits math signal stdarg stddef stdint stdio stdlib string \
      windows io immintrin
    printf '#undef __GNUC__\n'; cat "$build/mtt.c"; } > "$build/msvc.c"
  for dialect in c11 c17 c++17; do
    check "clang for MSVC, $dialect, no warning" clang --target=x86_64-pc-windows-msvc -fgnuc-version=4.2.1 \
      -x ${dialect%%[0-9]*} -std=$dialect -O2 -mavx2 -mfma -isystem /usr/x86_64-w64-mingw32/include \
      -I"$build" -Wall -Wextra -Werror -c "$build/msvc.c" -o "$build/msvc.o"
  done
  check "its products are of vectors" [ "$(objdump -d "$build/msvc.o" | grep -c 'vfmadd.*ymm')" -gt 50 ]
else
  skip "clang is missing"
fi
for program in examples/{hello,train,schedule,generate} tools/{prepare,convert,report,trainer,profile}; do
  name=${program#*/}
  gcc "${exact[@]}" $program.c -o "$build/$name" -lm &
  check "$name, no warning" $cc "${exact[@]}" -Wall -Wextra -Werror -I"$build" $program.c \
    -o "$build/$name.exe"
  wait
done
# GCC aligns the stack to 16 bytes there, also for registers of 32 and 64: it must not count on more.
for march in x86-64-v3 x86-64-v4; do
  $cc -O3 -march=$march -fopenmp -static -I"$build" tools/trainer.c -o "$build/fast.exe" &&
    ! x86_64-w64-mingw32-objdump -d "$build/fast.exe" | grep -E 'vmov(ap|dqa).*%[yz]mm' | grep -q '(%r[sb]p'
  [ $? = 0 ] && pass || fail "-O3 -march=$march: aligned accesses to the stack"
done
for name in test_{windows,plan,models,generate,tokenizer,identity}; do
  check "$name" $cc "${exact[@]}" -static -DMTT_STATIC -D__USE_MINGW_ANSI_STDIO=1 -I"$build" tests/$name.c \
    -o "$build/$name.exe" -lpthread
done

run_test() { # NAME [quick]
  local log=$build/$1.log line
  timeout 500 wine "$build/$1.exe" ${2:-} > "$log" 2>&1
  line=$(tr -d '\r' < "$log" | tail -n 1)
  echo "$1 under Wine: $line"
  if [[ $line =~ ^[1-9][0-9]*\ passed,\ 0\ failed ]]; then pass; else fail "$1: $(tail -n 3 "$log")"; fi
}
wineserver -p60 # a server that is about to end takes no new program
wineboot -i > /dev/null 2>&1
run_test test_windows
run_test test_identity
for name in test_{plan,models,generate,tokenizer}; do run_test $name quick; done

# The same calls on both systems, each in a folder of its own.
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
generate results/data_fp32_best.safetensors --prompt ab --count 20 --seed 3
schedule --technique bf16_flash --preset tiny
report --results-dir results
CALLS
call() { # SYSTEM PROGRAM ARGUMENT...
  local run=("$build/$2")
  [ $1 != win ] || run=(wine "$build/$2.exe")
  (cd "$build/$1" && "${run[@]}" "${@:3}" >> out 2>> err)
}
for system in lin win; do
  cp "$build/text.txt" "$build/$system"
  while read -r -a words; do
    check "$system: ${words[*]}" call $system "${words[@]}"
  done < "$build/calls"
done
files() { (cd "$build/$1" && find . -type f | sort); }
timeless() { sed -E 's/"(ms|time|training_time|ms_per_step|tokens_per_s)": [0-9.]+/"\1": 0/g' "$1"; }
same=0
for file in $(files lin); do
  case $file in
    ./out | ./err | *.csv | */comparison*) ;; # they have times
    *_metrics.json | *.jsonl)
      check "Windows has another $file" cmp <(timeless "$build/lin/$file") <(timeless "$build/win/$file");;
    *)
      same=$((same + 1))
      check "Windows has another $file" cmp "$build/lin/$file" "$build/win/$file";;
  esac
done
check "the same names" cmp <(files lin) <(files win)
check "at least 45 files are compared" [ $same -ge 45 ]
echo "$same files on Windows and Linux were compared"

# Arguments and folders that no code page has, both separators.
check "a folder in UTF-8" call win trainer --data text.txt --dataset t --results-dir 'мои\日 é' \
  --layers 1 --heads 2 --d-model 16 --seq-len 16 --batch-size 2 --steps 2 --vocab-size 300
check "its checkpoint" [ -s "$build/win/мои/日 é/t_fp32_step2.safetensors" ]
check "ranks are refused" not call win trainer --data data --ranks 2 --steps 2 --preset tiny
check "and why" says "$build/win/err" 'on Windows under WSL2'
(cd "$build/win" && timeout 60 wine "$build/hello.exe" text.txt > hello.out 2> hello.err)
wineserver -k
check "hello trains" says "$build/win/hello.err" 'step (20|600)/600, loss [0-9.]+'
closing_line
