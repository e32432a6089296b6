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

void ring_spare(Bells *bells)
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

/* Learn from a spin. `useful_ns`: how long after its begin, or after the last arrival, something arrived; 0: nothing. */
static void learn(Engine *engine, int64_t now, int64_t spent_ns, int64_t useful_ns, int crowded)
{
    int64_t rest_ns = engine->rest_ns;
    if (useful_ns && !crowded) {
        int64_t before = engine->spin_ns * 7 / 8, longest = 2 * useful_ns + SPIN_SLACK_NS;
        engine->spin_ns = longest > before ? longest : before;
        engine->rest_ns = 0;
        return;
    }
    engine->spin_ns = 0;
    if (!crowded && rest_ns == 0) { /* the peer may be late once */
        engine->rest_ns = 1;
        return;
    }
    rest_ns = 2 * rest_ns > REST_TIMES * spent_ns ? 2 * rest_ns : REST_TIMES * spent_ns;
    rest_ns = rest_ns > MOST_REST_NS ? MOST_REST_NS : rest_ns;
    engine->rest_ns = rest_ns, engine->rested_ns = now + rest_ns;
}

/* Look for what comes, without sleeping, for at most twice as long as that has taken lately. Where the peer needs this
   core, or comes late, that is in vain: it is let on only once this thread sleeps. So after spins in vain, and after a
   turn in which others had the core, threads sleep at once for a while. It is a time, not a number of waits: on a busy
   machine it passes in one sleep, and ranks that are let on together then find each other awake. */
static void look(Engine *engine, End *end, int64_t limit, int64_t look_ns)
{
    int64_t begun = now_ns(), now = begun, since = begun, useful_ns = 0;
    int64_t spin_ns = engine->spin_ns && engine->spin_ns < look_ns ? engine->spin_ns : look_ns;
    int crowded = 0;
    if (spin_ns <= 0 || begun < engine->rested_ns)
        return;
    while (atomic_load(&end->state) == PENDING && now < since + spin_ns && now < limit && !crowded) {
        int moved = 0;
        if (try_lock(engine)) {
            moved = progress(engine, 0);
            if (work_waits(engine))
                work(engine), moved = 1;
            pthread_mutex_unlock(&engine->lock);
        }
        int64_t before = now_ns();
        if (moved) {
            useful_ns = before - since > useful_ns ? before - since : useful_ns;
            since = before;
        }
        if (engine->yields)
            sched_yield();
#if defined(__x86_64__)
        else
            __builtin_ia32_pause();
#endif
        now = now_ns();
        crowded = now - before > LONG_TURN_NS; /* others need the core for long */
    }
    learn(engine, now, now - since, useful_ns, crowded);
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
