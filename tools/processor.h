/* processor.h - a program that was compiled for a newer processor says so. Without it, it would end at an
   illegal instruction without a word. */
#ifndef PROCESSOR_H_INCLUDED
#define PROCESSOR_H_INCLUDED
#if defined(__x86_64__) && defined(__GNUC__) && defined(__AVX__)
#include <unistd.h>

/* Runs before main, and has no instruction that an x86-64 lacks. */
__attribute__((constructor, target("arch=x86-64"))) static void processor_check(void)
{
    static const char text[] = "this program was compiled for a newer processor: compile it here, or with "
                               "CFLAGS='-O3 -march=x86-64'\n";
    int can = 1;
    __builtin_cpu_init();
    can &= __builtin_cpu_supports("avx") != 0;
#ifdef __AVX2__
    can &= __builtin_cpu_supports("avx2") != 0;
#endif
#ifdef __FMA__
    can &= __builtin_cpu_supports("fma") != 0;
#endif
#ifdef __BMI2__
    can &= __builtin_cpu_supports("bmi2") != 0;
#endif
#ifdef __AVX512F__
    can &= __builtin_cpu_supports("avx512f") != 0;
#endif
#ifdef __AVX512BW__
    can &= __builtin_cpu_supports("avx512bw") != 0;
#endif
#ifdef __AVX512VL__
    can &= __builtin_cpu_supports("avx512vl") != 0;
#endif
    if (!can) _exit(write(2, text, sizeof(text) - 1) < 0 ? 1 : 6); /* 6: as for a device */
}
#endif
#endif
