/* The engine of one process: everything that its threads move between processes of one host, without Python.

   messages.c    messages through rings of shared memory
   ends.c        ends of messages and collectives, and notification of their owners
   collectives.c collectives out of each other's memory, which meet at boards
   arithmetic.c  reductions, with the bits of numpy
   wait.c        the lock, the one wait of all threads, and the thread that works while none waits
   module.c      the types as Python has them

   Whoever holds the engine's lock may touch what belongs to it. Bytes of collectives are moved without the lock.

   The peer can write anything into memory that is shared, at any time. So our own counts are kept in private; those of
   the peer are checked whenever they are read, heads and rows are copied before they are looked at. The words that wake
   a process are hints: a wrong one costs time, no more. For no sleep lasts longer than LOOK_AGAIN_NS, and the spare
   thread, which then looks for all threads and for the event loop, writes these words again. */

#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <structmember.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define LINE 64
#define HEAD_BYTES (2 * LINE)
#define LEAST_ROOM (HEAD_BYTES + LINE) /* to write a head, and some of what follows it */
#define COUNTS_BYTES 256
#define PIECE_BYTES (128 << 10) /* of a message: both sides of a long one copy at the same time, a piece each */
#define TEXT_BYTES 88           /* longest text of a signature, as in transports/signature.py */
#define KEPT_RINGS 4            /* how many rings of messages a receiver keeps for later receives, per peer */
#define MOST_OFFERS (1 << 20)   /* that wait here per peer, as in transports/matching: more than any program has */
#define BUCKETS 256             /* in which receives, and messages that come before theirs, lie by tag and lane */
#define MOST_NOTES (1 << 16)    /* that nobody has taken */
#define CLOSE_AGAIN_NS 50000000 /* a peer may have written over the bell that ends a thread */
#define LOOK_AGAIN_NS 100000000 /* longest sleep without a look: a peer may have written over the words that wake */
#define ROW_LOOK_NS 1000000     /* between looks at a row of a board that is not free: nobody rings for that */
#define LONG_TURN_NS 1000000    /* a look that takes longer shows that others need the core */
#define SPIN_SLACK_NS 20000     /* by which a spin may last longer than twice the last useful ones: peers are often late by that */
#define REST_TIMES 20           /* after a spin in vain none begins for so many times as long: 5 % of the core at most */
#define MOST_REST_NS 20000000
#define NONSENSE UINT64_MAX
#define ANY_LENGTH UINT64_MAX /* of a receive */
#define NO_LENGTH (UINT64_MAX - 1) /* that a message can have */
#define ROUND_UP(n) (((n) + LINE - 1) & ~(uint64_t)(LINE - 1))

/* -- memory that processes share ----------------------------------------------------------------------------------- */

typedef struct { /* how much has been written and read, ever; each count has one writer */
    _Alignas(LINE) _Atomic uint64_t written;
    _Alignas(LINE) _Atomic uint64_t read;
    _Alignas(LINE) _Atomic uint32_t full; /* the writer waits for room */
    _Atomic uint32_t urgent;              /* something is to be read though nobody waits for a message */
    _Alignas(LINE) _Atomic uint64_t kept; /* bytes that the reader keeps for later receives */
} Counts;

typedef struct { /* in each process's own memory */
    _Atomic uint32_t bell;       /* changes when threads that wait are woken */
    _Atomic uint32_t sleepers;   /* threads that wait and sleep, or are about to */
    _Atomic uint32_t spare_bell; /* changes when the thread that works while none waits is woken */
    _Atomic uint32_t unattended; /* thread to wake for unattended packets: none, the spare thread, the loop */
} Bells;

/* Who attends to what is under way in a process, if no thread of it waits. UNKNOWN: never shared, to be written anew. */
enum { ATTENDED, BY_SPARE, BY_LOOP, UNKNOWN };

/* WHOLE: the bytes follow. OFFER: they do not; offers are numbered from 0, in order. ASK: the receiver wants an offer,
   whose number is the tag. REFUSE: it wants none of it, but so many bytes, by the receiver's signature; NONSENSE: it has
   forgotten it, as the sender asked. ANSWER: the bytes of an offer follow, whose number is the tag. NOTE: three integers
   for the process itself. FORGET: the sender withdraws an offer, whose number is the tag. */
enum { WHOLE = 1, OFFER, ASK, REFUSE, ANSWER, NOTE, FORGET };

typedef struct {
    uint64_t tag, lane, nbytes; /* lane: which ranks of the two processes; 0: the processes have one each */
    uint64_t fingerprint;       /* with the text, the signature of the call: see transports/signature.py */
    uint32_t checksum;          /* of the rest of the head */
    uint16_t kind, text_bytes;
    char text[TEXT_BYTES];
} Head;

_Static_assert(sizeof(Head) == HEAD_BYTES, "a head fills two lines");
_Static_assert(sizeof(Counts) <= COUNTS_BYTES, "the counts lie before the bytes");

typedef struct {
    Counts *counts;
    char *bytes;
    uint64_t room, own; /* our count, which is only copied to the others */
} Ring;

/* -- memory of this process ---------------------------------------------------------------------------------------- */

/* States of what a thread can wait for. HOMELESS and CANCELLED: of a collective that a program has to carry out for want
   of common memory, and of one that was cancelled. SIZED: of a receive of any length that has met a message, which waits
   for `accept`. */
enum { PENDING, DONE, MISMATCH, LOST, WITHDRAWN, NO_MEMORY, CORRUPT, HOMELESS, CANCELLED, SIZED };

typedef struct End { /* one rank's end of a message or of a collective */
    PyObject_HEAD
    struct End *next_ended, *next_over;
    PyObject *owner; /* notified of the end on the event loop's thread; NULL: none */
    int submitting;  /* how far the call is that began it */
    int queued;      /* whether its owner will be notified, unless a thread waits for the end */
    int heavy;       /* whether moving its bytes may take longer than waking a thread */
    _Atomic int state;
    _Atomic int waited; /* threads that wait for it here */
} End;

/* The call that began an end has not returned, and sees its end, or sees it unless others are still to be heard of. */
enum { SUBMITTING = 1, SUBMITTING_IN_ORDER, ENDED_AT_ONCE };

typedef struct Op { /* of a message */
    End end;
    struct Op *next;
    PyObject *keeps; /* owns the bytes */
    char *bytes;
    int peer;    /* -1: any */
    int source;  /* whom a message came from */
    int begun;   /* a send whose bytes are being written */
    int refused; /* the state in which a receive ends that takes an offer and does not want it */
    int met;     /* whether a message has met its receive */
    int control; /* NOTE or FORGET: the head is all there is */
    int withdrawn; /* a send whose offer the peer is asked to forget */
    long priority; /* of a send; lower is more urgent */
    Head head;     /* of a send that the peer has asked for: its length is the receiver's */
    Head theirs;   /* of a receive that did not match, or is SIZED: the sender's; of a refused send: the receiver's */
    uint64_t wanted; /* bytes of a receive; or ANY_LENGTH */
    uint64_t claim;  /* number of the message that a SIZED receive has met */
    uint64_t moved, number; /* of its offer */
} Op;

typedef struct {
    Op *first, *last;
} Queue;

typedef struct Early { /* a message, or an offer, that came before its receive and stood in the way of others */
    struct Early *next;
    Op *op; /* a receive that takes it while its bytes arrive */
    uint64_t claim; /* number by which a SIZED receive has met it, until it is accepted; or 0 */
    Head head;
    uint64_t moved, number;
    int64_t since_ns; /* time of its arrival */
    char bytes[]; /* none of an offer */
} Early;

typedef struct {
    Early *first, *last;
} EarlyQueue;

typedef struct Number {
    struct Number *next;
    uint64_t number;
} Number;

typedef struct Note { /* three integers that a peer has written */
    struct Note *next;
    int peer;
    uint64_t words[3];
} Note;

typedef struct {
    Ring out, in;
    Bells *bells;
    int door; /* wakes its event loop; or -1 */
    Queue sends;         /* to be written */
    Queue offered;       /* sends whose bytes the peer has not asked for */
    Queue asking, asked; /* receives that have taken an offer: their question is still to be written; is written */
    uint64_t offers_out, offers_in, early_offers, kept;
    Number *forgotten; /* offers that it has withdrawn, which is still to be confirmed */
    int corrupt; /* it has written nonsense */
    int lost;    /* its process is gone */
    int forced;  /* whether all packets are read, awaited or not */
    EarlyQueue early_in[BUCKETS];
    long receiving; /* receives from it that nothing has met */
    /* the message that is coming in */
    int coming;
    Head head;
    uint64_t moved;
    Op *op;       /* where its bytes go; or */
    Early *early; /* here; or nowhere */
} Peer;

typedef struct Run Run;
typedef struct Scratch Scratch;

typedef struct {
    PyObject_HEAD
    int size;
    Peer *peers;
    Py_buffer *buffers;
    int held; /* number of buffers */
    Bells *bells;
    Queue receives[BUCKETS];
    long receiving, from_any; /* how many there are, and how many of them from any peer */
    _Atomic(End *) ended; /* to be released by a thread that holds Python's lock */
    End *first_over, *last_over; /* ended, and not yet taken by Python */
    Note *first_note, *last_note; /* likewise */
    int notes, taking, delivering; /* taking: the event loop is about to take both; delivering: it notifies owners */
    int probing; /* whether somebody wants to know of messages that no receive waits for */
    int64_t arrival_ns; /* time of the last message that arrived before its receive */
    uint64_t claims;    /* how many messages have met a receive of any length */
    long owned; /* ends under way that have an owner */
    long pending;
    int coming;  /* messages that are coming in */
    int waiting; /* threads */
    int turn;    /* which peer is looked at first */
    uint32_t unattended; /* our copy */
    _Atomic uint32_t sleepers; /* our copy */
    int64_t look_ns;
    _Atomic int64_t spin_ns;     /* longest spin that shortens a wait, by the last ones; 0: any may */
    _Atomic int64_t rest_ns, rested_ns; /* how long no spin begins after one in vain, and until when */
    int yields;   /* whether a look yields the core, which other processes need */
    int awake;    /* whether the event loop runs: it attends before it sleeps */
    int promised; /* whether a thread is about to wait */
    _Atomic int promises; /* whether the thread that begins the next message is about to wait for it */
    /* collectives */
    Run *runs;         /* under way, in the order in which they were begun */
    Scratch *scratch;  /* memory for threads that work */
    int rowless;       /* runs that wait for a row of their board to be free */
    int heavy;         /* ends under way whose bytes take longer to move than a thread to wake */
    int working, most; /* threads that work, and how many may while every process works */
    int cores;         /* of the host, for all processes */
    int door;          /* a descriptor that becomes readable when a run ends that no thread waits for; or -1 */
    /* threads */
    pthread_mutex_t lock, next; /* `next` is held by the thread that is to have the lock next */
    _Atomic int wanted;         /* a thread waits for the lock, and moves on what its holder leaves */
    pthread_t spare;
    int spare_runs;
    pid_t pid;
    _Atomic int closing;
} Engine;

/* wait.c */
int64_t now_ns(void);
void ring_spare(Bells *bells);
void ring_threads(Bells *bells);
void ring(Bells *bells, int door);
void ring_anyhow(Bells *bells, int door);
void open_door(int door);
void lock(Engine *engine);
int attend(Engine *engine);
void unlock(Engine *engine);
void wait_for(Engine *engine, End *end, int64_t limit_ns, int64_t look_ns);
int start_spare(Engine *engine);
void join_spare(Engine *engine);

/* ends.c; the engine is locked, but for what Python calls */
void begin_end(Engine *engine, End *end);
void finish(Engine *engine, End *end, int state);
int note_arrives(Engine *engine, int peer, const Head *head);
void release_over(Engine *engine);
PyObject *Engine_forget(Engine *engine, PyObject *given);
PyObject *Engine_take_ended(Engine *engine, PyObject *unused);

/* messages.c; the engine is locked */
int progress_messages(Engine *engine);
void release_messages(Engine *engine);
PyObject *Engine_send(Engine *engine, PyObject *const *args, Py_ssize_t count);
PyObject *Engine_receive(Engine *engine, PyObject *const *args, Py_ssize_t count);
PyObject *Engine_accept(Engine *engine, PyObject *const *args, Py_ssize_t count);
PyObject *Engine_withdraw(Engine *engine, PyObject *given);
PyObject *Engine_lose(Engine *engine, PyObject *given);
PyObject *Engine_note(Engine *engine, PyObject *const *args, Py_ssize_t count);
PyObject *Engine_probe(Engine *engine, PyObject *on);
PyObject *Engine_announced(Engine *engine, PyObject *rank);
extern PyType_Spec Op_spec;
extern PyTypeObject *Op_type;

/* collectives.c; the engine is locked */
int progress_runs(Engine *engine);
int work_waits(const Engine *engine);
void work(Engine *engine);
void release_runs(Engine *engine);
PyObject *Engine_submit(Engine *engine, PyObject *const *args, Py_ssize_t count);
PyObject *Engine_cancel(Engine *engine, PyObject *given);
extern PyType_Spec Board_spec, Table_spec, Run_spec;
extern PyTypeObject *Board_type, *Table_type, *Run_type;

/* arithmetic.c */
typedef void Loop(char **args, const intptr_t *count, const intptr_t *steps, void *data);

typedef struct {
    Loop *fold, *divide; /* numpy's; NULL: no reduction, no mean */
    void *fold_data, *divide_data;
    int itemsize;
    int narrow; /* how, if partial results have another dtype than the result */
    _Alignas(16) char divisor[32];
} Reducer;

enum { FLOAT16 = 1, BFLOAT16, SIGNED_MEAN, UNSIGNED_MEAN };

/* Fold arrays of bytes in their order. `target` may be the memory of the first; `fold_narrow`'s of any. */
void combine(const Reducer *reducer, const char *a, const char *b, char *target, size_t nbytes);
void divide(const Reducer *reducer, char *target, size_t nbytes);
void fold_narrow(const Reducer *reducer, const char *const *sources, int count, char *target, size_t nbytes);
int reducer_from(PyObject *given, Reducer *reducer);
void copy_uncached(char *target, const char *source, size_t nbytes);

/* module.c */
extern PyTypeObject *Engine_type;
int refuse_fork(Engine *engine);
void release_ended(Engine *engine);
char *taken(Engine *engine, PyObject *memory, Py_ssize_t least);
