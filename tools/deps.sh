#!/usr/bin/env bash
# deps.sh [gnuplot] - makes sure that the build finds stb_sprintf.h, which it needs, and OpenBLAS, which makes
# it fast; with gnuplot also that this is there. Installs Debian's packages if that needs no password;
# otherwise prints the line to run.
set -u
export LC_ALL=C # decimals have a point
cc=${CC:-cc}
has() { printf '#include <%s>\n' "$1" | $cc -E -x c - >/dev/null 2>&1; }
if ! command -v "$cc" > /dev/null; then
  echo "a C compiler is missing; on Debian or Ubuntu: sudo apt-get install gcc make" >&2
  exit 1
fi
need=() why=
has stb_sprintf.h || has stb/stb_sprintf.h || need+=(libstb-dev) why+=", stb_sprintf.h is needed"
blas=/usr/lib/$($cc -print-multiarch 2>/dev/null)/openblas-openmp
[ -d "$blas" ] && has cblas.h || need+=(libopenblas-openmp-dev) why+=", OpenBLAS makes a CPU faster"
[ "${1:-}" != gnuplot ] || command -v gnuplot > /dev/null ||
  need+=(gnuplot-nox) why+=", gnuplot draws the plots"
[ ${#need[@]} -eq 0 ] && exit 0
line="apt-get install -y ${need[*]}"
if command -v apt-get >/dev/null; then
  as=; [ "$(id -u)" = 0 ] || as="sudo -n"
  if $as true 2> /dev/null; then
    echo "installing ${need[*]} with apt-get (${why:2})" >&2
    { $as $line || { $as apt-get update && $as $line; }; } >/dev/null 2>&1 && exit 0
    echo "apt-get failed; to see why, run: sudo apt-get update && sudo $line" >&2
  else
    echo "missing: ${need[*]} (${why:2}); run: sudo $line" >&2
  fi
else
  echo "missing: ${need[*]} (${why:2})" >&2
  echo "stb_sprintf.h is at github.com/nothings/stb: put it beside mtt.h" >&2
fi
has stb_sprintf.h || has stb/stb_sprintf.h || [ -f stb_sprintf.h ]
