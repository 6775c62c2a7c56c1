#!/usr/bin/env bash
# openmp.sh COMPILER - prints the options by which it has OpenMP, to compile and to link. Apple's clang takes
# it from libomp (brew install libomp); without, there are no options, and one thread.
export LC_ALL=C # decimals have a point
case $("$@" --version 2> /dev/null) in *Apple*) ;; *) echo -fopenmp; exit;; esac
for folder in /opt/homebrew/opt/libomp /usr/local/opt/libomp; do
  [ ! -d $folder ] || exec echo -Xclang -fopenmp -I$folder/include -L$folder/lib -lomp \
    -Wno-unused-command-line-argument
done
