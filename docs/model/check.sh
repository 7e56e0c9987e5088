#!/usr/bin/env bash
# Checks the model, then plants each bug and expects spin to find it. Needs spin and a C compiler (Debian: spin, gcc).
# `check.sh quick` leaves out what takes long.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
passed=0
failed=0

states() { # settings... -> "errors stored"
  cd "$work"
  spin -a "$@" "$here/step.pml" >spin.log 2>&1 || { cat spin.log >&2; exit 2; }
  gcc -O1 -w -DNOREDUCE -DSAFETY -DCOLLAPSE -DMEMLIM=6000 -o pan pan.c
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
    printf '%-44s %s (%s states)\n' "$*" "$([ "$want" = ok ] && echo holds || echo 'found, as planted')" "$stored"
  else
    failed=$((failed + 1))
    printf '%-44s FAILED: expected %s, got %s errors\n' "$*" "$want" "$errors"
  fi
}

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
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
