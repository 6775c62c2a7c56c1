#!/usr/bin/env bash
# warnings.sh BUILD_DIR - what mtt.h promises a compiler: no warning in any dialect of both compilers,
# included twice, static in two translation units; only mtt_ symbols outside, no writable globals. Examples
# and tools use the public interface alone. What the README and the manual show compiles.
. tests/lib.sh
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
cat > "$build/later.c" << 'C'
#include "../../mtt.h"
#define MTT_IMPLEMENTATION
#include "../../mtt.h"
int main(void) { return mtt_status_string(MTT_OK)[0] != 111; }
C
printf '#include <stdio.h>\n#define MTT_IMPLEMENTATION\n#include "../../mtt.h"\n' > "$build/late.c"
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
late() { # COMPILER STANDARD: the implementation at a second include; behind other headers, which is one error
  local cc=$1 std=$2 lang=c said
  case $std in c++*) lang=c++;; esac
  check "$cc $std, declarations, then the implementation" \
    $cc -x $lang -std=$std $flags -fsyntax-only "$build/later.c"
  case $std in gnu* | c++*)
    check "$cc $std, late" $cc -x $lang -std=$std $flags -fsyntax-only "$build/late.c"
    return;;
  esac
  said=$($cc -std=$std -fsyntax-only "$build/late.c" 2>&1)
  [ "$(grep -c ' error: ' <<< "$said")" = 1 ] && [[ $said == *"include mtt.h before other headers"* ]]
  tell $? "$cc $std, after other headers: not one error that says so: $(grep -c ' error: ' <<< "$said")"
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
  for program in examples/{,assignment/,learn/}*.c tools/*.c; do
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
  for std in c99 c11 c17 c2x gnu99 gnu17 c++11 c++17 c++20; do late $cc $std; done
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
headers=(tools/{curves,failure,folder,launch,options,results,run,speak,explorer,quiz}.h)
none "$(grep -nE '(mtt|MTT)__' examples/{,assignment/,learn/}*.c tools/*.c "${headers[@]}")" \
  "a program uses a private name"
none "$(sed -n '/^#ifdef MTT_IMPLEMENTATION/,$p' mtt.h | sed 's/"[^"]*"//g; s,/\*.*\*/,,' |
  grep -nE '\b(exit|abort|printf|puts|assert)\s*\(')" "mtt.h prints or exits"
options=$(grep -oE '^#ifndef MTT(_[A-Z0-9]+|DEF)+' mtt.h | awk '{print $2}' | sort -u)
for option in $options MTT_CBLAS MTT_CUDA MTT_STATIC MTT_SEPARATE_ALLOCS; do
  case $option in MTT_H_INCLUDED | MTT_IMPLEMENTATION_DONE) continue;; esac
  grep -qE "^ +$option " mtt.h; tell $? "$option is not in the manual's table of options"
done
# A user's macros change nothing: words in capitals begin with MTT, are of system headers, or are pasted.
system=$(gcc -x c -std=gnu99 -E -dD -DMTT_IMPLEMENTATION mtt.h |
  awk '/^# [0-9]+ "/ {own = $3 ~ /mtt\.h"/} !own' | grep -oE '\b[A-Z][A-Z0-9_]*\b' | sort -u)
words=$(sed 's/"\(\\.\|[^"\\]\)*"//g' mtt.h | gcc -x c -fpreprocessed -E -P - 2> /dev/null |
  grep -oE '\b[A-Z][A-Z0-9_]*\b' | grep -vE '^(MTT|STB|MPI|SO_|F_FULLFSYNC)' | # the last one is macOS's
  sort -u | comm -23 - <(echo "$system"))
[ "$(wc -w <<< "$words")" -gt 50 ]; tell $? "words in capitals"
for first in 'int MTT_OP_norm, mtt_op_name, MTT_F32;' '#define MTT_BACKEND_API'; do
  printf '#include "mtt.h"\n%s\n#include "mtt.h"\n' "$first" > "$build/api.c"
  [ "$first" = "${first#int}" ] && echo 'mtt_dtype dtype = MTT_F32; mtt_op op;' >> "$build/api.c"
  check "operations are declared if they are asked for, also later: $first" \
    gcc -std=c99 -I. -fsyntax-only "$build/api.c"
done
check "a user's macros" gcc -x c -std=c99 -DMTT_IMPLEMENTATION -Wall -Wextra -Werror -fsyntax-only \
  $(printf -- '-D%s=users_own ' $words HEADER BLOCK N W B X MOVED ROWS RANK VOCAB SIZE COUNT MAX MIN) mtt.h
for tag in $(sed -n 's/^ *>>\([a-z]*\) .*/\1/p' mtt.h); do
  grep -qE "^ *>>$tag\$" mtt.h; tell $? "the table of contents names >>$tag, which is not there"
done
# Other systems and processors. zig, of PyPI's ziglang, brings their headers.
header="-x c -std=c99 -DMTT_IMPLEMENTATION"
refuses() { # NAME PATTERN COMMAND...: the compiler must fail and say so
  local name=$1 pattern=$2; shift 2
  "$@" 2>&1 | grep -q "$pattern"; tell $? "$name"
}
refuses "a big-endian processor" "little-endian processors only" \
  gcc $header -w -U__BYTE_ORDER__ -D__BYTE_ORDER__=__ORDER_BIG_ENDIAN__ -fsyntax-only mtt.h
cp "$(stb_header)" mtt.h "$build/"
check "gcc, stb_sprintf.h beside mtt.h" gcc $header -Wall -Wextra -Werror -fsyntax-only "$build/mtt.h"
if echo '#include <stdio.h>' | gcc -m32 -x c -fsyntax-only - 2> /dev/null; then
  printf '#include "../../mtt.h"\nint large[sizeof(off_t) == 8 ? 1 : -1];\n' > "$build/offset.c"
  check "gcc -m32, x87, files of 2 GB" gcc $header -m32 -fsyntax-only "$build/offset.c"
else
  skip "gcc -m32 has no headers: apt-get install gcc-multilib"
fi
if python3 -m ziglang version > /dev/null 2>&1; then
  for target in aarch64-macos x86_64-freebsd x86_64-openbsd x86_64-netbsd aarch64-linux-musl \
    arm-linux-musleabihf; do
    check "$target" python3 -m ziglang cc -target $target $header -Wall -Wextra -Werror -I"$build" \
      -c "$build/mtt.h" -o "$build/$target.o"
  done
  for target in aarch64-macos x86_64-freebsd x86_64-windows-gnu; do
    for program in tools/trainer.c tools/convert.c examples/train.c; do
      check "$target: $program" python3 -m ziglang cc -target $target -std=gnu99 -Wall -Wextra -Werror \
        -I"$build" -c $program -o "$build/$target.o"
    done
  done
else
  skip "python3 has no ziglang, which compiles for macOS and BSD: pip install ziglang"
fi

if command -v qemu-x86_64 > /dev/null; then
  gcc -std=gnu99 -O1 -march=x86-64-v3 tools/schedule.c -o "$build/newer" -lm &&
    qemu-x86_64 -cpu Westmere "$build/newer" 2>&1 | grep -q "compiled for a newer processor"
  tell $? "a program for a newer processor says so"
else
  skip "qemu-x86_64 is missing: apt-get install qemu-user"
fi

# No function has more than half of the 128 KB of stack that the manual asks of a thread.
for options in "-O2" "-O3 -march=x86-64-v3 -DMTT_CBLAS" "-O3 -march=x86-64-v4"; do
  case $options in *CBLAS*) echo '#include <cblas.h>' | gcc -x c -fsyntax-only - 2> /dev/null ||
    { skip "cblas.h is missing: apt-get install libopenblas-openmp-dev"; continue; };; esac
  check "stack, $options" gcc $header -fopenmp $options -Werror -Wstack-usage=65536 -c mtt.h \
    -o "$build/stack.o"
done

# Options for fast arithmetic keep the losses, or are refused.
cat > "$build/loss.c" << 'C'
#include <stdio.h>
#define MTT_IMPLEMENTATION
#include "../../mtt.h"
int main(void)
{
    static int32_t tokens[4 * 64], targets[4 * 64];
    static float broken[32 * 96];
    mtt_env env = {0};
    mtt_model_desc model = {.layers = 2, .heads = 2, .d_model = 32, .vocab = 64};
    mtt_policy policy = {.attention = MTT_ATTENTION_FLASH};
    mtt_optim_desc optim = {.lr = 1e-2f};
    mtt_trainer *trainer;
    mtt_step_info info;
    int64_t shape[2];
    int status, i = 0;
    for (int k = 0; k < 4 * 64; k++) tokens[k] = k * k % 61, targets[k] = (k + 1) * (k + 1) % 61;
    if (mtt_trainer_create(&env, &model, &policy, &optim, mtt_cpu_backend(), 4, 64, &trainer)) return 1;
    for (int step = 0; step < 20; step++) {
        if (mtt_train_step(trainer, tokens, targets, &info)) return 2;
        printf("%.7f\n", info.loss);
    }
    while (strcmp(mtt_parameter(trainer, i, shape), "h.0.attn.c_attn.weight")) i++;
    for (int k = 0; k < 32 * 96; k++) broken[k] = (float)HUGE_VAL;
    mtt_parameter_set(trainer, i, broken);
    status = mtt_train_step(trainer, tokens, targets, &info);
    mtt_trainer_destroy(trainer);
    return status == MTT_E_NUMBERS ? 0 : 3;
}
C
cat > "$build/alone.c" << 'C'
#define MTT_IMPLEMENTATION
#include "../../mtt.h"
int main(void)
{
    mtt_env env = {0};
    mtt_model_desc model = {.layers = 2, .heads = 2, .d_model = 32, .vocab = 64};
    mtt_policy two = {.ranks = 2};
    mtt_plan_report plan;
    int refused = mtt_plan(&env, &model, &two, 4, 64, &plan) != MTT_OK;
#ifdef MTT_NO_RANKS
    return !refused || !strstr(env.error, "MTT_NO_RANKS");
#else
    return refused || plan.wire_bytes == 0;
#endif
}
C
losses() { # NAME COMMAND...: those of gcc -O3, within 1e-5, and an infinite weight is noticed
  local name=$1; shift
  "$@" -std=gnu99 -w "$build/loss.c" -o "$build/loss" -lm && "$build/loss" > "$build/loss.txt" &&
    paste "$build/loss.txt" "$build/losses.txt" |
    awk '($1 - $2) ^ 2 > 1e-10 || $2 == "" {bad = 1} END {exit bad || NR != 20}'
  tell $? "$name trains otherwise"
}
gcc -O3 -std=gnu99 "$build/loss.c" -o "$build/loss" -lm; "$build/loss" > "$build/losses.txt"
tell $? "an infinite weight is noticed"
wings=$(grep -oE '^ +MTT_NO_[A-Z0-9]+' mtt.h | grep -oE 'MTT_NO_[A-Z0-9]+' | sed 's/^/-D/')
[ "$(wc -l <<< "$wings")" -ge 5 ]; tell $? "the manual lists the wings"
for wing in $wings "$wings"; do
  check "without a wing: $wing" gcc $header -fopenmp $flags $wing -fsyntax-only mtt.h
done
# Files of different switches link where both have the same operations, and else do not.
printf '#define MTT_BACKEND_API\n#include "../../mtt.h"\nchar count[MTT_OP_KIND_COUNT];
mtt_status mtt_cuda_backend(mtt_env *e, int d, mtt_backend *b) { return e || d || b ? MTT_OK : MTT_OK; }
const mtt_op *mtt_schedule_ops(const mtt_schedule *s, int *n) { (void)s, (void)n; return 0; }\n' \
  > "$build/kernels.c"
printf '#include "../../mtt.h"\nint main(void) { return mtt_cuda_backend(0, 0, 0); }\n' > "$build/calls.c"
printf '#include "../../mtt.h"\nint main(void) { return !mtt_schedule_ops(0, 0); }\n' > "$build/looks.c"
operations() { nm -S "$build/kernels$1.o" | awk '$4 == "count" {print $2}'; }
for wing in "" $wings; do
  for file in kernels calls looks; do
    gcc -std=c99 $flags -DMTT_CUDA $wing -c "$build/$file.c" -o "$build/$file$wing.o" ||
      tell 1 "$file.c with $wing"
  done
done
for wing in "" $wings; do
  for other in "" $wings; do
    [ "$(operations $wing)" = "$(operations $other)" ] && expected=0 || expected=1
    for file in calls looks; do
      gcc "$build/kernels$wing.o" "$build/$file$other.o" -o "$build/linked" 2> "$build/linked.txt"
      linked=$?
      [ $linked = $expected ] &&
        { [ $linked = 0 ] || grep -qE 'mtt_(cuda_backend|schedule_ops)' "$build/linked.txt"; }
      tell $? "$file: '$wing' and a program with '$other' link: $linked, not $expected"
    done
  done
done
[ "$(operations)" != "$(operations -DMTT_NO_FP8)" ]; tell $? "a wing without operations"
losses "the hall alone" gcc -O3 $wings
none "$(nm -u "$build/loss" | grep -E ' (socket|connect|poll|fork|waitpid)(@|$)')" \
  "the hall alone uses sockets"
for switch in MTT_NO_RANKS MTT_NO_SOCKETS; do
  gcc -O1 -std=gnu99 -D$switch "$build/alone.c" -o "$build/alone" -lm && "$build/alone"
  tell $? "$switch: two ranks are refused by name, or planned"
  none "$(nm -u "$build/alone" | grep -E ' (socket|connect|poll|fork|waitpid)(@|$)')" "$switch leaves sockets"
done
for options in "gcc -fassociative-math -fno-signed-zeros -fno-trapping-math" "gcc -freciprocal-math" \
  "gcc -funsafe-math-optimizations" "clang -funsafe-math-optimizations" "clang -fno-honor-nans"; do
  type ${options%% *} > /dev/null 2>&1 && losses "$options" $options -O3
done
for options in "gcc -Ofast" "gcc -ffast-math" "gcc -ffinite-math-only" "clang -Ofast" \
  "clang -ffp-model=fast" "clang -ffinite-math-only"; do
  type ${options%% *} > /dev/null 2>&1 &&
    refuses "$options" "compile without -ffast-math" $options $header -fsyntax-only mtt.h
done
awk '/^```c$/ {on = 1; next} /^```$/ {on = 0} on' README.md > "$build/readme.c"
check "the README's program" cc -std=c99 $flags -I. "$build/readme.c" -o "$build/readme" -lm
awk '/Quick start:/ {on = 1; next} /^   Contents/ {on = 0} on' mtt.h |
  grep -vE '^ *(cc|nvcc) ' > "$build/manual.c"
check "the manual's program" cc -std=c99 -Wall -Wextra -Werror -I. "$build/manual.c" -o "$build/manual" -lm
(cd "$build" && ./manual > /dev/null); tell $? "the manual's program runs"
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ]
