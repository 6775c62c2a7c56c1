/* processor.h - a program that was compiled for a newer processor says so. Without it, it would end at an
   illegal instruction without a word. */
#ifndef PROCESSOR_H_INCLUDED
#define PROCESSOR_H_INCLUDED
#if defined(__x86_64__) && defined(__GNUC__) && defined(__AVX__)
#include <unistd.h>

/* The widest vectors that the compiler may use. */
#if defined(__AVX512F__)
#define PROCESSOR_NEEDS "avx512f"
#elif defined(__AVX2__)
#define PROCESSOR_NEEDS "avx2"
#else
#define PROCESSOR_NEEDS "avx"
#endif

/* Runs before main, and has no instruction that an x86-64 lacks. */
__attribute__((constructor, target("arch=x86-64"))) static void processor_check(void)
{
    static const char text[] = "this program was compiled for a newer processor, with " PROCESSOR_NEEDS
                               ": compile it here, or with CFLAGS='-O3 -march=x86-64'\n";
    __builtin_cpu_init();
    if (__builtin_cpu_supports(PROCESSOR_NEEDS)) return;
    _exit(write(2, text, sizeof(text) - 1) < 0 ? 1 : 6); /* 6: as for a device */
}
#endif
#endif
