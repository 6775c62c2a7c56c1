#!/usr/bin/env bash
# warnings.sh BUILD_DIR - the header in every dialect and both compilers without a warning, included twice, static in
# two translation units; only mtt_ symbols outside, no writable globals; what the README and the manual show compiles.
build=$1/warnings; mkdir -p "$build"
passed=0 failed=0
flags="-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror"
tell() { if [ "$1" = 0 ]; then passed=$((passed + 1)); else failed=$((failed + 1)); echo "FAILED: $2"; fi; }
printf '#include "../../mtt.h"\n#include "../../mtt.h"\nint main(void) { return mtt_status_string(MTT_OK)[0] != 111; }\n' > "$build/use.c"
printf '#include "../../mtt.h"\nconst char *other(void) { return mtt_status_string(MTT_OK); }\n' > "$build/other.c"
printf '#include "../../mtt.h"\nint main(void) { return (int)sizeof(mtt_plan_report) == 0; }\n' > "$build/declare.c"
{ for _ in 1 2; do printf '#include "../../mtt.h"\n#include "../../tools/wordpiece.h"\n'; done
  printf 'int main(void) { mtt_tokenizer_kind kind = mtt_wordpiece(NULL); return kind.name[0] != 87; }\n'; } > "$build/words.c"
printf '#include "../../tools/wordpiece.h"\n' > "$build/early.c"
for cc in gcc clang; do
  command -v $cc >/dev/null || { echo "skipped: $cc is absent"; continue; }
  for std in c99 c11 c++11 c++17; do
    lang=c; case $std in c++*) lang=c++;; esac
    for omp in "" -fopenmp; do
      $cc -x $lang -std=$std $flags $omp -DMTT_IMPLEMENTATION -c "$build/use.c" -o "$build/use_$cc.o"; tell $? "$cc $std $omp, implementation included twice"
    done
    $cc -x $lang -std=$std $flags -DMTT_IMPLEMENTATION -DMTT_SEPARATE_ALLOCS -fsyntax-only "$build/use.c"; tell $? "$cc $std, separate allocations"
    $cc -x $lang -std=$std $flags -fsyntax-only "$build/declare.c"; tell $? "$cc $std, declarations alone"
    $cc -x $lang -std=$std $flags -fsyntax-only "$build/words.c"; tell $? "$cc $std, wordpiece.h, declarations alone"
    $cc -x $lang -std=$std $flags -fsyntax-only -DMTT_IMPLEMENTATION "$build/words.c"; tell $? "$cc $std, wordpiece.h"
  done
  for unit in use other; do $cc -std=c99 $flags -DMTT_IMPLEMENTATION -DMTT_STATIC -c "$build/$unit.c" -o "$build/static_$unit.o"; tell $? "$cc, static $unit.c"; done
  $cc -std=c99 $flags -DMTT_IMPLEMENTATION -DMTT_STATIC -c "$build/words.c" -o "$build/static_words.o"; tell $? "$cc, static wordpiece.h"
  ! $cc -x c++ -std=c++20 -Wdeprecated-enum-enum-conversion -fsyntax-only -DMTT_IMPLEMENTATION "$build/words.c" 2>&1 | grep wordpiece.h; tell $? "$cc c++20, wordpiece.h"
  ! $cc -std=c99 -fsyntax-only "$build/early.c" 2> /dev/null; tell $? "$cc, wordpiece.h before mtt.h"
  $cc "$build/static_use.o" "$build/static_other.o" -o "$build/static" -lm && "$build/static"; tell $? "$cc, two static translation units"
  $cc -std=c99 -O2 -fno-pic -DMTT_IMPLEMENTATION -c "$build/use.c" -o "$build/symbols.o"
  [ -z "$(nm -g --defined-only "$build/symbols.o" | awk '$3 != "main" && $3 !~ /^mtt_[a-z]/')" ]; tell $? "$cc, an external symbol without mtt_"
  globals=$(nm "$build/symbols.o" | awk '$2 ~ /^[bBdDcC]$/ {print $3}' | grep -vE '^(hexu?|stbsp__)|stbsp_') # those are stb_sprintf's
  [ -z "$globals" ]; tell $? "$cc, a writable global: $globals"
  for program in examples/*.c tools/*.c; do $cc -std=gnu99 -Wall -Wextra -Werror -fsyntax-only $program; tell $? "$cc, $program"; done
done
[ -z "$(sed -n '/^#ifdef MTT_IMPLEMENTATION/,$p' mtt.h | sed 's/"[^"]*"//g; s,/\*.*\*/,,' | grep -nE '\b(exit|abort|printf|puts|assert)\s*\(')" ]; tell $? "mtt.h prints or exits"
for option in $(grep -oE '^#ifndef MTT(_[A-Z]+|DEF)+' mtt.h | awk '{print $2}' | sort -u) MTT_CBLAS MTT_CUDA MTT_STATIC MTT_SEPARATE_ALLOCS; do
  case $option in MTT_H_INCLUDED | MTT_IMPLEMENTATION_DONE) continue;; esac
  grep -qE "^ +$option " mtt.h; tell $? "$option is not in the manual's table of options"
done
for tag in $(sed -n 's/^ *>>\([a-z]*\) .*/\1/p' mtt.h); do grep -qE "^ *>>$tag\$" mtt.h; tell $? "the table of contents names >>$tag, which is not there"; done
awk '/^```c$/ {on = 1; next} /^```$/ {on = 0} on' README.md > "$build/readme.c"
cc -std=c99 $flags -I. "$build/readme.c" -o "$build/readme" -lm; tell $? "the README's program"
awk '/Quick start:/ {on = 1; next} /^   Contents/ {on = 0} on' mtt.h | grep -vE '^ *(cc|nvcc) ' > "$build/manual.c"
cc -std=c99 -Wall -Wextra -Werror -I. "$build/manual.c" -o "$build/manual" -lm && (cd "$build" && ./manual >/dev/null); tell $? "the manual's program"
echo "$passed passed, $failed failed"
[ $failed = 0 ]
