#!/usr/bin/env bash
# arm.sh BUILD_DIR - builds library, tests and programs for Linux on aarch64, and runs them by qemu: training
#                    leaves the files of this machine, byte for byte. On Debian its compiler,
#                    gcc-12-aarch64-linux-gnu, takes the place of gcc-multilib, so .ci/run does without
set -u
cd "$(dirname "$0")/.." || exit 1
. tests/lib.sh
build=$(mkdir -p "$1/arm" && cd "$1/arm" && pwd) ending=.arm runs=qemu-aarch64
cc=aarch64-linux-gnu-gcc-12
for tool in $cc $runs; do
  command -v $tool > /dev/null || { skip "aarch64: no $tool"; closing_line; exit; }
done
cp "$(stb_header)" "$build" || exit 1
. tests/same_files.sh
build_programs "$cc -static"
for name in test_{files,models,tokenizer}; do # test_generate quick takes four minutes there
  check "$name" $cc -std=gnu99 -O2 -static -DMTT_STATIC -I"$build" tests/$name.c \
    -o "$build/$name.arm" -lm
  run_test $name quick
done
same_files
closing_line
