/* Each atomic load is followed by a pause at random, so that a race which is open for nanoseconds shows in minutes: for
   `cc -include`. */

#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

static inline void pause_at_random(void)
{
    static _Thread_local unsigned seed;
    if (seed == 0)
        seed = (unsigned)(size_t)&seed ^ (unsigned)getpid();
    if (rand_r(&seed) % 4 == 0)
        usleep((useconds_t)(rand_r(&seed) % 200));
}

#undef atomic_load
#define atomic_load(object)                                                                                             \
    ({                                                                                                                 \
        __auto_type loaded = atomic_load_explicit(object, memory_order_seq_cst);                                       \
        pause_at_random();                                                                                             \
        loaded;                                                                                                        \
    })
