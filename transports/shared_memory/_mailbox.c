/* Mailboxes: messages between processes of one host, copied through rings of shared memory by the threads that call.

   There is a ring for each ordered pair of processes, and a message is a head and its bytes. A thread that waits moves
   the bytes of all messages of its process; while none waits, a thread of the mailbox does so, which holds no lock of
   Python's. A process that sleeps is woken through a word of its own memory. mailbox.py says what callers rely on.

   A receiver that needs a message behind others keeps those others, in bounded memory. So a message that is longer than
   the ring is offered: its head goes alone, the receiver asks for it by number once a receive takes it, and its bytes
   go then. Shorter ones are offered while the receiver keeps many.

   The peer can write anything into memory that is shared, at any time. So our own counts are kept in private; those of
   the peer are checked whenever they are read, heads are copied before they are looked at, and nonsense ends all
   messages with the peer. The words that wake a process are hints: a wrong one costs time, no more. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define LINE 64
#define COUNTS_BYTES 256
#define PIECE_BYTES (128 << 10) /* both sides of a long message copy at the same time, a piece each */
#define SITE_BYTES 40
#define KEPT_RINGS 4            /* how many rings of messages a receiver keeps for later receives, per peer */
#define MOST_OFFERS (1 << 20)   /* that wait here per peer, as in transports/matching: more than any program has */
#define CLOSE_AGAIN_NS 50000000 /* a peer may have written over the bell that ends a thread */
#define NONSENSE UINT64_MAX
#define ROUND_UP(n) (((n) + LINE - 1) & ~(uint64_t)(LINE - 1))

/* -- memory that processes share ----------------------------------------------------------------------------------- */

typedef struct { /* how much has been written and read, ever; each count has one writer */
    _Alignas(LINE) _Atomic uint64_t written;
    _Alignas(LINE) _Atomic uint64_t read;
    _Alignas(LINE) _Atomic uint32_t full; /* the writer waits for room */
    _Alignas(LINE) _Atomic uint64_t kept; /* bytes that the reader keeps for later receives */
} Counts;

typedef struct { /* in each process's own memory */
    _Atomic uint32_t bell;       /* changes when threads that wait are woken */
    _Atomic uint32_t sleepers;   /* threads that wait and sleep, or are about to */
    _Atomic uint32_t spare_bell; /* changes when the thread for messages that nobody waits for is woken */
    _Atomic uint32_t unattended; /* whether there are such messages */
} Bells;

/* WHOLE: the bytes follow. OFFER: they do not; offers are numbered from 0, in order. ASK: the receiver wants an offer,
   whose number is the tag. REFUSE: it wants none of it. ANSWER: the bytes of an offer follow, whose number is the tag. */
enum { WHOLE = 1, OFFER, ASK, REFUSE, ANSWER };

typedef struct {
    uint64_t tag, nbytes;
    uint32_t call, kind;
    char site[SITE_BYTES]; /* where the sender was called */
} Head;

_Static_assert(sizeof(Head) == LINE, "a head fills a line");
_Static_assert(sizeof(Counts) <= COUNTS_BYTES, "the counts lie before the bytes");

typedef struct {
    Counts *counts;
    char *bytes;
    uint64_t room, own; /* our count, which is only copied to the others */
} Ring;

/* -- memory of this process ---------------------------------------------------------------------------------------- */

enum { PENDING, DONE, MISMATCH, LOST, WITHDRAWN, NO_MEMORY, CORRUPT };

typedef struct Op { /* one end of a message */
    PyObject_HEAD
    struct Op *next, *next_ended;
    PyObject *keeps; /* owns the bytes */
    char *bytes;
    int peer;    /* -1: any */
    int source;  /* whom a message came from */
    int begun;   /* a send whose bytes are being written */
    int refused; /* the state in which a receive ends that takes an offer and does not want it */
    Head head;   /* of a receive that did not match: the sender's */
    uint64_t moved, number; /* of its offer */
    _Atomic int state;
} Op;

typedef struct {
    Op *first, *last;
} Queue;

typedef struct Early { /* a message, or an offer, that came before its receive and stood in the way of others */
    struct Early *next;
    Op *op; /* a receive that takes it while its bytes arrive */
    Head head;
    uint64_t moved, number;
    char bytes[]; /* none of an offer */
} Early;

typedef struct {
    Ring out, in;
    Bells *bells;
    Queue sends;         /* to be written */
    Queue offered;       /* sends whose bytes the peer has not asked for */
    Queue asking, asked; /* receives that have taken an offer: their question is still to be written; is written */
    uint64_t offers_out, offers_in, early_offers, kept;
    int corrupt; /* it has written nonsense */
    Early *first_early, *last_early;
    /* the message that is coming in */
    int coming;
    Head head;
    uint64_t moved;
    Op *op;       /* where its bytes go; or */
    Early *early; /* here; or nowhere */
} Peer;

typedef struct {
    PyObject_HEAD
    int size;
    Peer *peers;
    Py_buffer *buffers;
    int held; /* number of buffers */
    Bells *bells;
    Queue receives;
    _Atomic(Op *) ended; /* to be released by a thread that holds Python's lock */
    long pending;
    int coming;  /* messages that are coming in */
    int waiting; /* threads */
    int turn;    /* which peer is looked at first */
    uint32_t unattended; /* our copy */
    _Atomic uint32_t sleepers; /* our copy */
    int64_t look_ns;
    pthread_mutex_t lock, next; /* `next` is held by the thread that is to have the lock next */
    _Atomic int wanted;         /* a thread waits for the lock, and moves on what its holder leaves */
    pthread_t spare;
    int spare_runs;
    pid_t pid;
    _Atomic int closing;
} Mailbox;

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static long futex(_Atomic uint32_t *word, int what, uint32_t value, const struct timespec *limit)
{
    return syscall(SYS_futex, word, what, value, limit, NULL, 0);
}

static void ring_threads(Bells *bells)
{
    atomic_fetch_add(&bells->bell, 1);
    futex(&bells->bell, FUTEX_WAKE, INT32_MAX, NULL);
}

/* Wake a process for which there is something new. What is new is written before, and sleepers look after they have
   said that they sleep, so one of the two sees the other. */
static void ring(Bells *bells)
{
    if (atomic_load(&bells->sleepers))
        ring_threads(bells);
    else if (atomic_load(&bells->unattended)) {
        atomic_fetch_add(&bells->spare_bell, 1);
        futex(&bells->spare_bell, FUTEX_WAKE, 1, NULL);
    }
}

static void copy_in(Ring *ring, uint64_t at, const char *from, uint64_t nbytes)
{
    uint64_t start = at % ring->room, first = nbytes < ring->room - start ? nbytes : ring->room - start;
    memcpy(ring->bytes + start, from, first);
    memcpy(ring->bytes, from + first, nbytes - first);
}

static void copy_out(Ring *ring, uint64_t at, char *to, uint64_t nbytes)
{
    uint64_t start = at % ring->room, first = nbytes < ring->room - start ? nbytes : ring->room - start;
    memcpy(to, ring->bytes + start, first);
    memcpy(to + first, ring->bytes, nbytes - first);
}

/* Return the bytes between two counts of a ring; NONSENSE unless they are whole lines that it can hold. */
static uint64_t between(const Ring *ring, uint64_t behind, uint64_t ahead)
{
    uint64_t nbytes = ahead - behind;
    return nbytes <= ring->room && nbytes % LINE == 0 ? nbytes : NONSENSE;
}

/* Lock the mailbox. A thread that has it for long lets the next one in between two pieces. */
static void lock(Mailbox *box)
{
    pthread_mutex_lock(&box->next);
    atomic_store(&box->wanted, 1);
    pthread_mutex_lock(&box->lock);
    atomic_store(&box->wanted, 0);
    pthread_mutex_unlock(&box->next);
}

static int try_lock(Mailbox *box)
{
    if (pthread_mutex_trylock(&box->next) != 0)
        return 0;
    int locked = pthread_mutex_trylock(&box->lock) == 0;
    pthread_mutex_unlock(&box->next);
    return locked;
}

static void append(Queue *queue, Op *op)
{
    op->next = NULL;
    if (queue->last == NULL)
        queue->first = op;
    else
        queue->last->next = op;
    queue->last = op;
}

/* Return whether it was there. */
static int take_out(Queue *queue, const Op *op)
{
    for (Op **at = &queue->first, *before = NULL; *at != NULL; before = *at, at = &(*at)->next)
        if (*at == op) {
            *at = op->next;
            if (queue->last == op)
                queue->last = before;
            return 1;
        }
    return 0;
}

/* How far a send has begun. */
enum { ASKED_FOR = 1, WRITING };

/* What a head that arrives leads to. */
enum { UNWANTED, ALONE, BYTES_FOLLOW, BAD };

/* -- progress; the mailbox is locked ------------------------------------------------------------------------------- */

static void end(Mailbox *box, Op *op, int state)
{
    Op *first = atomic_load(&box->ended);
    box->pending--;
    atomic_store(&op->state, state);
    do
        op->next_ended = first;
    while (!atomic_compare_exchange_weak(&box->ended, &first, op)); /* others only take all of them */
}

static uint64_t kept_bytes(const Head *head)
{
    return head->kind == WHOLE ? LINE + ROUND_UP(head->nbytes) : 0;
}

static void count_kept(Peer *peer, uint64_t kept)
{
    peer->kept = kept;
    atomic_store(&peer->in.counts->kept, kept);
}

static void drop_early(Peer *peer, Early *early)
{
    Early *before = NULL;
    for (Early *kept = peer->first_early; kept != early; kept = kept->next)
        before = kept;
    if (before == NULL)
        peer->first_early = early->next;
    else
        before->next = early->next;
    if (peer->last_early == early)
        peer->last_early = before;
    peer->early_offers -= early->head.kind == OFFER;
    count_kept(peer, peer->kept - kept_bytes(&early->head));
    free(early);
}

static void end_all(Mailbox *box, Queue *queue, int state)
{
    for (Op *op; (op = queue->first) != NULL; end(box, op, state))
        take_out(queue, op);
}

/* End all messages with a peer that has written nonsense, also receives from anybody: they may wait for it in vain. */
static void fail(Mailbox *box, int index)
{
    Peer *peer = &box->peers[index];
    peer->corrupt = 1;
    box->coming -= peer->coming;
    peer->coming = 0;
    for (Op *op = box->receives.first, *next; op != NULL; op = next) {
        next = op->next;
        if (op->peer < 0 || op->peer == index) {
            take_out(&box->receives, op);
            op->source = index;
            end(box, op, CORRUPT);
        }
    }
    Op *op = peer->op != NULL ? peer->op : peer->early != NULL ? peer->early->op : NULL;
    if (op != NULL)
        end(box, op, CORRUPT);
    if (peer->early != NULL)
        drop_early(peer, peer->early);
    peer->op = NULL, peer->early = NULL;
    end_all(box, &peer->sends, CORRUPT);
    end_all(box, &peer->offered, CORRUPT);
    end_all(box, &peer->asking, CORRUPT);
    end_all(box, &peer->asked, CORRUPT);
    if (atomic_load(&box->sleepers))
        ring_threads(box->bells);
}

static uint64_t room_left(const Ring *out)
{
    uint64_t used = between(out, atomic_load(&out->counts->read), out->own);
    return used == NONSENSE ? NONSENSE : out->room - used;
}

static void write_head(Ring *out, const Head *head, uint32_t kind)
{
    Head written = *head;
    written.kind = kind;
    memcpy(out->bytes + out->own % out->room, &written, LINE);
    out->own += LINE;
}

/* Write the question of a receive for the offer that it has taken. */
static void ask(Mailbox *box, Peer *peer, Op *op)
{
    Head head = {.tag = op->number};
    take_out(&peer->asking, op);
    write_head(&peer->out, &head, op->refused ? REFUSE : ASK);
    if (op->refused)
        end(box, op, op->refused);
    else
        append(&peer->asked, op);
}

/* Write the head of a message; return whether its bytes follow. */
static int begin(Peer *peer, Op *op)
{
    Ring *out = &peer->out;
    if (op->begun) /* the peer has asked for it */
        write_head(out, &(Head){.tag = op->number, .nbytes = op->head.nbytes}, ANSWER);
    else if (op->head.nbytes <= out->room - LINE &&
             atomic_load(&out->counts->kept) + LINE + ROUND_UP(op->head.nbytes) <= KEPT_RINGS * out->room)
        write_head(out, &op->head, WHOLE);
    else {
        write_head(out, &op->head, OFFER);
        op->number = peer->offers_out++;
        take_out(&peer->sends, op);
        append(&peer->offered, op);
        return 0;
    }
    op->begun = WRITING;
    return 1;
}

/* Write as much as there is room for; return whether anything was. */
static int push(Mailbox *box, int index)
{
    Peer *peer = &box->peers[index];
    Ring *out = &peer->out;
    uint64_t before = out->own;
    while (peer->sends.first != NULL || peer->asking.first != NULL) {
        uint64_t left = room_left(out);
        if (left < 2 * LINE) {
            atomic_store(&out->counts->full, 1);
            left = room_left(out);
        }
        if (left == NONSENSE) {
            fail(box, index);
            return 1;
        }
        if (left < 2 * LINE)
            break;
        Op *op = peer->sends.first;
        uint64_t n = 0;
        if (peer->asking.first != NULL && (op == NULL || op->begun != WRITING))
            ask(box, peer, peer->asking.first);
        else if (op->begun == WRITING || (left -= LINE, begin(peer, op))) {
            n = op->head.nbytes - op->moved;
            n = n < left ? n : left;
            n = n < PIECE_BYTES ? n : PIECE_BYTES;
            copy_in(out, out->own, op->bytes + op->moved, n);
            op->moved += n;
            out->own += ROUND_UP(n);
            if (op->moved == op->head.nbytes) {
                take_out(&peer->sends, op);
                end(box, op, DONE);
            }
        }
        atomic_store(&out->counts->written, out->own);
        if (n == PIECE_BYTES)
            ring(peer->bells);
        if (atomic_load(&box->wanted))
            break;
    }
    if (out->own == before)
        return 0;
    ring(peer->bells);
    return 1;
}

/* Find the first receive that takes a message, and remove it; `waits` says whether there are others for the peer. */
static Op *matching(Mailbox *box, int index, const Head *head, int *waits)
{
    *waits = 0;
    for (Op *op = box->receives.first; op != NULL; op = op->next) {
        if (op->peer != index && op->peer >= 0)
            continue;
        *waits = 1;
        if (op->head.tag != head->tag)
            continue;
        take_out(&box->receives, op);
        return op;
    }
    return NULL;
}

/* Note where the message of a receive comes from; return whether the receive asked for something else. */
static int differs(Op *op, int index, const Head *head)
{
    op->source = index;
    if (op->head.call == head->call && op->head.nbytes == head->nbytes)
        return 0;
    op->head = *head;
    return 1;
}

/* Let a receive take an offer. */
static void take_offer(Peer *peer, Op *op, uint64_t number, int differs)
{
    op->number = number;
    op->refused = differs ? MISMATCH : 0;
    append(&peer->asking, op);
}

/* Make room for the message that arrives; where there is no memory, receives that wait fail, and it is lost. */
static void keep_early(Mailbox *box, Peer *peer, uint64_t number)
{
    const Head *head = &peer->head;
    Early *early = malloc(sizeof(Early) + (head->kind == WHOLE ? head->nbytes : 0));
    if (early == NULL) {
        end_all(box, &box->receives, NO_MEMORY);
        return;
    }
    early->next = NULL, early->op = NULL, early->head = *head, early->moved = 0, early->number = number;
    if (peer->last_early == NULL)
        peer->first_early = early;
    else
        peer->last_early->next = early;
    peer->last_early = early;
    peer->early = head->kind == WHOLE ? early : NULL;
    peer->early_offers += head->kind == OFFER;
    count_kept(peer, peer->kept + kept_bytes(head));
}

static void give_early(Mailbox *box, Peer *peer, Early *early)
{
    memcpy(early->op->bytes, early->bytes, early->head.nbytes);
    end(box, early->op, DONE);
    drop_early(peer, early);
}

static void finish_message(Mailbox *box, Peer *peer)
{
    peer->coming = 0, box->coming--;
    if (peer->op != NULL)
        end(box, peer->op, DONE);
    else if (peer->early != NULL && peer->early->op != NULL)
        give_early(box, peer, peer->early);
    peer->op = NULL, peer->early = NULL;
}

static Op *numbered(const Queue *queue, uint64_t number)
{
    Op *op = queue->first;
    while (op != NULL && op->number != number)
        op = op->next;
    return op;
}

/* The peer answers a question for one of our offers. */
static int answered_offer(Mailbox *box, Peer *peer)
{
    Op *op = numbered(&peer->offered, peer->head.tag);
    if (op == NULL)
        return BAD;
    take_out(&peer->offered, op);
    op->begun = ASKED_FOR;
    if (peer->head.kind == ASK)
        append(&peer->sends, op);
    else
        end(box, op, DONE);
    return ALONE;
}

/* The bytes of one of its offers follow; those of a receive that was withdrawn go nowhere. */
static int answer_begins(Peer *peer)
{
    Op *op = numbered(&peer->asked, peer->head.tag);
    if (peer->head.tag >= peer->offers_in || (op != NULL && op->head.nbytes != peer->head.nbytes))
        return BAD;
    if (op != NULL)
        take_out(&peer->asked, op);
    peer->op = op;
    return BYTES_FOLLOW;
}

/* A message, or the offer of one, is next. It stays in the ring if nobody needs anything of the peer. */
static int message_begins(Mailbox *box, int index)
{
    Peer *peer = &box->peers[index];
    const Head *head = &peer->head;
    int waits;
    if (head->kind == OFFER && peer->early_offers == MOST_OFFERS)
        return BAD;
    if (head->kind == WHOLE && (head->nbytes > peer->in.room - LINE ||
                                peer->kept + kept_bytes(head) > (KEPT_RINGS + 1) * peer->in.room))
        return BAD;
    Op *op = matching(box, index, head, &waits);
    if (op == NULL && !waits && peer->offered.first == NULL && peer->asked.first == NULL)
        return UNWANTED;
    uint64_t number = head->kind == OFFER ? peer->offers_in++ : 0;
    int other = op != NULL && differs(op, index, head);
    if (op == NULL)
        keep_early(box, peer, number);
    else if (head->kind == OFFER)
        take_offer(peer, op, number, other);
    else if (other)
        end(box, op, MISMATCH);
    else
        peer->op = op;
    return head->kind == OFFER ? ALONE : BYTES_FOLLOW;
}

static int head_arrives(Mailbox *box, int index)
{
    Peer *peer = &box->peers[index];
    switch (peer->head.kind) {
    case WHOLE:
    case OFFER:
        return message_begins(box, index);
    case ASK:
    case REFUSE:
        return answered_offer(box, peer);
    case ANSWER:
        return answer_begins(peer);
    default:
        return BAD;
    }
}

/* Read what has arrived, as far as anybody wants it; return whether anything was. */
static int pull(Mailbox *box, int index)
{
    Peer *peer = &box->peers[index];
    Ring *in = &peer->in;
    uint64_t before = in->own;
    for (;;) {
        uint64_t there = between(in, in->own, atomic_load(&in->counts->written));
        int head = BYTES_FOLLOW;
        if (there == 0)
            break;
        if (there != NONSENSE && !peer->coming) {
            memcpy(&peer->head, in->bytes + in->own % in->room, LINE);
            head = head_arrives(box, index);
            if (head == UNWANTED)
                break;
            if (head == BYTES_FOLLOW)
                peer->coming = 1, box->coming++, peer->moved = 0;
            in->own += LINE, there -= LINE;
        }
        if (there == NONSENSE || head == BAD) {
            fail(box, index);
            return 1;
        }
        if (peer->coming) {
            uint64_t left = peer->head.nbytes - peer->moved, n = left < there ? left : there;
            n = n < PIECE_BYTES ? n : PIECE_BYTES;
            if (peer->op != NULL)
                copy_out(in, in->own, peer->op->bytes + peer->moved, n);
            else if (peer->early != NULL)
                copy_out(in, in->own, peer->early->bytes + peer->moved, n);
            peer->moved += n;
            in->own += ROUND_UP(n);
        }
        atomic_store(&in->counts->read, in->own);
        if (peer->coming && peer->moved == peer->head.nbytes)
            finish_message(box, peer);
        if (atomic_load(&in->counts->full)) {
            atomic_store(&in->counts->full, 0);
            ring(peer->bells);
        }
        if (atomic_load(&box->wanted))
            break;
    }
    return in->own != before;
}

/* `asleep` says how many of the sleepers are the caller. */
static int progress(Mailbox *box, uint32_t asleep)
{
    int moved = 0;
    long pending = box->pending;
    box->turn = box->turn + 1 < box->size ? box->turn + 1 : 0;
    for (int i = 0; i < box->size; i++) {
        int index = (box->turn + i) % box->size;
        Peer *peer = &box->peers[index];
        if (peer->bells == NULL || peer->corrupt)
            continue;
        if (box->receives.first != NULL || peer->coming || peer->offered.first != NULL || peer->asked.first != NULL)
            moved |= pull(box, index);
        if (peer->sends.first != NULL || peer->asking.first != NULL) /* after `pull`, which adds to both */
            moved |= push(box, index);
    }
    if (box->pending != pending && atomic_load(&box->sleepers) > asleep) /* another thread may have waited for it */
        ring_threads(box->bells);
    return moved;
}

/* Look, and note whether something stays under way that nobody attends to: who rings a process in vain makes a system
   call, and wakes its spare thread. Return whether anything moved. */
static int attend(Mailbox *box)
{
    int moved = progress(box, 0);
    uint32_t stays;
    while (stays = (box->pending > 0 || box->coming > 0) && box->waiting == 0, box->unattended != stays) {
        box->unattended = stays;
        atomic_store(&box->bells->unattended, stays);
        moved |= progress(box, 0); /* a ring may have come before */
    }
    return moved;
}

/* Unlock the mailbox after a call, once all that can move has moved, or another thread is about to move it. */
static void unlock(Mailbox *box)
{
    attend(box);
    pthread_mutex_unlock(&box->lock);
}

/* The thread reads its bell before it looks at anything, also at `closing`. Whoever has something for it writes that
   first, then changes the bell, then wakes it. So if the thread has read the bell before the change, its sleep ends at
   once or is ended; if after, it sees what was written before. With `closing` read first, the bell could change between
   the two, and the thread would sleep on the new one for ever. */
static void *run_spare(void *given)
{
    Mailbox *box = given;
    for (;;) {
        uint32_t bell = atomic_load(&box->bells->spare_bell);
        if (atomic_load(&box->closing))
            return NULL;
        lock(box);
        int moved = attend(box);
        pthread_mutex_unlock(&box->lock);
        if (!moved)
            futex(&box->bells->spare_bell, FUTEX_WAIT, bell, NULL);
    }
}

/* Sleep until this process is rung, unless something has come; return whether a signal came. */
static int sleep_here(Mailbox *box, Op *op, int64_t limit_ns)
{
    int interrupted = 0;
    atomic_fetch_add(&box->sleepers, 1);
    atomic_fetch_add(&box->bells->sleepers, 1);
    uint32_t bell = atomic_load(&box->bells->bell);
    lock(box);
    int moved = progress(box, 1);
    pthread_mutex_unlock(&box->lock);
    if (!moved && atomic_load(&op->state) == PENDING && limit_ns > 0) {
        struct timespec limit = {limit_ns / 1000000000, limit_ns % 1000000000};
        interrupted = futex(&box->bells->bell, FUTEX_WAIT, bell, &limit) < 0 && errno == EINTR;
    }
    atomic_fetch_sub(&box->bells->sleepers, 1);
    atomic_fetch_sub(&box->sleepers, 1);
    return interrupted;
}

static void look(Mailbox *box, Op *op, int64_t limit)
{
    int64_t now = now_ns(), until = now + box->look_ns;
    for (; atomic_load(&op->state) == PENDING && now < until && now < limit; now = now_ns())
        if (try_lock(box)) {
            int moved = progress(box, 0);
            pthread_mutex_unlock(&box->lock);
            if (moved)
                until = now + box->look_ns;
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }
}

static void wait_for(Mailbox *box, Op *op, int64_t limit_ns)
{
    int64_t until = now_ns() + limit_ns;
    lock(box);
    box->waiting++;
    unlock(box);
    while (atomic_load(&op->state) == PENDING) {
        look(box, op, until);
        int64_t left = until - now_ns();
        if (atomic_load(&op->state) != PENDING || left <= 0 || sleep_here(box, op, left))
            break;
    }
    lock(box);
    box->waiting--;
    unlock(box);
}

/* -- Python's side ------------------------------------------------------------------------------------------------- */

static void Op_dealloc(Op *op)
{
    Py_XDECREF(op->keeps);
    PyTypeObject *type = Py_TYPE(op);
    type->tp_free(op);
    Py_DECREF(type);
}

static PyObject *Op_state(Op *op, void *unused)
{
    return PyLong_FromLong(atomic_load(&op->state));
}

static PyObject *Op_call(Op *op, void *unused)
{
    return Py_BuildValue("kK", (unsigned long)op->head.call, (unsigned long long)op->head.nbytes);
}

static PyObject *Op_site(Op *op, void *unused)
{
    return PyBytes_FromStringAndSize(op->head.site, strnlen(op->head.site, SITE_BYTES));
}

static PyGetSetDef Op_fields[] = {{"state", (getter)Op_state},
                                  {"call", (getter)Op_call},
                                  {"site", (getter)Op_site},
                                  {NULL}};

static PyMemberDef Op_members[] = {{"source", T_INT, offsetof(Op, source), READONLY}, {NULL}};

static PyType_Slot Op_slots[] = {
    {Py_tp_dealloc, Op_dealloc}, {Py_tp_getset, Op_fields}, {Py_tp_members, Op_members}, {0}};
static PyType_Spec Op_spec = {"transports.shared_memory._mailbox.Op", sizeof(Op), 0,
                              Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, Op_slots};
static PyTypeObject *Op_type;

static void release_ended(Mailbox *box)
{
    Op *ended = atomic_exchange(&box->ended, NULL);
    while (ended != NULL) {
        Op *next = ended->next_ended;
        Py_DECREF(ended);
        ended = next;
    }
}

static int start_spare(Mailbox *box)
{
    if (box->spare_runs || atomic_load(&box->closing))
        return 0;
    sigset_t all, before; /* signals are for the threads of the program */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&box->spare, NULL, run_spare, box);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) {
        PyErr_SetString(PyExc_RuntimeError, "no thread can be started for messages that nobody waits for");
        return -1;
    }
    box->spare_runs = 1;
    return 0;
}

/* A fork shares the rings, but not the counts of this process. */
static int refuse_fork(Mailbox *box)
{
    if (box->pid != getpid())
        PyErr_SetString(PyExc_RuntimeError, "this process is a fork of the one that has this mailbox");
    return box->pid != getpid();
}

static Op *new_op(Mailbox *box, int peer, uint64_t tag, uint32_t call, unsigned long long address, uint64_t nbytes,
                  PyObject *keeps)
{
    if (refuse_fork(box))
        return NULL;
    if (peer < -1 || peer >= box->size || (peer >= 0 && box->peers[peer].bells == NULL)) {
        PyErr_SetString(PyExc_ValueError, "there is no way to this peer");
        return NULL;
    }
    if (start_spare(box) < 0)
        return NULL;
    Op *op = PyObject_New(Op, Op_type);
    if (op == NULL)
        return NULL;
    op->next = op->next_ended = NULL;
    op->keeps = Py_NewRef(keeps);
    op->bytes = nbytes ? (char *)(uintptr_t)address : op->head.site; /* memory of nothing may be NULL */
    op->peer = peer, op->source = 0, op->begun = 0, op->refused = 0, op->moved = 0, op->number = 0;
    memset(&op->head, 0, sizeof op->head);
    op->head.tag = tag, op->head.call = call, op->head.nbytes = nbytes;
    atomic_init(&op->state, PENDING);
    return op;
}

static PyObject *Mailbox_send(Mailbox *box, PyObject *const *args, Py_ssize_t count)
{
    if (count != 7)
        return PyErr_Format(PyExc_TypeError, "send takes 7 arguments");
    int peer = (int)PyLong_AsLong(args[0]);
    uint64_t tag = PyLong_AsUnsignedLongLongMask(args[1]);
    uint32_t call = (uint32_t)PyLong_AsUnsignedLongMask(args[2]);
    unsigned long long address = PyLong_AsUnsignedLongLong(args[4]);
    uint64_t nbytes = PyLong_AsUnsignedLongLong(args[5]);
    char *site;
    Py_ssize_t length;
    if (PyErr_Occurred() || PyBytes_AsStringAndSize(args[3], &site, &length) < 0)
        return NULL;
    Op *op = peer < 0 ? (PyErr_SetString(PyExc_ValueError, "a send has one peer"), NULL)
                      : new_op(box, peer, tag, call, address, nbytes, args[6]);
    if (op == NULL)
        return NULL;
    memcpy(op->head.site, site, length < SITE_BYTES ? length : SITE_BYTES);
    Py_INCREF(op); /* as long as it is pending */
    Py_BEGIN_ALLOW_THREADS
    lock(box);
    Peer *to = &box->peers[peer];
    box->pending++;
    if (to->corrupt)
        end(box, op, CORRUPT);
    else {
        append(&to->sends, op);
        if (to->sends.first == op)
            push(box, peer);
    }
    unlock(box);
    Py_END_ALLOW_THREADS
    release_ended(box);
    return (PyObject *)op;
}

static Early *early_for(Mailbox *box, Op *op, int *from)
{
    for (int i = 0; i < box->size; i++) {
        int index = (box->turn + i) % box->size;
        if (op->peer >= 0 && op->peer != index)
            continue;
        for (Early *early = box->peers[index].first_early; early != NULL; early = early->next)
            if (early->head.tag == op->head.tag && early->op == NULL) {
                *from = index;
                return early;
            }
    }
    return NULL;
}

static void take_early(Mailbox *box, Op *op, int from, Early *early)
{
    Peer *peer = &box->peers[from];
    int other = differs(op, from, &early->head);
    if (early->head.kind == WHOLE && !other) {
        early->op = op;
        if (peer->early != early)
            give_early(box, peer, early);
        return;
    }
    if (early->head.kind == OFFER && peer->corrupt)
        end(box, op, CORRUPT);
    else if (early->head.kind == OFFER)
        take_offer(peer, op, early->number, other);
    else
        end(box, op, MISMATCH);
    if (peer->early == early)
        peer->early = NULL; /* the rest of it goes nowhere */
    drop_early(peer, early);
}

/* Return a peer that has written nonsense, if a receive may wait for it; else -1. */
static int corrupt_peer(Mailbox *box, int peer)
{
    for (int i = 0; i < box->size; i++)
        if (box->peers[i].corrupt && (peer < 0 || peer == i))
            return i;
    return -1;
}

static PyObject *Mailbox_receive(Mailbox *box, PyObject *const *args, Py_ssize_t count)
{
    if (count != 6)
        return PyErr_Format(PyExc_TypeError, "receive takes 6 arguments");
    int peer = (int)PyLong_AsLong(args[0]);
    uint64_t tag = PyLong_AsUnsignedLongLongMask(args[1]);
    uint32_t call = (uint32_t)PyLong_AsUnsignedLongMask(args[2]);
    unsigned long long address = PyLong_AsUnsignedLongLong(args[3]);
    uint64_t nbytes = PyLong_AsUnsignedLongLong(args[4]);
    if (PyErr_Occurred())
        return NULL;
    Op *op = new_op(box, peer, tag, call, address, nbytes, args[5]);
    if (op == NULL)
        return NULL;
    Py_INCREF(op);
    Py_BEGIN_ALLOW_THREADS
    lock(box);
    box->pending++;
    int from = -1;
    Early *early = early_for(box, op, &from);
    if (early != NULL)
        take_early(box, op, from, early);
    else if ((from = corrupt_peer(box, peer)) >= 0) {
        op->source = from;
        end(box, op, CORRUPT);
    } else
        append(&box->receives, op);
    unlock(box);
    Py_END_ALLOW_THREADS
    release_ended(box);
    return (PyObject *)op;
}

static PyObject *Mailbox_wait(Mailbox *box, PyObject *const *args, Py_ssize_t count)
{
    if (count != 2 || Py_TYPE(args[0]) != Op_type)
        return PyErr_Format(PyExc_TypeError, "wait takes an Op and seconds");
    Op *op = (Op *)args[0];
    double seconds = PyFloat_AsDouble(args[1]);
    if (PyErr_Occurred())
        return NULL;
    if (atomic_load(&op->state) == PENDING && box->pid == getpid()) { /* a fork shares the rings */
        int64_t limit_ns = seconds < 1e9 ? (int64_t)(seconds * 1e9) : INT64_MAX / 4;
        Py_BEGIN_ALLOW_THREADS
        wait_for(box, op, limit_ns);
        Py_END_ALLOW_THREADS
    }
    release_ended(box);
    return PyLong_FromLong(atomic_load(&op->state));
}

static int holds(const Queue *queue, const Op *op)
{
    const Op *held = queue->first;
    while (held != NULL && held != op)
        held = held->next;
    return held != NULL;
}

/* Give an end up; False if a message is offered or half written, which must go on. What is half read goes nowhere. */
static int withdraw(Mailbox *box, Op *op)
{
    int found = take_out(&box->receives, op);
    for (int i = 0; !found && i < box->size; i++) {
        Peer *peer = &box->peers[i];
        if (holds(&peer->offered, op) || (op->begun && holds(&peer->sends, op)))
            return 0;
        if (holds(&peer->asking, op)) {
            op->refused = WITHDRAWN; /* it ends so when the sender can be told */
            return 1;
        }
        found = take_out(&peer->sends, op) || take_out(&peer->asked, op);
        if (peer->op == op)
            peer->op = NULL, found = 1;
        if (peer->early != NULL && peer->early->op == op) {
            drop_early(peer, peer->early);
            peer->early = NULL, found = 1;
        }
    }
    if (found)
        end(box, op, WITHDRAWN);
    return 1;
}

static PyObject *Mailbox_withdraw(Mailbox *box, PyObject *given)
{
    if (Py_TYPE(given) != Op_type)
        return PyErr_Format(PyExc_TypeError, "withdraw takes an Op");
    int gone;
    if (box->pid != getpid())
        Py_RETURN_TRUE;
    Py_BEGIN_ALLOW_THREADS
    lock(box);
    gone = atomic_load(&((Op *)given)->state) != PENDING || withdraw(box, (Op *)given);
    if (atomic_load(&box->sleepers))
        ring_threads(box->bells);
    unlock(box);
    Py_END_ALLOW_THREADS
    release_ended(box);
    return PyBool_FromLong(gone);
}

/* Give up what is sent to a peer. */
static PyObject *Mailbox_lose(Mailbox *box, PyObject *given)
{
    long index = PyLong_AsLong(given);
    if (index < 0 || index >= box->size)
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "there is no peer %ld", index);
    if (refuse_fork(box))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    lock(box);
    Peer *peer = &box->peers[index];
    end_all(box, &peer->sends, LOST);
    end_all(box, &peer->offered, LOST);
    if (atomic_load(&box->sleepers))
        ring_threads(box->bells);
    unlock(box);
    Py_END_ALLOW_THREADS
    release_ended(box);
    Py_RETURN_NONE;
}

static PyObject *Mailbox_sending(Mailbox *box, PyObject *unused)
{
    if (refuse_fork(box))
        return NULL;
    char *sends = PyMem_Calloc(box->size ? box->size : 1, 1);
    PyObject *found = sends != NULL ? PyList_New(0) : PyErr_NoMemory();
    if (found != NULL) {
        Py_BEGIN_ALLOW_THREADS
        lock(box);
        for (int i = 0; i < box->size; i++)
            sends[i] = box->peers[i].sends.first != NULL || box->peers[i].offered.first != NULL;
        unlock(box);
        Py_END_ALLOW_THREADS
    }
    for (int i = 0; found != NULL && i < box->size; i++)
        if (sends[i]) {
            PyObject *index = PyLong_FromLong(i);
            if (index == NULL || PyList_Append(found, index) < 0)
                Py_CLEAR(found);
            Py_XDECREF(index);
        }
    PyMem_Free(sends);
    return found;
}

/* Wake the spare thread, and wait until it has ended. */
static void join_spare(Mailbox *box)
{
    struct timespec until;
    do {
        atomic_fetch_add(&box->bells->spare_bell, 1);
        futex(&box->bells->spare_bell, FUTEX_WAKE, 1, NULL);
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += CLOSE_AGAIN_NS;
        until.tv_sec += until.tv_nsec / 1000000000, until.tv_nsec %= 1000000000;
    } while (pthread_timedjoin_np(box->spare, NULL, &until) != 0);
}

static PyObject *Mailbox_close(Mailbox *box, PyObject *unused)
{
    atomic_store(&box->closing, 1);
    if (box->spare_runs && box->pid == getpid()) {
        box->spare_runs = 0;
        Py_BEGIN_ALLOW_THREADS
        join_spare(box);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

static void release_queue(Queue *queue)
{
    for (Op *op = queue->first, *next; op != NULL; op = next) {
        next = op->next;
        Py_DECREF(op);
    }
}

static void Mailbox_dealloc(Mailbox *box)
{
    PyTypeObject *type = Py_TYPE(box);
    if (box->pid == getpid()) {
        Py_XDECREF(Mailbox_close(box, NULL));
        release_ended(box);
        release_queue(&box->receives);
        for (int i = 0; i < box->size; i++) {
            Peer *peer = &box->peers[i];
            release_queue(&peer->sends);
            release_queue(&peer->offered);
            release_queue(&peer->asking);
            release_queue(&peer->asked);
            Py_XDECREF(peer->op);
            while (peer->first_early != NULL) {
                Py_XDECREF(peer->first_early->op);
                drop_early(peer, peer->first_early);
            }
        }
        for (int i = 0; i < box->held; i++)
            PyBuffer_Release(&box->buffers[i]);
        PyMem_Free(box->buffers);
        PyMem_Free(box->peers);
        pthread_mutex_destroy(&box->lock);
        pthread_mutex_destroy(&box->next);
    }
    type->tp_free(box);
    Py_DECREF(type);
}

static char *taken(Mailbox *box, PyObject *memory, Py_ssize_t least)
{
    Py_buffer *buffer = &box->buffers[box->held];
    if (PyObject_GetBuffer(memory, buffer, PyBUF_WRITABLE) < 0)
        return NULL;
    box->held++;
    if (buffer->len < least || (uintptr_t)buffer->buf % LINE) {
        PyErr_SetString(PyExc_ValueError, "the memory of a mailbox is too small, or lies at an odd place");
        return NULL;
    }
    return buffer->buf;
}

static int take_ring(Mailbox *box, PyObject *memory, Ring *ring)
{
    char *start = taken(box, memory, COUNTS_BYTES + 4 * LINE);
    if (start == NULL)
        return -1;
    ring->counts = (Counts *)start;
    ring->bytes = start + COUNTS_BYTES;
    ring->room = (uint64_t)(box->buffers[box->held - 1].len - COUNTS_BYTES) & ~(uint64_t)(LINE - 1);
    return 0;
}

static PyObject *Mailbox_new(PyTypeObject *type, PyObject *args, PyObject *names)
{
    PyObject *own, *peers;
    double look_s;
    if (!PyArg_ParseTuple(args, "OO!d", &own, &PyList_Type, &peers, &look_s))
        return NULL;
    Mailbox *box = (Mailbox *)type->tp_alloc(type, 0);
    if (box == NULL)
        return NULL;
    box->pid = getpid();
    pthread_mutex_init(&box->lock, NULL);
    pthread_mutex_init(&box->next, NULL);
    box->look_ns = (int64_t)(look_s * 1e9);
    int size = (int)PyList_GET_SIZE(peers);
    box->peers = PyMem_Calloc(size ? size : 1, sizeof(Peer));
    box->buffers = PyMem_Calloc(3 * size + 1, sizeof(Py_buffer));
    if (box->peers == NULL || box->buffers == NULL) {
        Py_DECREF(box);
        return PyErr_NoMemory();
    }
    box->size = size;
    box->bells = (Bells *)taken(box, own, sizeof(Bells));
    for (int i = 0; box->bells != NULL && i < size; i++) {
        PyObject *out, *in, *theirs, *each = PyList_GET_ITEM(peers, i);
        Peer *peer = &box->peers[i];
        if (each == Py_None)
            continue;
        if (!PyArg_ParseTuple(each, "OOO", &out, &in, &theirs) || take_ring(box, out, &peer->out) < 0 ||
            take_ring(box, in, &peer->in) < 0 || (peer->bells = (Bells *)taken(box, theirs, sizeof(Bells))) == NULL)
            break;
    }
    if (PyErr_Occurred()) {
        Py_DECREF(box);
        return NULL;
    }
    return (PyObject *)box;
}

static PyMethodDef Mailbox_methods[] = {
    {"send", (PyCFunction)(void (*)(void))Mailbox_send, METH_FASTCALL, "send(peer, tag, call, site, address, nbytes, keeps)"},
    {"receive", (PyCFunction)(void (*)(void))Mailbox_receive, METH_FASTCALL,
     "receive(peer, tag, call, address, nbytes, keeps)"},
    {"wait", (PyCFunction)(void (*)(void))Mailbox_wait, METH_FASTCALL, "wait(op, seconds)"},
    {"withdraw", (PyCFunction)Mailbox_withdraw, METH_O, "withdraw(op)"},
    {"lose", (PyCFunction)Mailbox_lose, METH_O, "lose(peer)"},
    {"sending", (PyCFunction)Mailbox_sending, METH_NOARGS, "sending()"},
    {"close", (PyCFunction)Mailbox_close, METH_NOARGS, "close()"},
    {NULL}};

static PyType_Slot Mailbox_slots[] = {
    {Py_tp_new, Mailbox_new}, {Py_tp_dealloc, Mailbox_dealloc}, {Py_tp_methods, Mailbox_methods}, {0}};
static PyType_Spec Mailbox_spec = {"transports.shared_memory._mailbox.Mailbox", sizeof(Mailbox), 0, Py_TPFLAGS_DEFAULT,
                                   Mailbox_slots};

static int execute(PyObject *module)
{
    Op_type = (PyTypeObject *)PyType_FromSpec(&Op_spec);
    PyObject *mailbox = PyType_FromSpec(&Mailbox_spec);
    if (Op_type == NULL || mailbox == NULL || PyModule_AddObjectRef(module, "Op", (PyObject *)Op_type) < 0 ||
        PyModule_AddObjectRef(module, "Mailbox", mailbox) < 0)
        return -1;
    Py_DECREF(mailbox);
    return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, execute}, {0}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_mailbox", NULL, 0, NULL, slots};

PyMODINIT_FUNC PyInit__mailbox(void)
{
    return PyModuleDef_Init(&definition);
}
