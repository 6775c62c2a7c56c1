#!/usr/bin/env bash
# arm.sh BUILD_DIR - builds library, tests and programs for Linux on aarch64, and runs them by qemu: training
#                    leaves the files of this machine, byte for byte. The compiler is zig's clang, or Debian's
#                    cross compiler, which takes the place of gcc-multilib
set -u
cd "$(dirname "$0")/.." || exit 1
. tests/lib.sh
build=$(mkdir -p "$1/arm" && cd "$1/arm" && pwd) ending=.arm runs=qemu-aarch64
cc='aarch64-linux-gnu-gcc-12 -static' newer=-march=armv8.6-a
if ! command -v aarch64-linux-gnu-gcc-12 > /dev/null; then
  cc='python3 -m ziglang cc -target aarch64-linux-musl' newer=-mcpu=generic+v8_6a
  python3 -m ziglang version > /dev/null 2>&1 || { skip "aarch64: no compiler"; closing_line; exit; }
fi
command -v $runs > /dev/null || { skip "aarch64: no $runs"; closing_line; exit; }
cp "$(stb_header)" "$build" || exit 1
. tests/programs/same_files.sh
build_programs "$cc"
build_test() { # NAME FLAG...
  check "$1" $cc -std=gnu99 -O2 -DMTT_STATIC -I"$build" "${@:2}" tests/units/$1.c -o "$build/$1.arm" -lm
}
run_tests() { # leaves its counts in a file, since it runs beside the comparison of files
  passed=0 failed=0
  for name in test_{files,models,tokenizer}; do build_test $name && run_test $name quick; done
  # Products of pairs in BF16, where a processor has them
  build_test test_model $newer && run_test test_model products
  build_test test_generate $newer && run_test test_generate quick
  echo $passed $failed > "$build/counts"
}
rm -f "$build/counts"
run_tests > "$build/tests.log" 2>&1 &
same_files
wait
cat "$build/tests.log"
read -r p f < "$build/counts" || p=0 f=1
passed=$((passed + p)) failed=$((failed + f))
closing_line
