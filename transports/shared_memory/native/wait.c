/* The lock of the engine, the one wait of all threads, and the thread that works while none waits.

   A thread that waits moves the bytes of all that is under way in its process. While none waits, the spare thread does
   so, which holds no lock of Python's. A process that sleeps is woken through a word of its own memory. */

#include "engine.h"

int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static long futex(_Atomic uint32_t *word, int what, uint32_t value, const struct timespec *limit)
{
    return syscall(SYS_futex, word, what, value, limit, NULL, 0);
}

static void ring_spare(Bells *bells)
{
    atomic_fetch_add(&bells->spare_bell, 1);
    futex(&bells->spare_bell, FUTEX_WAKE, 1, NULL);
}

void ring_threads(Bells *bells)
{
    atomic_fetch_add(&bells->bell, 1);
    futex(&bells->bell, FUTEX_WAKE, INT32_MAX, NULL);
}

/* Wake a process for which there is something new. What is new is written before, and sleepers look after they have
   said that they sleep, so one of the two sees the other: all of these words are sequentially consistent atomics, which
   no processor lets pass each other. */
void ring(Bells *bells, int door)
{
    if (atomic_load(&bells->sleepers)) {
        ring_threads(bells);
        return;
    }
    uint32_t by = atomic_load(&bells->unattended);
    if (by == BY_LOOP && door >= 0)
        open_door(door);
    else if (by != ATTENDED)
        ring_spare(bells);
}

/* Wake a process though it may wait for nothing. */
void ring_anyhow(Bells *bells, int door)
{
    if (atomic_load(&bells->sleepers))
        ring_threads(bells);
    else if (door >= 0)
        open_door(door);
    else
        ring_spare(bells);
}

/* Wake an event loop. */
void open_door(int door)
{
    uint64_t one = 1;
    ssize_t written = write(door, &one, sizeof one); /* full: it is readable already */
    (void)written;
}

/* Lock the engine. A thread that has it for long lets the next one in between two pieces. */
void lock(Engine *engine)
{
    pthread_mutex_lock(&engine->next);
    atomic_store(&engine->wanted, 1);
    pthread_mutex_lock(&engine->lock);
    atomic_store(&engine->wanted, 0);
    pthread_mutex_unlock(&engine->next);
}

static int try_lock(Engine *engine)
{
    if (pthread_mutex_trylock(&engine->next) != 0)
        return 0;
    int locked = pthread_mutex_trylock(&engine->lock) == 0;
    pthread_mutex_unlock(&engine->next);
    return locked;
}

/* `asleep`: number of sleepers that are the caller. */
static int progress(Engine *engine, uint32_t asleep)
{
    long pending = engine->pending;
    int moved = progress_messages(engine);
    moved |= progress_runs(engine);
    if (engine->pending != pending && atomic_load(&engine->sleepers) > asleep) /* another thread may have waited for it */
        ring_threads(engine->bells);
    return moved;
}

/* Return the thread to wake on an arrival. Small work is for the loop, which must be notified anyway. */
static uint32_t attendant(const Engine *engine)
{
    if (engine->waiting || engine->awake || engine->promised ||
        (engine->pending == 0 && engine->coming == 0 && !engine->probing))
        return ATTENDED;
    int loops = engine->owned > 0 || engine->probing;
    int spare = !loops || engine->heavy || engine->rowless || engine->coming || engine->door < 0;
    return spare ? BY_SPARE : BY_LOOP;
}

/* Look, and note whether something stays under way that nobody attends to: who rings a process in vain makes a system
   call, and wakes its spare thread. Return whether anything moved. */
int attend(Engine *engine)
{
    int moved = progress(engine, 0);
    for (uint32_t by; by = attendant(engine), engine->unattended != by;) {
        engine->unattended = by;
        atomic_store(&engine->bells->unattended, by);
        moved |= progress(engine, 0); /* a ring may have arrived before */
    }
    return moved;
}

/* Unlock the engine after a call, once all that can move has moved, or another thread is about to move it. */
void unlock(Engine *engine)
{
    attend(engine);
    if (work_waits(engine) || engine->rowless)
        ring(engine->bells, engine->door);
    pthread_mutex_unlock(&engine->lock);
}

/* The thread reads its bell before it looks at anything, also at `closing`. Whoever has something for it writes that
   first, then changes the bell, then wakes it. So if the thread has read the bell before the change, its sleep ends at
   once or is ended; if after, it sees what was written before. With `closing` read first, the bell could change between
   the two, and the thread would sleep on the new one for ever. */
static void *run_spare(void *given)
{
    Engine *engine = given;
    const struct timespec soon = {0, ROW_LOOK_NS}, again = {0, LOOK_AGAIN_NS};
    int rung = 1;
    for (;;) {
        uint32_t bell = atomic_load(&engine->bells->spare_bell);
        if (atomic_load(&engine->closing))
            return NULL;
        lock(engine);
        if (!rung) { /* perhaps in vain for a wrong word: write them again, then look */
            atomic_store(&engine->bells->sleepers, atomic_load(&engine->sleepers));
            engine->unattended = UNKNOWN;
        }
        int moved = attend(engine), rowless = engine->rowless > 0;
        if (work_waits(engine))
            work(engine), moved = 1;
        pthread_mutex_unlock(&engine->lock);
        rung = moved || futex(&engine->bells->spare_bell, FUTEX_WAIT, bell, rowless ? &soon : &again) == 0;
    }
}

int start_spare(Engine *engine)
{
    if (engine->spare_runs || atomic_load(&engine->closing))
        return 0;
    sigset_t all, before; /* signals are for the threads of the program */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&engine->spare, NULL, run_spare, engine);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) {
        PyErr_SetString(PyExc_RuntimeError, "no thread can be started that moves what nobody waits for");
        return -1;
    }
    engine->spare_runs = 1;
    return 0;
}

/* Wake the spare thread, and wait until it has ended. */
void join_spare(Engine *engine)
{
    struct timespec until;
    do {
        ring_spare(engine->bells);
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += CLOSE_AGAIN_NS;
        until.tv_sec += until.tv_nsec / 1000000000, until.tv_nsec %= 1000000000;
    } while (pthread_timedjoin_np(engine->spare, NULL, &until) != 0);
}

/* Sleep until this process is rung, or for a while, unless a packet has arrived; return whether a signal arrived. The
   shared number of sleepers is a copy of ours: whatever a peer has written over it lasts until the next sleep. */
static int sleep_here(Engine *engine, End *end, int64_t limit_ns)
{
    int interrupted = 0;
    lock(engine);
    atomic_store(&engine->bells->sleepers, atomic_fetch_add(&engine->sleepers, 1) + 1);
    uint32_t bell = atomic_load(&engine->bells->bell);
    int moved = progress(engine, 1);
    if (work_waits(engine))
        work(engine), moved = 1;
    int64_t longest_ns = engine->rowless ? ROW_LOOK_NS : LOOK_AGAIN_NS;
    limit_ns = limit_ns > longest_ns ? longest_ns : limit_ns;
    pthread_mutex_unlock(&engine->lock);
    if (!moved && atomic_load(&end->state) == PENDING && limit_ns > 0) {
        struct timespec limit = {limit_ns / 1000000000, limit_ns % 1000000000};
        interrupted = futex(&engine->bells->bell, FUTEX_WAIT, bell, &limit) < 0 && errno == EINTR;
    }
    lock(engine);
    atomic_store(&engine->bells->sleepers, atomic_fetch_sub(&engine->sleepers, 1) - 1);
    pthread_mutex_unlock(&engine->lock);
    return interrupted;
}

/* Look for what comes, without sleeping. Where the peer needs this core, or comes late, that is in vain: it is let on
   only once this thread sleeps. So after vain looks, threads sleep at once the next few times, twice as often each time. */
static void look(Engine *engine, End *end, int64_t limit, int64_t look_ns)
{
    int skipped = atomic_load_explicit(&engine->skipped, memory_order_relaxed);
    if (skipped > 0) {
        atomic_store_explicit(&engine->skipped, skipped - 1, memory_order_relaxed);
        return;
    }
    int64_t now = now_ns(), until = now + look_ns;
    int useful = 0;
    while (atomic_load(&end->state) == PENDING && now < until && now < limit) {
        if (try_lock(engine)) {
            int moved = progress(engine, 0);
            if (work_waits(engine))
                work(engine), moved = 1;
            pthread_mutex_unlock(&engine->lock);
            if (moved)
                now = now_ns(), until = now + look_ns, useful = 1;
        }
        int64_t before = now;
        if (engine->yields)
            sched_yield();
#if defined(__x86_64__)
        else
            __builtin_ia32_pause();
#endif
        now = now_ns();
        if (now - before > LONG_TURN_NS) { /* others need the core for long */
            useful = 0;
            break;
        }
    }
    int vain = 0;
    if (!useful && atomic_load(&end->state) == PENDING) {
        vain = 2 * atomic_load_explicit(&engine->vain, memory_order_relaxed) + 1;
        vain = vain > MOST_SKIPPED ? MOST_SKIPPED : vain;
        atomic_store_explicit(&engine->skipped, vain, memory_order_relaxed);
    }
    atomic_store_explicit(&engine->vain, vain, memory_order_relaxed);
}

void wait_for(Engine *engine, End *end, int64_t limit_ns, int64_t look_ns)
{
    int64_t until = now_ns() + limit_ns;
    atomic_fetch_add(&end->waited, 1);
    lock(engine);
    engine->waiting++;
    engine->promised = 0;
    attend(engine);
    pthread_mutex_unlock(&engine->lock);
    while (atomic_load(&end->state) == PENDING) {
        look(engine, end, until, look_ns);
        int64_t left = until - now_ns();
        if (atomic_load(&end->state) != PENDING || left <= 0 || sleep_here(engine, end, left))
            break;
    }
    lock(engine);
    engine->waiting--;
    unlock(engine);
    atomic_fetch_sub(&end->waited, 1);
}
