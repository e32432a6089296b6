/* Mailboxes: messages between processes of one host, copied through rings of shared memory by the threads that call.

   There is a ring for each ordered pair of processes, and a message is a head and its bytes. Whoever waits moves the
   bytes of all messages of its process; while nobody waits, a thread of the process does so, which holds no lock of
   Python's. A process that sleeps is woken through a word of its own memory. mailbox.py says what callers rely on. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define LINE 64
#define COUNTS_BYTES 256
#define PIECE_BYTES (128 << 10) /* both sides of a long message copy at the same time, a piece each */
#define SITE_BYTES 40
#define ROUND_UP(n) (((n) + LINE - 1) & ~(uint64_t)(LINE - 1))

/* -- memory that processes share ----------------------------------------------------------------------------------- */

typedef struct { /* how much has been written and read, ever; each count has one writer */
    _Alignas(LINE) _Atomic uint64_t written;
    _Alignas(LINE) _Atomic uint64_t read;
    _Alignas(LINE) _Atomic uint32_t full; /* the writer waits for room */
} Counts;

typedef struct { /* in each process's own memory */
    _Atomic uint32_t bell;       /* changes when threads that wait are woken */
    _Atomic uint32_t sleepers;   /* threads that wait and sleep, or are about to */
    _Atomic uint32_t spare_bell; /* changes when the thread for messages that nobody waits for is woken */
    _Atomic uint32_t unattended; /* whether there are such messages */
} Bells;

typedef struct {
    uint64_t tag, nbytes, call;
    char site[SITE_BYTES]; /* where the sender was called */
} Head;

_Static_assert(sizeof(Head) == LINE, "a head fills a line");
_Static_assert(sizeof(Counts) <= COUNTS_BYTES, "the counts lie before the bytes");

typedef struct {
    Counts *counts;
    char *bytes;
    uint64_t room;
} Ring;

/* -- memory of this process ---------------------------------------------------------------------------------------- */

enum { PENDING, DONE, MISMATCH, LOST, WITHDRAWN, NO_MEMORY };

typedef struct Op { /* one end of a message */
    PyObject_HEAD
    struct Op *next, *next_ended;
    PyObject *keeps; /* owns the bytes */
    char *bytes;
    int peer;   /* -1: any */
    int source; /* whom a message came from */
    Head head;  /* of a receive that did not match: the sender's */
    uint64_t moved;
    _Atomic int state;
} Op;

typedef struct {
    Op *first, *last;
} Queue;

typedef struct Early { /* a message that came before its receive, and stood in the way of others */
    struct Early *next;
    Op *op; /* has asked for it meanwhile */
    Head head;
    uint64_t moved;
    char bytes[];
} Early;

typedef struct {
    Ring out, in;
    Bells *bells;
    Queue sends;
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
    int64_t look_ns;
    pthread_mutex_t lock;
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

static void append(Queue *queue, Op *op)
{
    if (queue->last == NULL)
        queue->first = op;
    else
        queue->last->next = op;
    queue->last = op;
}

/* Return whether it was there. */
static int take_out(Queue *queue, Op *op)
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

/* Write as much as there is room for; return whether anything was. */
static int push(Mailbox *box, Peer *peer)
{
    Ring *out = &peer->out;
    uint64_t written = atomic_load_explicit(&out->counts->written, memory_order_relaxed), begun = written;
    Op *op;
    while ((op = peer->sends.first) != NULL) {
        uint64_t free = out->room - (written - atomic_load(&out->counts->read));
        if (free < 2 * LINE) {
            atomic_store(&out->counts->full, 1);
            free = out->room - (written - atomic_load(&out->counts->read));
            if (free < 2 * LINE)
                break;
        }
        if (op->moved == 0 && !op->source) { /* its head */
            memcpy(out->bytes + written % out->room, &op->head, LINE);
            written += LINE, free -= LINE, op->source = 1;
        }
        uint64_t left = op->head.nbytes - op->moved, n = left < free ? left : free & ~(uint64_t)(LINE - 1);
        n = n < PIECE_BYTES ? n : PIECE_BYTES;
        copy_in(out, written, op->bytes + op->moved, n);
        op->moved += n;
        written += ROUND_UP(n);
        if (op->moved == op->head.nbytes) {
            take_out(&peer->sends, op);
            end(box, op, DONE);
        }
        atomic_store(&out->counts->written, written);
        if (n == PIECE_BYTES)
            ring(peer->bells);
    }
    if (written == begun)
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

static int differs(Mailbox *box, Op *op, int index, const Head *head)
{
    op->source = index;
    if (op->head.call == head->call && op->head.nbytes == head->nbytes)
        return 0;
    op->head = *head;
    end(box, op, MISMATCH);
    return 1;
}

static void keep_early(Mailbox *box, Peer *peer, const Head *head)
{
    Early *early = head->nbytes < PTRDIFF_MAX - sizeof(Early) ? malloc(sizeof(Early) + head->nbytes) : NULL;
    if (early == NULL) { /* its receive will find nothing; those that wait hear of it */
        for (Op *op; (op = box->receives.first) != NULL; end(box, op, NO_MEMORY))
            take_out(&box->receives, op);
        return;
    }
    early->next = NULL, early->op = NULL, early->head = *head, early->moved = 0;
    if (peer->last_early == NULL)
        peer->first_early = early;
    else
        peer->last_early->next = early;
    peer->last_early = early;
    peer->early = early;
}

static void drop_early(Peer *peer, Early *early)
{
    Early *before = NULL;
    for (Early *each = peer->first_early; each != early; each = each->next)
        before = each;
    if (before == NULL)
        peer->first_early = early->next;
    else
        before->next = early->next;
    if (peer->last_early == early)
        peer->last_early = before;
    free(early);
}

static void give_early(Mailbox *box, Peer *peer, Early *early)
{
    memcpy(early->op->bytes, early->bytes, early->head.nbytes);
    end(box, early->op, DONE);
    drop_early(peer, early);
}

static void came(Mailbox *box, Peer *peer)
{
    peer->coming = 0, box->coming--;
    if (peer->op != NULL)
        end(box, peer->op, DONE);
    else if (peer->early != NULL && peer->early->op != NULL)
        give_early(box, peer, peer->early);
    peer->op = NULL, peer->early = NULL;
}

/* Read what has come, as far as anybody wants it; return whether anything was. */
static int pull(Mailbox *box, int index)
{
    Peer *peer = &box->peers[index];
    Ring *in = &peer->in;
    uint64_t read = atomic_load_explicit(&in->counts->read, memory_order_relaxed), begun = read;
    for (;;) {
        uint64_t there = atomic_load(&in->counts->written) - read;
        if (there == 0 || there > in->room)
            break;
        if (!peer->coming) {
            int waits;
            memcpy(&peer->head, in->bytes + read % in->room, LINE);
            Op *op = matching(box, index, &peer->head, &waits);
            if (op == NULL && !waits)
                break;
            peer->coming = 1, box->coming++, peer->moved = 0;
            if (op == NULL)
                keep_early(box, peer, &peer->head);
            else if (!differs(box, op, index, &peer->head))
                peer->op = op;
            read += LINE, there -= LINE;
        }
        uint64_t left = peer->head.nbytes - peer->moved, n = left < there ? left : there;
        n = n < PIECE_BYTES ? n : PIECE_BYTES;
        if (peer->op != NULL)
            copy_out(in, read, peer->op->bytes + peer->moved, n);
        else if (peer->early != NULL)
            copy_out(in, read, peer->early->bytes + peer->moved, n);
        peer->moved += n;
        read += ROUND_UP(n);
        atomic_store(&in->counts->read, read);
        if (peer->moved == peer->head.nbytes)
            came(box, peer);
        if (atomic_load(&in->counts->full)) {
            atomic_store(&in->counts->full, 0);
            ring(peer->bells);
        }
    }
    return read != begun;
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
        if (peer->bells == NULL)
            continue;
        if (peer->sends.first != NULL)
            moved |= push(box, peer);
        if (box->receives.first != NULL || peer->coming)
            moved |= pull(box, index);
    }
    if (box->pending != pending && atomic_load(&box->bells->sleepers) > asleep) /* another thread may have waited for it */
        ring_threads(box->bells);
    return moved;
}

/* Look, and note whether something stays under way that nobody attends to: who rings a process in vain makes a system
   call, and wakes its spare thread. Return whether anything moved. */
static int attend(Mailbox *box)
{
    _Atomic uint32_t *unattended = &box->bells->unattended;
    int moved = progress(box, 0);
    uint32_t stays;
    while (stays = (box->pending > 0 || box->coming > 0) && box->waiting == 0, atomic_load(unattended) != stays) {
        atomic_store(unattended, stays);
        moved |= progress(box, 0); /* a ring may have come before */
    }
    return moved;
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
        pthread_mutex_lock(&box->lock);
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
    atomic_fetch_add(&box->bells->sleepers, 1);
    uint32_t bell = atomic_load(&box->bells->bell);
    pthread_mutex_lock(&box->lock);
    int moved = progress(box, 1);
    pthread_mutex_unlock(&box->lock);
    if (!moved && atomic_load(&op->state) == PENDING && limit_ns > 0) {
        struct timespec limit = {limit_ns / 1000000000, limit_ns % 1000000000};
        interrupted = futex(&box->bells->bell, FUTEX_WAIT, bell, &limit) < 0 && errno == EINTR;
    }
    atomic_fetch_sub(&box->bells->sleepers, 1);
    return interrupted;
}

static void look(Mailbox *box, Op *op, int64_t limit)
{
    int64_t now = now_ns(), until = now + box->look_ns;
    for (; atomic_load(&op->state) == PENDING && now < until && now < limit; now = now_ns())
        if (pthread_mutex_trylock(&box->lock) == 0) {
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
    pthread_mutex_lock(&box->lock);
    box->waiting++;
    attend(box);
    pthread_mutex_unlock(&box->lock);
    while (atomic_load(&op->state) == PENDING) {
        look(box, op, until);
        int64_t left = until - now_ns();
        if (atomic_load(&op->state) != PENDING || left <= 0 || sleep_here(box, op, left))
            break;
    }
    pthread_mutex_lock(&box->lock);
    box->waiting--;
    attend(box);
    pthread_mutex_unlock(&box->lock);
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
    return Py_BuildValue("KK", (unsigned long long)op->head.call, (unsigned long long)op->head.nbytes);
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
    if (pthread_create(&box->spare, NULL, run_spare, box) != 0) {
        PyErr_SetString(PyExc_RuntimeError, "no thread can be started for messages that nobody waits for");
        return -1;
    }
    box->spare_runs = 1;
    return 0;
}

static Op *new_op(Mailbox *box, int peer, uint64_t tag, uint64_t call, unsigned long long address, uint64_t nbytes,
                  PyObject *keeps)
{
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
    op->peer = peer, op->source = 0, op->moved = 0;
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
    uint64_t tag = PyLong_AsUnsignedLongLongMask(args[1]), call = PyLong_AsUnsignedLongLongMask(args[2]);
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
    pthread_mutex_lock(&box->lock);
    Peer *to = &box->peers[peer];
    append(&to->sends, op);
    box->pending++;
    if (to->sends.first == op)
        push(box, to);
    attend(box);
    pthread_mutex_unlock(&box->lock);
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

static PyObject *Mailbox_receive(Mailbox *box, PyObject *const *args, Py_ssize_t count)
{
    if (count != 6)
        return PyErr_Format(PyExc_TypeError, "receive takes 6 arguments");
    int peer = (int)PyLong_AsLong(args[0]);
    uint64_t tag = PyLong_AsUnsignedLongLongMask(args[1]), call = PyLong_AsUnsignedLongLongMask(args[2]);
    unsigned long long address = PyLong_AsUnsignedLongLong(args[3]);
    uint64_t nbytes = PyLong_AsUnsignedLongLong(args[4]);
    if (PyErr_Occurred())
        return NULL;
    Op *op = new_op(box, peer, tag, call, address, nbytes, args[5]);
    if (op == NULL)
        return NULL;
    Py_INCREF(op);
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&box->lock);
    box->pending++;
    int from = -1;
    Early *early = early_for(box, op, &from);
    if (early == NULL)
        append(&box->receives, op);
    else if (differs(box, op, from, &early->head)) {
        if (box->peers[from].early == early)
            box->peers[from].early = NULL; /* the rest of it goes nowhere */
        drop_early(&box->peers[from], early);
    } else {
        early->op = op;
        if (box->peers[from].early != early)
            give_early(box, &box->peers[from], early);
    }
    attend(box);
    pthread_mutex_unlock(&box->lock);
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

/* Give an end up; False if a message is half written, which must go on. What is half read goes nowhere. */
static int withdraw(Mailbox *box, Op *op)
{
    int found = take_out(&box->receives, op);
    for (int i = 0; !found && i < box->size; i++) {
        Peer *peer = &box->peers[i];
        if (peer->sends.first == op && op->source)
            return 0;
        found = take_out(&peer->sends, op);
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
    pthread_mutex_lock(&box->lock);
    gone = atomic_load(&((Op *)given)->state) != PENDING || withdraw(box, (Op *)given);
    attend(box);
    if (atomic_load(&box->bells->sleepers))
        ring_threads(box->bells);
    pthread_mutex_unlock(&box->lock);
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
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&box->lock);
    Peer *peer = &box->peers[index];
    for (Op *op; (op = peer->sends.first) != NULL; end(box, op, LOST))
        take_out(&peer->sends, op);
    if (atomic_load(&box->bells->sleepers))
        ring_threads(box->bells);
    pthread_mutex_unlock(&box->lock);
    Py_END_ALLOW_THREADS
    release_ended(box);
    Py_RETURN_NONE;
}

static PyObject *Mailbox_sending(Mailbox *box, PyObject *unused)
{
    PyObject *found = PyList_New(0);
    pthread_mutex_lock(&box->lock);
    for (int i = 0; found != NULL && i < box->size; i++)
        if (box->peers[i].sends.first != NULL) {
            PyObject *index = PyLong_FromLong(i);
            if (index == NULL || PyList_Append(found, index) < 0)
                Py_CLEAR(found);
            Py_XDECREF(index);
        }
    pthread_mutex_unlock(&box->lock);
    return found;
}

static PyObject *Mailbox_close(Mailbox *box, PyObject *unused)
{
    atomic_store(&box->closing, 1);
    if (box->spare_runs && box->pid == getpid()) {
        box->spare_runs = 0;
        Py_BEGIN_ALLOW_THREADS
        atomic_fetch_add(&box->bells->spare_bell, 1);
        futex(&box->bells->spare_bell, FUTEX_WAKE, 1, NULL);
        pthread_join(box->spare, NULL);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

static void Mailbox_dealloc(Mailbox *box)
{
    PyTypeObject *type = Py_TYPE(box);
    if (box->pid == getpid()) {
        Py_XDECREF(Mailbox_close(box, NULL));
        release_ended(box);
        for (Op *op = box->receives.first, *next; op != NULL; op = next) {
            next = op->next;
            Py_DECREF(op);
        }
        for (int i = 0; i < box->size; i++) {
            Peer *peer = &box->peers[i];
            for (Op *op = peer->sends.first, *next; op != NULL; op = next) {
                next = op->next;
                Py_DECREF(op);
            }
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
