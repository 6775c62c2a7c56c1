#!/usr/bin/env bash
# deps.sh - makes sure that the build finds stb_sprintf.h, which it needs, and OpenBLAS, which makes it fast.
# Installs Debian's packages if that needs no password; otherwise prints the line to run.
set -u
cc=${CC:-cc}
has() { printf '#include <%s>\n' "$1" | $cc -E -x c - >/dev/null 2>&1; }
if ! command -v "$cc" > /dev/null; then
  echo "a C compiler is missing; on Debian or Ubuntu: sudo apt-get install gcc make" >&2
  exit 1
fi
need=()
has stb_sprintf.h || has stb/stb_sprintf.h || need+=(libstb-dev)
blas=/usr/lib/$($cc -print-multiarch 2>/dev/null)/openblas-openmp
[ -d "$blas" ] && has cblas.h || need+=(libopenblas-openmp-dev)
[ ${#need[@]} -eq 0 ] && exit 0
line="apt-get install -y ${need[*]}"
if command -v apt-get >/dev/null; then
  as=; [ "$(id -u)" = 0 ] || as="sudo -n"
  echo "installing ${need[*]}" >&2
  { $as $line || { $as apt-get update && $as $line; }; } >/dev/null 2>&1 && exit 0
  echo "could not install; run: sudo $line" >&2
else
  echo "missing: stb_sprintf.h (github.com/nothings/stb; put it beside mtt.h)," >&2
  echo "and for speed OpenBLAS with OpenMP" >&2
fi
has stb_sprintf.h || has stb/stb_sprintf.h || [ -f stb_sprintf.h ]
