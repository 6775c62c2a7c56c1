#!/usr/bin/env bash
# warnings.sh BUILD_DIR - what mtt.h promises a compiler: no warning in any dialect of both compilers,
# included twice, static in two translation units; only mtt_ symbols outside, no writable globals. Examples
# and tools use the public interface alone. What the README and the manual show compiles.
build=$1/warnings; mkdir -p "$build"
passed=0 failed=0 skipped=0
flags="-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror"
tell() { if [ "$1" = 0 ]; then passed=$((passed + 1)); else failed=$((failed + 1)); echo "FAILED: $2"; fi; }
skip() { skipped=$((skipped + 1)); echo "skipped: $*"; } # REASON
check() { # NAME COMMAND...: the command must succeed
  local name=$1; shift
  "$@"; tell $? "$name"
}
none() { [ -z "$1" ]; tell $? "$2: $(head -n 3 <<< "$1" | tr '\n' ' ')"; } # TEXT NAME: there must be no text

cat > "$build/use.c" << 'C'
#include "../../mtt.h"
#include "../../mtt.h"
int main(void) { return mtt_status_string(MTT_OK)[0] != 111; }
C
cat > "$build/other.c" << 'C'
#include "../../mtt.h"
const char *other(void) { return mtt_status_string(MTT_OK); }
C
cat > "$build/declare.c" << 'C'
#include "../../mtt.h"
int main(void) { return (int)sizeof(mtt_plan_report) == 0; }
C
cat > "$build/words.c" << 'C'
#include "../../mtt.h"
#include "../../tools/wordpiece.h"
#include "../../mtt.h"
#include "../../tools/wordpiece.h"
int main(void) { mtt_tokenizer_kind kind = mtt_wordpiece(NULL); return kind.name[0] != 87; }
C
cat > "$build/all.c" << 'C'
#define MTT_IMPLEMENTATION
#include "../../mtt.h"
#include "../../tools/wordpiece.h"
C
printf '#include "../../tools/wordpiece.h"\n' > "$build/early.c"

dialect() { # COMPILER STANDARD
  local cc=$1 std=$2 lang=c omp
  case $std in c++*) lang=c++;; esac
  local strict="$cc -x $lang -std=$std $flags"
  for omp in "" -fopenmp; do
    check "$cc $std $omp, implementation included twice" \
      $strict $omp -DMTT_IMPLEMENTATION -c "$build/use.c" -o "$build/use_$cc.o"
  done
  check "$cc $std, separate allocations" \
    $strict -DMTT_IMPLEMENTATION -DMTT_SEPARATE_ALLOCS -fsyntax-only "$build/use.c"
  check "$cc $std, declarations alone" $strict -fsyntax-only "$build/declare.c"
  check "$cc $std, wordpiece.h, declarations alone" $strict -fsyntax-only "$build/words.c"
  check "$cc $std, wordpiece.h" $strict -fsyntax-only -DMTT_IMPLEMENTATION "$build/words.c"
}
symbols() { # COMPILER
  local cc=$1 object=$build/symbols.o
  $cc -std=c99 -O2 -fno-pic -DMTT_IMPLEMENTATION -c "$build/use.c" -o "$object"
  none "$(nm -g --defined-only "$object" | awk '$3 != "main" && $3 !~ /^mtt_[a-z]/')" \
    "$cc, an external symbol without mtt_"
  none "$(nm "$object" | awk '$2 ~ /^[bBdDcC]$/ {print $3}' | grep -vE '^(hexu?|stbsp__)|stbsp_')" \
    "$cc, a writable global that is not of stb_sprintf"
}
programs() { # COMPILER: each program as it is, and beside another file that has the implementation
  local cc=$1 program name
  check "$cc, the implementation alone" $cc -std=gnu99 -fopenmp -c "$build/all.c" -o "$build/all.o"
  for program in examples/*.c tools/*.c; do
    name=$build/$(basename "$program")
    check "$cc, $program" $cc -std=gnu99 -Wall -Wextra -Werror -fsyntax-only "$program"
    grep -v '^#define MTT_IMPLEMENTATION$' "$program" > "$name"
    check "$cc, $program without the implementation" $cc -std=gnu99 -Wall -Wextra -Werror \
      -iquote "$(dirname "$program")" "$name" "$build/all.o" -o "${name%.c}_apart" -fopenmp -lm
  done
}
for cc in gcc clang; do
  command -v $cc > /dev/null || { skip "$cc is missing: apt-get install $cc"; continue; }
  for std in c99 c11 c++11 c++17; do dialect $cc $std; done
  for unit in use other words; do
    check "$cc, static $unit.c" \
      $cc -std=c99 $flags -DMTT_IMPLEMENTATION -DMTT_STATIC -c "$build/$unit.c" -o "$build/static_$unit.o"
  done
  check "$cc, two static translation units" \
    $cc "$build/static_use.o" "$build/static_other.o" -o "$build/static" -lm
  check "$cc, they run" "$build/static"
  none "$($cc -x c++ -std=c++20 -Wdeprecated-enum-enum-conversion -fsyntax-only -DMTT_IMPLEMENTATION \
    "$build/words.c" 2>&1 | grep -E '(mtt|wordpiece)\.h:.*(warning|error)')" "$cc c++20"
  ! $cc -std=c99 -fsyntax-only "$build/early.c" 2> /dev/null; tell $? "$cc, wordpiece.h before mtt.h"
  symbols $cc
  programs $cc
done
headers=(tools/{curves,folder,launch,options,results,run,speak,explorer}.h)
none "$(grep -nE '(mtt|MTT)__' examples/*.c tools/*.c "${headers[@]}")" \
  "a program uses a private name"
none "$(sed -n '/^#ifdef MTT_IMPLEMENTATION/,$p' mtt.h | sed 's/"[^"]*"//g; s,/\*.*\*/,,' |
  grep -nE '\b(exit|abort|printf|puts|assert)\s*\(')" "mtt.h prints or exits"
options=$(grep -oE '^#ifndef MTT(_[A-Z]+|DEF)+' mtt.h | awk '{print $2}' | sort -u)
for option in $options MTT_CBLAS MTT_CUDA MTT_STATIC MTT_SEPARATE_ALLOCS; do
  case $option in MTT_H_INCLUDED | MTT_IMPLEMENTATION_DONE) continue;; esac
  grep -qE "^ +$option " mtt.h; tell $? "$option is not in the manual's table of options"
done
for tag in $(sed -n 's/^ *>>\([a-z]*\) .*/\1/p' mtt.h); do
  grep -qE "^ *>>$tag\$" mtt.h; tell $? "the table of contents names >>$tag, which is not there"
done
awk '/^```c$/ {on = 1; next} /^```$/ {on = 0} on' README.md > "$build/readme.c"
printf '#include <stdio.h>\n#define MTT_IMPLEMENTATION\n#include "mtt.h"\n' > "$build/late.c"
cc -std=c99 -I. -fsyntax-only "$build/late.c" 2>&1 | grep -q 'include mtt.h before other headers'
tell $? "mtt.h after other headers in strict C99 says so"
check "the README's program" cc -std=c99 $flags -I. "$build/readme.c" -o "$build/readme" -lm
awk '/Quick start:/ {on = 1; next} /^   Contents/ {on = 0} on' mtt.h |
  grep -vE '^ *(cc|nvcc) ' > "$build/manual.c"
check "the manual's program" cc -std=c99 -Wall -Wextra -Werror -I. "$build/manual.c" -o "$build/manual" -lm
(cd "$build" && ./manual > /dev/null); tell $? "the manual's program runs"
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ]
