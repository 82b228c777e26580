/* SPDX-License-Identifier: Apache-2.0
 *
 * The handoff protocol: one prefill worker, one decode worker, one slab, and
 * two attempts of one sequence that follow each other. Each attempt has two
 * slices. Links may be cut at any moment (what is on its way is lost) and are
 * dialled anew; offers and commits are repeated; either side may end an
 * attempt at any time. The sender's store into the receiver's slab (way shm)
 * is a step of its own that may happen long after the credit, and after the
 * link was cut: that is what quarantine is for.
 *
 * Checked (docs/handoff/check.sh):
 *   - a commit is accepted only for a live attempt of which every slice
 *     landed, from its own stores (no token from a part, or from stale KV)
 *   - at most one attempt is live, and at most one is ever committed
 *   - the slab has one owner: nobody stores into a slab that another holds
 *   - when all is said, every attempt has ended on both sides and the slab
 *     is free (no invalid end state)
 *
 * Seeded faults, which the checker must find:
 *   -DFAULT_1  a cut link frees the slab while a store is outstanding
 *   -DFAULT_2  a commit is accepted without all slices, or for an ended
 *              attempt
 */

#define ATTEMPTS 2
#define SLICES   2
#define DEPTH    5   /* messages on the way */
#define CUTS     2   /* links that may be cut */
#define REPEATS  1   /* offers and commits said again, per link */

mtype = { OFFER, READY, SLICE, RETURN, COMMIT, WITHDRAW,  /* to receiver */
          GRANTED, REFUSED, CREDIT, ACK, DEAD };          /* to sender */

/* link epoch, message, attempt, slice, generation */
chan up   = [DEPTH] of { byte, mtype, byte, byte, byte };
chan down = [DEPTH] of { byte, mtype, byte, byte, byte };

byte epoch = 1;       /* of the connection; messages of older ones are lost */
byte cuts = 0;

/* Receiver. */
mtype = { NONE, ISSUED, LIVE, COMMITTED, ENDED };
mtype r_state[ATTEMPTS + 1] = NONE;
byte  landed[ATTEMPTS + 1] = 0;        /* bit per slice */
byte  announced[ATTEMPTS + 1] = 0;
byte  r_epoch = 1;
bool  bad_kv = false;                  /* a slice landed foreign bytes */

mtype = { FREE, OUT, QUARANTINED };
mtype slab = FREE;
byte  slab_attempt = 0, slab_slice = 0, slab_generation = 0, slab_epoch = 0;
byte  slab_bytes = 0;                  /* attempt * 2 + slice of the store */
byte  generation = 0;

/* Sender. */
mtype = { IDLE, OFFERED, SENDING, COMMITTING, DONE };
mtype s_state[ATTEMPTS + 1] = IDLE;
byte  s_epoch = 1;
byte  repeats = 0;

/* A store that the sender still has to make, with what it was told. */
bool  storing = false;
byte  store_attempt, store_slice, store_generation, store_epoch;

#define ENCODE(a, i)   ((a) * 2 + (i))
#define OVER(a)        (r_state[a] == COMMITTED || r_state[a] == ENDED)
#define LIVE_ONE(a)    (r_state[a] == ISSUED || r_state[a] == LIVE)
#define ALL            ((1 << SLICES) - 1)

inline end_attempt(a) {
  if
  :: LIVE_ONE(a) ->
     r_state[a] = ENDED;
     if
     :: slab == OUT && slab_attempt == a -> slab = QUARANTINED
     :: else
     fi
  :: else
  fi
}

inline free_slab() {
  slab = FREE; slab_attempt = 0; slab_slice = 0; slab_bytes = 0
}

/* The connection breaks. Both sides notice later, each by itself. */
active proctype Network() {
  byte e, a, i, g;
  mtype m;
end:
  do
  :: atomic {
       cuts < CUTS -> cuts++; epoch++;
       do
       :: len(up) > 0 -> up ? e, m, a, i, g
       :: len(down) > 0 -> down ? e, m, a, i, g
       :: len(up) == 0 && len(down) == 0 -> break
       od
     }
  od
}

active proctype Receiver() {
  byte e, a, i, g;
  mtype m;
  byte next = 1;
  byte asked_attempt = 0, asked_slice = 0;  /* a slice that waits */

end:
  do
  /* The next attempt opens when the one before has ended. */
  :: atomic {
       next <= ATTEMPTS && (next == 1 || r_state[next - 1] == ENDED) ->
       r_state[next] = ISSUED; next++
     }

  /* The client leaves, the router asks for another attempt, a timer fires. */
  :: atomic {
       (LIVE_ONE(1) || LIVE_ONE(2)) && len(down) < DEPTH ->
       a = (LIVE_ONE(1) -> 1 : 2);
       end_attempt(a);
       down ! r_epoch, DEAD, a, 0, 0
     }

  /* The link is found broken: its attempts fail, its slab is quarantined. */
  :: atomic {
       r_epoch != epoch ->
       asked_attempt = 0;
       a = 1;
       do
       :: a <= ATTEMPTS ->
          if
          :: r_state[a] == LIVE -> end_attempt(a)
          :: else
          fi;
          a++
       :: else -> break
       od;
#ifdef FAULT_1
       if
       :: slab != FREE -> free_slab()
       :: else
       fi;
#endif
       r_epoch = epoch
     }

  /* The peer's word, off the link, that no store is outstanding. */
  :: atomic {
       slab == QUARANTINED && slab_epoch != r_epoch && s_epoch != slab_epoch &&
       !(storing && store_epoch == slab_epoch) ->
       free_slab()
     }

  /* A credit for the slice that waits. */
  :: atomic {
       asked_attempt != 0 && slab == FREE && len(down) < DEPTH ->
       if
       :: r_state[asked_attempt] == LIVE ->
          generation++;
          slab = OUT; slab_attempt = asked_attempt; slab_slice = asked_slice;
          slab_generation = generation; slab_epoch = r_epoch; slab_bytes = 0;
          down ! r_epoch, CREDIT, asked_attempt, asked_slice, generation
       :: else
       fi;
       asked_attempt = 0
     }

  :: atomic {
       len(down) < DEPTH && asked_attempt == 0 && len(up) > 0 ->
       up ? e, m, a, i, g;
       if
       :: e != r_epoch || e != epoch -> skip  /* lost with its connection */
       :: else ->
          if
          :: m == OFFER && r_state[a] == ISSUED ->
             r_state[a] = LIVE;
             down ! r_epoch, GRANTED, a, 0, 0
          :: m == OFFER && r_state[a] == LIVE ->
             down ! r_epoch, GRANTED, a, 0, 0
          :: m == OFFER && r_state[a] == COMMITTED ->
             down ! r_epoch, ACK, a, 1, 0
          :: m == OFFER && r_state[a] == ENDED ->
             down ! r_epoch, REFUSED, a, 0, 0
          :: m == READY && r_state[a] == LIVE &&
             !(announced[a] & (1 << i)) ->
             announced[a] = announced[a] | (1 << i);
             asked_attempt = a; asked_slice = i
          :: m == SLICE && slab != FREE && slab_generation == g ->
             if
             :: r_state[a] == LIVE && slab == OUT && slab_attempt == a &&
                slab_slice == i ->
                if
                :: slab_bytes != ENCODE(a, i) -> bad_kv = true
                :: else
                fi;
                landed[a] = landed[a] | (1 << i)
             :: else  /* its attempt ended: nothing lands */
             fi;
             free_slab()
          :: m == RETURN && slab != FREE && slab_generation == g ->
             free_slab()
          :: m == COMMIT ->
             if
#ifdef FAULT_2
             :: r_state[a] == LIVE || r_state[a] == ENDED ->
#else
             :: r_state[a] == LIVE && landed[a] == ALL ->
#endif
                assert(r_state[a] == LIVE);
                assert(landed[a] == ALL);
                assert(!bad_kv);
                assert(r_state[1] != COMMITTED && r_state[2] != COMMITTED);
                r_state[a] = COMMITTED;
                down ! r_epoch, ACK, a, 1, 0
             :: r_state[a] == COMMITTED -> down ! r_epoch, ACK, a, 1, 0
             :: else ->
                end_attempt(a);
                down ! r_epoch, ACK, a, 0, 0
             fi
          :: m == WITHDRAW -> end_attempt(a)
          :: else  /* late: a counted no-op */
          fi
       fi
     }
  od
}

active proctype Sender() {
  byte e, a, i, g;
  mtype m;
  byte current = 0;      /* the attempt in hand */
  byte slice = 0;        /* next one to announce */
  bool waits = false;    /* announced, not yet sent */

end:
  do
  /* The router brings the next attempt's ticket. */
  :: atomic {
       current < ATTEMPTS && r_state[current + 1] != NONE &&
       (current == 0 || s_state[current] == DONE) && s_epoch == epoch &&
       len(up) < DEPTH ->
       current++; slice = 0; waits = false; repeats = 0;
       s_state[current] = OFFERED;
       up ! s_epoch, OFFER, current, 0, 0
     }
  :: atomic {
       current > 0 && s_state[current] == OFFERED && repeats < REPEATS &&
       len(up) < DEPTH ->
       repeats++; up ! s_epoch, OFFER, current, 0, 0
     }

  :: atomic {
       current > 0 && s_state[current] == SENDING && !waits &&
       slice < SLICES && len(up) < DEPTH ->
       waits = true; up ! s_epoch, READY, current, slice, 0
     }

  /* The gather's store into the receiver's slab, whenever it comes. */
  :: atomic {
       storing ->
       /* Nobody else holds what is stored to. */
       assert(slab != FREE && slab_generation == store_generation);
       slab_bytes = ENCODE(store_attempt, store_slice);
       if
       :: len(up) < DEPTH && store_epoch == s_epoch ->
          if
          :: s_state[store_attempt] == SENDING ->
             up ! s_epoch, SLICE, store_attempt, store_slice, store_generation;
             waits = false; slice++
          :: else -> up ! s_epoch, RETURN, 0, 0, store_generation
          fi;
          storing = false
       :: store_epoch != s_epoch -> storing = false
       fi
     }

  :: atomic {
       current > 0 && s_state[current] == SENDING && slice == SLICES &&
       len(up) < DEPTH ->
       s_state[current] = COMMITTING; repeats = 0;
       up ! s_epoch, COMMIT, current, 0, 0
     }
  :: atomic {
       current > 0 && s_state[current] == COMMITTING && repeats < REPEATS &&
       len(up) < DEPTH ->
       repeats++; up ! s_epoch, COMMIT, current, 0, 0
     }

  /* Cancelled, or its transfer made no progress. */
  :: atomic {
       current > 0 && s_state[current] != DONE && len(up) < DEPTH ->
       s_state[current] = DONE;
       up ! s_epoch, WITHDRAW, current, 0, 0
     }

  /* The link is found broken: its attempts fail. A store may go on. */
  :: atomic {
       s_epoch != epoch ->
       if
       :: current > 0 -> s_state[current] = DONE
       :: else
       fi;
       s_epoch = epoch
     }

  :: atomic {
       len(up) < DEPTH && !storing && len(down) > 0 ->
       down ? e, m, a, i, g;
       if
       :: e != s_epoch || e != epoch -> skip
       :: else ->
          if
          :: m == GRANTED && s_state[a] == OFFERED -> s_state[a] = SENDING
          :: (m == REFUSED || m == DEAD) && s_state[a] != IDLE ->
             s_state[a] = DONE
          :: m == CREDIT ->
             if
             :: s_state[a] == SENDING && waits && slice == i ->
                storing = true; store_attempt = a; store_slice = i;
                store_generation = g; store_epoch = s_epoch
             :: else -> up ! s_epoch, RETURN, 0, 0, g
             fi
          :: m == ACK && s_state[a] == COMMITTING ->
             assert(i == 0 || r_state[a] == COMMITTED);
             s_state[a] = DONE
          :: else
          fi
       fi
     }
  od
}

/* At most one live attempt; a committed one closes the sequence. */
ltl one_live { [] (!(LIVE_ONE(1) && LIVE_ONE(2)) &&
                   !(r_state[1] == COMMITTED && r_state[2] != NONE)) }

/* Where nothing can move any more, nothing is left behind. */
active proctype Quiet() {
end:
  do
  :: atomic {
       timeout ->
       assert(!storing);
       assert(slab == FREE);
       assert(r_state[1] != LIVE && r_state[2] != LIVE);
       assert(s_state[1] == IDLE || s_state[1] == DONE);
       assert(s_state[2] == IDLE || s_state[2] == DONE);
       break
     }
  od
}
