#!/usr/bin/env bash
# Checks the models, then plants each bug and expects spin to find it. Needs spin and a C compiler (Debian: spin, gcc).
# `check.sh quick` leaves out what takes long.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
passed=0
failed=0

states() { # settings... -> "errors stored", of $model
  cd "$work"
  spin -a "$@" "$here/$model" >spin.log 2>&1 || { cat spin.log >&2; exit 2; }
  gcc -O1 -w $options -DSAFETY -DCOLLAPSE -DMEMLIM=6000 -o pan pan.c
  ./pan -E -m200000 >pan.log 2>&1 || true
  if grep -q "search depth too small\|out of memory\|reached -DMEMLIM" pan.log; then cat pan.log >&2; exit 2; fi
  sed -n 's/.*errors: \([0-9]*\).*/\1/p; s/^ *\([0-9.e+]*\) states, stored.*/\1/p' pan.log | tr '\n' ' '
}

expect() { # ok|bug settings...
  local want=$1 errors stored
  shift
  read -r errors stored < <(states "$@"; echo)
  if { [ "$want" = ok ] && [ "$errors" = 0 ]; } || { [ "$want" = bug ] && [ "$errors" != 0 ]; }; then
    passed=$((passed + 1))
    printf '%-9s %-34s %s (%s states)\n' "$model" "$*" "$([ "$want" = ok ] && echo holds || echo 'found, as planted')" "$stored"
  else
    failed=$((failed + 1))
    printf '%-9s %-34s FAILED: expected %s, got %s errors\n' "$model" "$*" "$want" "$errors"
  fi
}

model=step.pml options=-DNOREDUCE # spin reduces nothing where processes end by `provided`
expect ok -DKILL
if [ "${1:-}" != quick ]; then
  expect ok -DKILL -DX=2 -DSTEPS=1
  expect ok -DEXPEL
  expect ok -DKILL -DTIMEOUT
  expect ok -DEXPEL -DX=2 -DSTEPS=1
fi
expect bug -DEXPEL -DNO_LEAVE
expect bug -DEXPEL -DNO_END_CHECK
expect bug -DEXPEL -DNO_TEAR_LEAVE
expect bug -DEXPEL -DEARLY_ADOPT
if [ "${1:-}" != quick ]; then
  expect bug -DKILL -DX=2 -DSTEPS=1 -DEARLY_OUT
  expect bug -DKILL -DNO_DEAD_WORD
fi

model=lead.pml options=
expect ok -DLIVES=2
if [ "${1:-}" != quick ]; then
  expect ok -DLOSSY
  expect ok -DENDS=2 -DROUNDS=1
fi
for bug in STALE_WRITES REUSE EARLY_TELL EARLY_GRANT EARLY_FREE EARLY_ANSWER; do
  expect bug -D$bug
done
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
