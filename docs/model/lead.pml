/* Who leads, what is written under the lead, and one seat, for spin: two controllers, the keys /leader, /view and
 * /members/0 in the store, leases that run out unnoticed, answers of the store that are lost, and two nodes that both
 * offer the seat, of which each holds what it was granted until its processes are gone.
 *
 * Checked: I3 no incarnation is started twice, and none while the one before may live; I4 whoever is told of an epoch is
 * told of the same view; I6 what was acknowledged (a hold that an operator put on the seat) is still in the store.
 * A stopped controller needs no modelling of its own: any process may pause between any two actions.
 *
 * `make model` runs this file, too. Settings: LOSSY (answers of the store may be lost), ROUNDS (views), LIVES
 * (incarnations), ENDS (leases that run out unnoticed).
 * Planted bugs, each of which must be found:
 *   STALE_WRITES   the store takes writes of a leader whose key is gone
 *   REUSE          the seat is given out again under the number that it had
 *   EARLY_TELL     a view is told before it is written
 *   EARLY_GRANT    a grant is told before its number is written
 *   EARLY_FREE     a seat is given out again before its node confirmed that the last processes are gone
 *   EARLY_ANSWER   an operator is answered before anything is written
 */
#ifndef ROUNDS
#define ROUNDS 2
#endif
#ifndef LIVES
#define LIVES 2
#endif
#ifndef ENDS
#define ENDS 1
#endif
#ifdef STALE_WRITES
#define LEADS true
#else
#define LEADS (leader == mine)
#endif

mtype = { GONE, LIVE, FENCED };

/* ---- the store; a transaction is one atomic step */
byte leader, revision;          /* create revision of /leader, 0: there is none; the last one given */
byte view_epoch, view_by;       /* /view: its number and who wrote it, which stands for its content */
mtype seat_phase = GONE;        /* /members/0 */
byte seat_lives, seat_node;
bool seat_held;

/* ---- the nodes */
typedef Node { byte last; byte runs }
Node node[2];
chan grants[2] = [2] of { byte };
bool started[LIVES + 2];
byte told[ROUNDS + 2];          /* epoch -> the content that somebody was told */
bool promised;                  /* an operator was told that the seat is held */
byte ended;

inline tell_view(e, content) {
  assert(told[e] == 0 || told[e] == content);
  told[e] = content
}

/* The seat as it is to be, written by whoever leads; `ok` is false when it does not, or gives up. */
inline write_seat(p, i, n, h) {
  if
  :: atomic { LEADS -> seat_phase = p; seat_lives = i; seat_node = n; seat_held = h; ok = true }
  :: atomic { !LEADS -> ok = false }
  fi
}

proctype Controller(byte me) {
  byte mine, epoch, by, lives, at;
  mtype phase;
  bool held, ok;

campaign:
  ok = false;
  atomic {
    leader == 0 && revision < ENDS + 1 ->
    revision++;
    mine = revision; leader = revision;
    epoch = view_epoch; by = view_by;                  /* and all of the store is read */
    phase = seat_phase; lives = seat_lives; at = seat_node; held = seat_held
  };
  atomic { if :: epoch > 0 -> tell_view(epoch, by) :: else fi };
  do
  :: epoch < ROUNDS ->                                 /* the next view */
#ifdef EARLY_TELL
     atomic { tell_view(epoch + 1, mine) };
#endif
     if
     :: atomic { LEADS && view_epoch == epoch && view_by == by -> view_epoch = epoch + 1; view_by = mine; ok = true }
     :: atomic { !(LEADS && view_epoch == epoch && view_by == by) -> ok = false }
     fi;
#ifdef LOSSY
     if
     :: ok ->                                          /* the answer is lost, and the same is written again */
        atomic { ok = (leader == mine && view_epoch == epoch + 1 && view_by == mine) }
     :: true
     fi;
#endif
     if
     :: !ok -> break
     :: else -> epoch++; by = mine; atomic { tell_view(epoch, by) }
     fi
  :: phase == GONE && !held && lives < LIVES ->        /* the seat is given out */
     if :: at = 0 :: at = 1 fi;
#ifdef REUSE
     if :: lives == 0 -> lives++ :: else fi;
#else
     lives++;
#endif
#ifdef EARLY_GRANT
     grants[at]!lives;
#endif
     write_seat(LIVE, lives, at, held);
     if
     :: !ok -> break
     :: else -> phase = LIVE;
#ifndef EARLY_GRANT
        if :: nfull(grants[at]) -> grants[at]!lives :: full(grants[at]) fi
#endif
     fi
  :: phase == LIVE && node[at].last < lives && nfull(grants[at]) -> grants[at]!lives   /* it did not hear of it */
  :: phase == LIVE ->                                  /* expelled while alive, or missed */
     write_seat(FENCED, lives, at, held);
     if :: !ok -> break :: else -> phase = FENCED fi
#ifdef EARLY_FREE
  :: phase == FENCED ->
#else
  :: phase != GONE && node[at].last >= lives && node[at].runs != lives ->              /* its node confirms it */
#endif
     write_seat(GONE, lives, at, held);
     if :: !ok -> break :: else -> phase = GONE fi
  :: !held && !promised ->                             /* an operator wants the seat held */
#ifdef EARLY_ANSWER
     promised = true;
#endif
     held = true;
     write_seat(phase, lives, at, held);
     if :: !ok -> break :: else -> promised = true fi
  :: break                                             /* it dies, or gives the lead up */
  od;
  if
  :: atomic { leader == mine -> leader = 0 }           /* its key goes with it, or is gone already */
  :: leader != mine
  fi;
  atomic { mine = 0; epoch = 0; by = 0; lives = 0; at = 0; phase = 0; held = false };
  goto campaign
}

proctype Daemon(byte me) {
  byte given;
end:
  do
  :: atomic {
       grants[me]?given ->
       if
       :: given > node[me].last ->
          assert(!started[given]);
          assert(node[1 - me].runs == 0);
          started[given] = true; node[me].last = given; node[me].runs = given
       :: else
       fi;
       given = 0
     }
  :: atomic { node[me].runs != 0 -> node[me].runs = 0 }    /* its processes end; they are known to be gone */
  od
}

/* Leases run out, whether or not the controller notices. */
proctype Leases() {
end:
  do
  :: atomic { leader != 0 && ended < ENDS -> leader = 0; ended++ }
  :: atomic { promised -> assert(seat_held) }
  od
}

init {
  atomic { run Controller(0); run Controller(1); run Daemon(0); run Daemon(1); run Leases() }
}
