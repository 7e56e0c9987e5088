/* The data plane and the view switch of one group, for spin: step barrier, push dispatch, pull combine, tearing, leave
 * cells, reuse of single-buffered rows and outputs, a death or an expulsion of rank C, and the switch to the view {A, B}.
 *
 * Checked: I1 a complete step never used a wrong row; I3 an expelled rank completes nothing after it was left behind;
 * I4 all that complete a step ran it in one view; I2 survivors never block for ever.
 * A stopped process needs no modelling of its own: any process may pause between any two actions.
 *
 * `make model` runs this file and every planted bug. Settings: KILL (C may be SIGKILLed anywhere), EXPEL (C may be
 * expelled while alive), TIMEOUT (A may tear a step at a wait, as after exchange_timeout), X exchanges per step, STEPS.
 * Planted bugs, each of which must be found:
 *   NO_LEAVE       a view is adopted without leave cells to those left behind
 *   NO_END_CHECK   a step is complete without the last look at the leave cells
 *   NO_TEAR_LEAVE  a rank that tears tells nobody before its outputs become garbage
 *   EARLY_OUT      outputs of the next exchange are written before its dispatch returned (needs X=2)
 *   EARLY_ADOPT    a view is adopted, and followed, before all its members have staged it
 *   NO_DEAD_WORD   nobody is told of a death
 */
#ifndef X
#define X 1
#endif
#ifndef STEPS
#define STEPS 2
#endif
#ifdef NO_DEAD_WORD
#define NO_DEAD_WORDS 1
#else
#define NO_DEAD_WORDS 0
#endif
#define C 2
#define AB 3
#define ABC 7

#define members(e) (e == 2 -> AB : ABC)
#define bit(set, r) ((set >> (r)) & 1)
#define in(q) (bit(members(epoch), q))
#define dead(q) (bit(region[me].dead, q))
/* A tag is unique per (epoch, step, exchange); 0 is garbage, or never written. */
#define tag_of(e, s, x) (e * 16 + s * X + x + 1)
#define tag_step(t) (((t % 16) - 1) / X)
#define later(t) (t != 0 && (tag_step(t) > step || (tag_step(t) == step && t / 16 != epoch)))
#define left(s) (region[me].leave[0] >= s || region[me].leave[1] >= s || region[me].leave[2] >= s)

typedef Region {        /* what others write into a rank's region; [q] is written by rank q alone */
  byte row[3];
  byte flag[3];
  byte ready[3];
  byte leave[3];        /* the highest step that a leave cell names */
  byte cell_step[6];    /* [parity * 3 + source] */
  byte cell_epoch[6];
  bool cell_staged[6];  /* the source had staged view 2 */
  byte out;             /* this rank's own outputs */
  byte dead;            /* dead words, as bits */
  bool staged           /* view 2 */
}
Region region[3];
bool alive[3] = true;
bool left_behind = false;
bool finished[3];
byte completed[12];     /* [rank * 4 + step]: the epoch in which it completed */

#define cell(q) ((step % 2) * 3 + q)
#define other(q) (((step + 1) % 2) * 3 + q)
#define here(q) (region[me].cell_step[cell(q)] == step)
#define arrived(q) (!in(q) || here(q) || dead(q))
#define higher(q) (region[me].cell_step[cell(q)] > step || region[me].cell_step[other(q)] > step)
#define heard(q) (!in(q) || dead(q) || here(q) || higher(q))
#define newer(q) (here(q) && region[me].cell_epoch[cell(q)] > epoch)
/* Of the two members of both views, the other one has staged view 2, or is dead without a cell. */
#ifdef EARLY_ADOPT
#define staged_by(q) true
#else
#define staged_by(q) ((here(q) && region[me].cell_staged[cell(q)]) || (!here(q) && dead(q)))
#endif

#define got(f, q) (!in(q) || region[me].f[q] == tag)
#define hopeless(f, q) (in(q) && ((region[me].f[q] != tag && dead(q)) || later(region[me].flag[q]) || later(region[me].ready[q])))

inline post_cell(q) {
  atomic {
    if
    :: in(q) || (snapshot && bit(AB, q)) ->
       region[q].cell_step[(step % 2) * 3 + me] = step;
       region[q].cell_epoch[(step % 2) * 3 + me] = epoch;
       region[q].cell_staged[(step % 2) * 3 + me] = snapshot
    :: else
    fi
  }
}

inline push(q) {
  atomic { if :: in(q) -> region[q].row[me] = 0 :: else fi };
  atomic { if :: in(q) -> region[q].row[me] = tag; region[q].flag[me] = tag :: else fi }
}

inline leave_cell(set, q) {
  atomic {
    if
    :: bit(set, q) && region[q].leave[me] < step -> region[q].leave[me] = step
    :: else
    fi
  }
}

inline pull(q) {
  atomic { if :: in(q) && region[q].out != tag -> polluted = true :: else fi }
}

proctype Rank(byte me; byte p; byte r) provided (alive[me]) {
  byte epoch = 1, step = 1, x, tag;
  bool snapshot, polluted;

barrier:
  atomic {
    if
    :: step > STEPS -> goto done
    :: else -> snapshot = (epoch == 2 || region[me].staged)
    fi
  };
  post_cell(p);
  post_cell(r);
wait_barrier:
  atomic {
    if
    :: (higher(p) || higher(r)) && heard(p) && heard(r) && !(arrived(p) && arrived(r)) ->
       if
       :: higher(p) -> step = (region[me].cell_step[cell(p)] > step -> region[me].cell_step[cell(p)] : region[me].cell_step[other(p)])
       :: else -> step = (region[me].cell_step[cell(r)] > step -> region[me].cell_step[cell(r)] : region[me].cell_step[other(r)])
       fi;
       goto barrier
    :: me == C && (newer(p) || newer(r) || left_behind && left(1)) -> goto done      /* learns that it was expelled */
    :: arrived(p) && arrived(r) ->
       if
#ifdef EARLY_ADOPT
       :: newer(p) || newer(r) -> epoch = 2
#else
       :: (newer(p) || newer(r)) && region[me].staged -> epoch = 2
#endif
       :: else
       fi;
       if
       :: me == C && here(p) && here(r) && region[me].cell_staged[cell(p)] && region[me].cell_staged[cell(r)] -> goto done
       :: else
       fi;
       if
       :: me != C && epoch == 1 && snapshot && staged_by((1 - me)) ->
          epoch = 2;
          goto adopt
       :: else
       fi
    fi
  };
  goto decided;
adopt:
#ifndef NO_LEAVE
  leave_cell(4, C);
#endif
  left_behind = true;
decided:
  if
  :: (members(epoch) & region[me].dead) == 0 -> goto go
  :: else
  fi;
  /* A member is dead: no step runs. The next try comes when something was staged, so that the model stays finite. */
  leave_cell(members(epoch), p);
  leave_cell(members(epoch), r);
  atomic {
    if
    :: me != C && region[me].staged -> step++; goto barrier
    :: me == C && (left_behind || left(step)) -> goto done
    fi
  };

go:
  atomic { assert(epoch == 1 || region[me].staged); x = 0; polluted = false };   /* I5: the tables are there */
exchange:
  tag = tag_of(epoch, step, x);
#ifdef EARLY_OUT
  region[me].out = 0;
#endif
  push(p);
  push(r);
  atomic {
    if
    :: got(flag, p) && got(flag, r)
    :: !(got(flag, p) && got(flag, r)) && (hopeless(flag, p) || hopeless(flag, r) || left(step)) -> goto tear_step
#ifdef TIMEOUT
    :: me == 0 && !(got(flag, p) && got(flag, r)) -> goto tear_step
#endif
    fi
  };
  /* The experts read the rows while they write outputs; rows overwritten meanwhile spoil them. */
  region[me].out = 0;
  atomic {
    if
    :: (in(p) && region[me].row[p] != tag) || (in(r) && region[me].row[r] != tag) -> polluted = true
    :: else
    fi;
    region[me].out = (polluted -> 0 : tag)
  };
  atomic { if :: in(p) -> region[p].ready[me] = tag :: else fi };
  atomic { if :: in(r) -> region[r].ready[me] = tag :: else fi };
  atomic {
    if
    :: got(ready, p) && got(ready, r)
    :: !(got(ready, p) && got(ready, r)) && (hopeless(ready, p) || hopeless(ready, r) || left(step)) -> goto tear_step
#ifdef TIMEOUT
    :: me == 0 && !(got(ready, p) && got(ready, r)) -> goto tear_step
#endif
    fi
  };
  pull(p);
  pull(r);
  atomic { x++; if :: x < X -> goto exchange :: else fi };
  /* The end-of-step check: its look at the leave cells is the moment at which the step completes. */
  atomic {
#ifndef NO_END_CHECK
    if
    :: left(step) -> goto tear_step
    :: else
    fi;
#endif
    assert(!polluted);                                                         /* I1 */
    assert(me != C || !left_behind);                                           /* I3 */
    assert(completed[p * 4 + step] == 0 || completed[p * 4 + step] == epoch);  /* I4 */
    assert(completed[r * 4 + step] == 0 || completed[r * 4 + step] == epoch);
    completed[me * 4 + step] = epoch;
    step++;
    goto barrier
  };

tear_step:
#ifndef NO_TEAR_LEAVE
  leave_cell(members(epoch), p);
  leave_cell(members(epoch), r);
#endif
  atomic {
    region[me].out = 0;      /* the engine knows nothing of it and goes on writing */
    step++;
    goto barrier
  };

done:
  finished[me] = true
}

/* Daemons and controller: dead words, and a view without C, in any order and at any distance. */
proctype Control() {
  if
#ifdef KILL
  :: alive[C] = false
#endif
#ifdef EXPEL
  :: skip
#endif
  :: goto nothing
  fi;
  do
#ifndef NO_DEAD_WORD
  :: !bit(region[0].dead, C) -> region[0].dead = 4
  :: !bit(region[1].dead, C) -> region[1].dead = 4
#endif
  :: !region[0].staged -> region[0].staged = true
  :: !region[1].staged -> region[1].staged = true
  :: region[0].staged && region[1].staged && (bit(region[0].dead & region[1].dead, C) || NO_DEAD_WORDS) -> break
  od;
nothing:
  skip
}

/* I2: when nothing can move any more, both survivors have ended all their steps. */
proctype Monitor() {
  timeout -> assert(finished[0] && finished[1])
}

init {
  atomic { run Rank(0, 1, 2); run Rank(1, 2, 0); run Rank(2, 0, 1); run Control(); run Monitor() }
}
