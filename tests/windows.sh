#!/usr/bin/env bash
# windows.sh BUILD_DIR - builds the library and the programs for 64-bit Windows with MinGW, and runs them
#                        under Wine: tests, and training whose files must be those of Linux, byte for byte
set -u
cd "$(dirname "$0")/.." || exit 1
. tests/lib.sh
build=$(mkdir -p "$1/windows" && cd "$1/windows" && pwd) ending=.exe runs=wine
cc=x86_64-w64-mingw32-gcc cxx=x86_64-w64-mingw32-g++
for tool in $cc $cxx wine; do
  command -v $tool > /dev/null || { skip "Windows: no $tool"; closing_line; exit; }
done
export WINEDEBUG=-all WINEPREFIX=$build/wine
cp "$(stb_header)" "$build" || exit 1
. tests/programs/same_files.sh
export LC_ALL=C.UTF-8 # in C, Wine makes no names beyond ASCII
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
build_programs $cc
# GCC aligns the stack to 16 bytes there, also for registers of 32 and 64: it must not count on more.
for march in x86-64-v3 x86-64-v4; do
  $cc -O3 -march=$march -fopenmp -static -I"$build" tools/trainer.c -o "$build/fast.exe" &&
    ! x86_64-w64-mingw32-objdump -d "$build/fast.exe" | grep -E 'vmov(ap|dqa).*%[yz]mm' | grep -q '(%r[sb]p'
  [ $? = 0 ] && pass || fail "-O3 -march=$march: aligned accesses to the stack"
done
for name in test_{windows,plan,models,generate,tokenizer,identity}; do
  check "$name" $cc "${exact[@]}" -static -DMTT_STATIC -D__USE_MINGW_ANSI_STDIO=1 -I"$build" tests/*/$name.c \
    -o "$build/$name.exe" -lpthread
done

mkdir -p "$WINEPREFIX" || exit 1
trap 'wineserver -k' EXIT
wineserver -p # it stays: one that is about to end takes no new program
wineboot -i > /dev/null 2>&1
wine cmd /c ver > "$build/wine.log" 2>&1 || { skip "Windows: Wine does not start here"; closing_line; exit; }
run_test test_windows
run_test test_identity
for name in test_{plan,models,generate,tokenizer}; do run_test $name quick; done

same_files

# Arguments and folders that no code page has, both separators.
check "a folder in UTF-8" call there trainer --data text.txt --dataset t --results-dir 'мои\日 é' \
  --layers 1 --heads 2 --d-model 16 --seq-len 16 --batch-size 2 --steps 2 --vocab-size 300
check "its checkpoint" [ -s "$build/there/мои/日 é/t_fp32_step2.safetensors" ]
check "ranks are refused" not call there trainer --data data --ranks 2 --steps 2 --preset tiny
check "and why" says "$build/there/err" 'on Windows under WSL2'
(cd "$build/there" && timeout 60 wine "$build/hello.exe" text.txt > hello.out 2> hello.err)
check "hello trains" says "$build/there/hello.err" 'step (20|600)/600, loss [0-9.]+'
closing_line
