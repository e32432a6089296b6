/* Collectives between processes of one host, out of each other's memory.

   The ranks of a group meet at a board: each has rows there, in memory that all map, one for each operation under way.
   A rank writes the address of its input and its phase into its row, and reads the inputs of the ranks that it needs
   once these have arrived. The sources of each rank are a table that Python has made, the same for all executors.

   Small inputs lie on the board itself, middling ones are copied into memory that all map, large ones are read in
   place. Inputs that are read in place may change only after all ranks have read them, so their owner waits. A row is
   used again after `ROWS` operations, once all ranks have finished with its contents.

   Beside each row lies the signature of its operation. A rank that waits for others, and sees the row of one with the
   same number but another call, ends in a mismatch; Python reads that signature then.

   Memory order: the word of a row is written last and read first, as a sequentially consistent atomic, so a reader of a
   phase sees all earlier writes. A rank looks for sleepers after it posts, and sleepers look at the rows after they have
   marked themselves as asleep (see `ring`). */

#include "engine.h"
#include <limits.h>
#include <string.h>
#include <sys/uio.h>

#define ROWS 64              /* as `OPERATIONS` in transports/base.py */
#define PAYLOAD_BYTES 4096   /* as there */
#define NEAR_BYTES 32        /* payload that fits into a row */
#define BOARD_BYTES (ROWS * (LINE + PAYLOAD_BYTES + sizeof(Label)))
#define COPIED_BYTES (1 << 20) /* inputs up to here are copied into mapped memory rather than read where they are */
#define TAKEN_BYTES (512 << 10) /* what a thread does at once: two pieces and what is read stay in a cache of 2 MiB */
#define INLINE_BYTES (48 << 10) /* longest work that the finding thread does itself: to wake a thread takes longer */
#define LONG_BYTES (2 << 20) /* left of work for which a thread that works wakes another */
#define PRIVATE_BIT ((uint64_t)1 << 63)

/* The phase of a rank, in the last byte of its word: its input can be read; its slice is reduced; it reads no input
   any more. LAST: it is done. */
enum { ARRIVED = 1, SLICED = 2, TAKEN = 3, LAST = 255 };

/* Where an input lies: nowhere, on the board, in mapped memory, in private memory, in mapped memory of its owner's. */
enum { NOWHERE, ON_BOARD, MAPPED, PRIVATE, NO_HOME, COMMON };

/* Flags of a table. SLICES: inputs that are read in place are reduced in slices; ALWAYS_SLICES: copied ones, too.
   FROM_ONE: only one rank gives an input, and a receiving rank needs no other. LOOKS: its run posts nothing; with a tag
   of no call it ends in a mismatch once the rank that it needs has posted. */
enum { GIVES = 1, RINGS = 2, SLICES = 4, SHARED = 8, FROM_ONE = 16, NEEDS_ALL = 32, LOOKS = 64, ALWAYS_SLICES = 128 };

typedef struct {
    _Atomic uint64_t word;        /* tag and phase */
    _Atomic uint64_t where;       /* an offset, an address, or a length */
    _Atomic uint64_t number_mode; /* number of the operation and one, and the mode of the input */
    _Atomic uint64_t result;      /* where the slice or the shared result lies */
    char near[NEAR_BYTES];
} Row;

_Static_assert(sizeof(Row) == LINE, "a row fills a line");

typedef struct { /* the signature of an operation in a row; only errors read it */
    uint64_t fingerprint;
    uint32_t text_bytes, unused;
    char text[112];
} Label;

_Static_assert(sizeof(Label) == 2 * LINE && TEXT_BYTES <= 112, "a signature fits into two lines");

typedef struct { /* a rank at a board */
    char *rows, *segment;
    uint64_t nbytes; /* of the segment */
    pid_t pid;       /* 0: of this process */
    int peer;        /* its process, as the engine numbers it */
} Seat;

typedef struct Place { /* memory of this process on loan */
    struct Place *next;
    uint64_t where, nbytes;
    uint64_t number, tag; /* of the operation that had it last */
    int used, held;       /* ever; by a run under way here, whatever the rows say */
} Place;

typedef struct {
    PyObject_HEAD
    Engine *engine;
    int size, held, lost;
    int reads; /* whether every rank can read every other's private memory */
    Seat *seats;
    Py_buffer *buffers;
    Place *places;
} Board;

typedef struct {
    int position;
    uint64_t at;
} Source;

typedef struct { /* bytes of a result: folded from several inputs in the order of ranks, or copied from one */
    uint64_t start, nbytes;
    int count;
    Source *sources;
} Pull;

typedef struct {
    Pull *pulls;
    int count;
} Stage;

typedef struct { /* how the rank at a position carries out its operations with one call */
    PyObject_HEAD
    int position, size, flags;
    int active; /* ranks that move bytes; the others only wait */
    int heavy; /* whether moving its bytes may take longer than waking a thread */
    uint64_t nbytes, result_bytes; /* of an input, of a result */
    uint64_t unread_start, unread_stop; /* of its input: no other rank reads it */
    char *needed; /* by position: whether its input is needed */
    Stage take, reduce, collect;
    Reducer reducer;
} Table;

/* What a run waits for or does. */
enum { ROW, COPYING, MEETING, TAKING, REDUCING, SLICING, COLLECTING, LEAVING };

typedef struct {
    uint64_t where;
    int mode;
} Given;

struct Run { /* one rank's end of a collective */
    End end;
    Run *next;
    Board *board;
    Table *table;
    char *source, *target;
    uint64_t number, tag, home; /* home: of a shared result, on the turn of this rank */
    uint64_t fingerprint;       /* 0: no signature, and other calls are not looked for */
    PyObject *text;             /* of the signature; or NULL */
    int position;               /* of the rank whose row has another call */
    long priority;
    Place *place;
    int mode, phase, rowless, cancelled, over;
    int private, loaned, all; /* whether inputs are read in place; lie in loaned places; whether all are needed */
    /* the work at hand */
    const Pull *pulls;
    int left, out, error; /* pulls left, pieces that threads work on, an error of one */
    uint64_t at;          /* in the first of the pulls left */
    Pull copied[2];
    int64_t ended_ns;
    Given given[];
};

struct Scratch {
    Scratch *next;
    char bytes[3][TAKEN_BYTES] __attribute__((aligned(LINE)));
};

PyTypeObject *Board_type, *Table_type, *Run_type;

/* -- rows ---------------------------------------------------------------------------------------------------------- */

static Row *row_of(const Board *board, int position, uint64_t number)
{
    return (Row *)(board->seats[position].rows + number % ROWS * LINE);
}

static char *payload_of(const Board *board, int position, uint64_t number, uint64_t nbytes)
{
    if (nbytes <= NEAR_BYTES)
        return row_of(board, position, number)->near;
    return board->seats[position].rows + ROWS * LINE + number % ROWS * PAYLOAD_BYTES;
}

static Label *label_of(const Board *board, int position, uint64_t number)
{
    return (Label *)(board->seats[position].rows + ROWS * (LINE + PAYLOAD_BYTES)) + number % ROWS;
}

static int has_come(const Board *board, int position, uint64_t number, uint64_t tag, int phase)
{
    uint64_t word = atomic_load(&row_of(board, position, number)->word);
    return tag + phase <= word && word <= tag + LAST;
}

static int reached(const Board *board, uint64_t number, uint64_t tag, int phase)
{
    for (int i = 0; i < board->size; i++)
        if (!has_come(board, i, number, tag, phase))
            return 0;
    return 1;
}

/* Whether every rank has reached a phase of an operation, or a later operation in the same row. */
static int passed(const Board *board, uint64_t number, uint64_t tag, int phase)
{
    for (int i = 0; i < board->size; i++) {
        const Row *row = row_of(board, i, number);
        if (!has_come(board, i, number, tag, phase) && atomic_load(&row->number_mode) >> 8 <= number + 1)
            return 0;
    }
    return 1;
}

/* Whether every rank is known to have arrived at an operation, or a later one in the same row. */
static int came(const Board *board, uint64_t number)
{
    for (int i = 0; i < board->size; i++)
        if (atomic_load(&row_of(board, i, number)->number_mode) >> 8 <= number)
            return 0;
    return 1;
}

/* Whether the others are done with what the row of a rank holds, of operation `number - ROWS`. They are if all have come
   to one that is at most half as many before: streams see to that (runtime/stream.py). A rank that only gives may be far
   ahead of the others. An operation that was cancelled is never done. */
static int row_is_free(const Run *run)
{
    const Row *row = row_of(run->board, run->table->position, run->number);
    uint64_t held = atomic_load(&row->word) & ~(uint64_t)LAST;
    if (held == 0 || passed(run->board, (atomic_load(&row->number_mode) >> 8) - 1, held, LAST))
        return 1;
    return run->number >= ROWS && (came(run->board, run->number - ROWS / 4) || came(run->board, run->number - ROWS / 2));
}

static void ring_others(Engine *engine, const Board *board)
{
    for (int i = 0; i < board->size; i++) {
        int first = 1;
        for (int j = 0; j < i; j++)
            first &= board->seats[j].peer != board->seats[i].peer;
        if (!first)
            continue;
        const Seat *seat = &board->seats[i];
        if (seat->pid != 0)
            ring(engine->peers[seat->peer].bells, engine->peers[seat->peer].door);
        else if (atomic_load(&engine->sleepers))
            ring_threads(engine->bells);
    }
}

static void post_phase(Engine *engine, Run *run, int phase, uint64_t result, int rings)
{
    Row *row = row_of(run->board, run->table->position, run->number);
    if (result)
        atomic_store(&row->result, result);
    atomic_store(&row->word, run->tag | phase);
    if (rings || (phase != LAST && reached(run->board, run->number, run->tag, phase)))
        ring_others(engine, run->board);
}

/* -- places on loan ------------------------------------------------------------------------------------------------ */

static int is_idle(const Board *board, const Place *place)
{
    return !place->used || (!place->held && passed(board, place->number, place->tag, TAKEN));
}

/* Return a place that nobody reads any more, and that is not much too large. */
static Place *free_place(Board *board, uint64_t nbytes)
{
    for (Place *place = board->places; place != NULL; place = place->next)
        if (place->nbytes >= nbytes && place->nbytes / 2 <= nbytes && is_idle(board, place))
            return place;
    return NULL;
}

/* Return where memory of this process begins in its segment; NONSENSE if it lies elsewhere. */
static uint64_t where_in(const Seat *seat, const char *start, uint64_t nbytes)
{
    uint64_t at = (uintptr_t)start - (uintptr_t)seat->segment;
    return at <= seat->nbytes && nbytes <= seat->nbytes - at ? at : NONSENSE;
}

/* -- moving bytes; the engine is not locked ------------------------------------------------------------------------- */

/* Return where a piece of what a rank gives lies here; NULL with the address in its process, if it must be read. */
static const char *address_of_source(const Run *run, int position, uint64_t at, uint64_t nbytes, int collecting, uint64_t *there)
{
    const Seat *seat = &run->board->seats[position];
    uint64_t where = run->given[position].where;
    *there = 0;
    if (position == run->table->position && !collecting)
        return run->source + at;
    if (position == run->table->position && run->place != NULL)
        return seat->segment + run->place->where + at;
    switch (run->given[position].mode) {
    case MAPPED:
    case COMMON:
        if (where > seat->nbytes || at > seat->nbytes - where || nbytes > seat->nbytes - where - at)
            return NULL;
        return seat->segment + where + at;
    case ON_BOARD:
        if (where > PAYLOAD_BYTES || at > where || nbytes > where - at)
            return NULL;
        return payload_of(run->board, position, run->number, where) + at;
    case PRIVATE:
        if (seat->pid == 0) /* an address of `local_given` */
            return where == 0 ? NULL : (const char *)(uintptr_t)(where + at);
        *there = where + at;
    }
    return NULL;
}

/* Return a multiple of what the addresses of elements must be: 8 at most, as complex numbers are pairs. */
static uintptr_t aligned_to(const Reducer *reducer)
{
    return reducer->itemsize < 8 ? (uintptr_t)reducer->itemsize : 8;
}

static int read_there(pid_t pid, uint64_t there, char *to, uint64_t nbytes)
{
    while (nbytes) {
        struct iovec here = {to, nbytes}, other = {(void *)(uintptr_t)there, nbytes};
        ssize_t count = process_vm_readv(pid, &here, 1, &other, 1, 0);
        if (count <= 0)
            return count == 0 ? EFAULT : errno;
        to += count, there += count, nbytes -= count;
    }
    return 0;
}

/* Bring a piece of an input within reach: in `room`, if it must be read, or lies where no element may lie, which loops
   of numpy need not bear. Return an error's number. */
static int fetch(const Run *run, const Pull *pull, int index, uint64_t at, uint64_t nbytes, char *room, const char **to)
{
    uint64_t there;
    const Source *source = &pull->sources[index];
    *to = address_of_source(run, source->position, source->at + at, nbytes, run->phase == COLLECTING, &there);
    if (*to != NULL && (pull->count == 1 || (uintptr_t)*to % aligned_to(&run->table->reducer) == 0))
        return 0;
    if (*to != NULL) {
        memmove(room, *to, nbytes);
        *to = room;
        return 0;
    }
    *to = room;
    return there == 0 ? EPROTO : read_there(run->board->seats[source->position].pid, there, room, nbytes);
}

static int copy_piece(const Run *run, const Pull *pull, uint64_t at, uint64_t nbytes, char *target)
{
    const char *from;
    int error = fetch(run, pull, 0, at, nbytes, target, &from);
    if (!error && from != target)
        memmove(target, from, nbytes);
    return error;
}

static int fold_piece(const Run *run, const Pull *pull, uint64_t at, uint64_t nbytes, char *target, Scratch *scratch)
{
    const Reducer *reducer = &run->table->reducer;
    int mine = run->table->position, error = 0;
    if (reducer->narrow) {
        const char *sources[pull->count];
        char *rooms = malloc((size_t)pull->count * nbytes);
        if (rooms == NULL)
            return ENOMEM;
        for (int i = 0; i < pull->count && !error; i++)
            error = fetch(run, pull, i, at, nbytes, rooms + i * nbytes, &sources[i]);
        if (!error)
            fold_narrow(reducer, sources, pull->count, target, nbytes);
        free(rooms);
        return error;
    }
    /* One of the first two may be read to where their sum belongs, unless this rank's own input lies there. */
    int in_place = run->source + pull->sources[mine].at + at == target;
    char *total = in_place && mine > 1 ? scratch->bytes[2] : target;
    const char *a, *b;
    error = fetch(run, pull, 0, at, nbytes, in_place ? scratch->bytes[0] : target, &a);
    if (!error)
        error = fetch(run, pull, 1, at, nbytes, scratch->bytes[1], &b);
    if (!error)
        combine(reducer, a, b, total, nbytes);
    for (int i = 2; i < pull->count && !error; i++) {
        error = fetch(run, pull, i, at, nbytes, scratch->bytes[0], &a);
        if (!error)
            combine(reducer, total, a, total, nbytes);
    }
    if (error)
        return error;
    divide(reducer, total, nbytes);
    if (total != target)
        memcpy(target, total, nbytes);
    return 0;
}

/* Do a piece of the work at hand. */
static int take_piece(const Run *run, const Pull *pull, uint64_t at, uint64_t nbytes, Scratch *scratch)
{
    char *own = run->place == NULL ? NULL : run->board->seats[run->table->position].segment + run->place->where;
    if (run->phase == COPYING) {
        memcpy(own + pull->start + at, run->source + pull->start + at, nbytes);
        return 0;
    }
    char *target = (run->phase == REDUCING && own != NULL ? own : run->target) + pull->start + at;
    if (run->phase == COLLECTING && own == NULL && pull->sources[0].position == run->table->position)
        return 0; /* it is there */
    if (pull->count == 1 || run->table->reducer.fold == NULL)
        return copy_piece(run, pull, at, nbytes, target);
    return fold_piece(run, pull, at, nbytes, target, scratch);
}

/* -- a run; the engine is locked ------------------------------------------------------------------------------------ */

static void end_run(Engine *engine, Run *run, int state)
{
    Run **at = &engine->runs;
    while (*at != run)
        at = &(*at)->next;
    *at = run->next;
    engine->rowless -= run->rowless;
    run->rowless = 0, run->over = 1, run->ended_ns = now_ns();
    if (run->place != NULL)
        run->place->held = 0;
    finish(engine, &run->end, state);
}

static Scratch *scratch_of(Engine *engine)
{
    Scratch *scratch = engine->scratch;
    if (scratch == NULL)
        return aligned_alloc(LINE, sizeof(Scratch));
    engine->scratch = scratch->next;
    return scratch;
}

static void next_piece(Run *run, const Pull **pull, uint64_t *at, uint64_t *nbytes)
{
    uint64_t size = run->table->reducer.narrow ? TAKEN_BYTES / 2 : TAKEN_BYTES;
    *pull = run->pulls, *at = run->at;
    *nbytes = run->pulls->nbytes - run->at;
    if (*nbytes > size)
        *nbytes = size;
    run->at += *nbytes;
    if (run->at == run->pulls->nbytes)
        run->pulls++, run->left--, run->at = 0;
}

/* Return how many bytes are read in some pulls. */
static uint64_t work_in(const Pull *pulls, int count)
{
    uint64_t total = 0;
    for (int i = 0; i < count; i++)
        total += pulls[i].nbytes * (pulls[i].count > 1 ? pulls[i].count : 1);
    return total;
}

static void after_work(Engine *engine, Run *run);

/* Begin work; what is little is done at once. */
static void begin_work(Engine *engine, Run *run, int phase, const Pull *pulls, int count)
{
    run->phase = phase, run->pulls = pulls, run->left = count, run->at = 0;
    while (run->left && run->pulls->nbytes == 0)
        run->pulls++, run->left--;
    if (work_in(pulls, count) > INLINE_BYTES)
        return;
    Scratch *scratch = scratch_of(engine);
    run->error = scratch == NULL ? ENOMEM : 0;
    while (run->left && !run->error) {
        const Pull *pull;
        uint64_t at, nbytes;
        next_piece(run, &pull, &at, &nbytes);
        if (nbytes)
            run->error = take_piece(run, pull, at, nbytes, scratch);
    }
    if (scratch != NULL)
        scratch->next = engine->scratch, engine->scratch = scratch;
    run->left = 0;
    after_work(engine, run);
}

/* Write the signature of an operation beside its row, unless it is there from an earlier one. */
static void write_label(const Run *run)
{
    Label *label = label_of(run->board, run->table->position, run->number);
    const char *text = run->text == NULL ? "" : PyBytes_AS_STRING(run->text);
    uint32_t text_bytes = run->text == NULL ? 0 : (uint32_t)PyBytes_GET_SIZE(run->text);
    if (label->fingerprint == run->fingerprint && label->text_bytes == text_bytes &&
        memcmp(label->text, text, text_bytes) == 0)
        return;
    label->fingerprint = run->fingerprint, label->text_bytes = text_bytes;
    memcpy(label->text, text, text_bytes);
}

/* Post where the input lies. */
static void post(Engine *engine, Run *run)
{
    const Table *table = run->table;
    const Board *board = run->board;
    Row *row = row_of(board, table->position, run->number);
    uint64_t where = 0;
    write_label(run);
    if (run->mode == ON_BOARD) {
        where = table->nbytes;
        memcpy(payload_of(board, table->position, run->number, where), run->source, where);
    } else if (run->mode == MAPPED)
        where = run->place->where;
    else if (run->mode == COMMON)
        where = where_in(&board->seats[table->position], run->source, table->nbytes);
    else if (run->mode == PRIVATE)
        where = (uintptr_t)run->source;
    atomic_store(&row->where, where);
    atomic_store(&row->number_mode, (run->number + 1) << 8 | (uint64_t)run->mode);
    run->phase = MEETING;
    post_phase(engine, run, ARRIVED, run->home, table->flags & RINGS);
}

/* Whether all ranks that this rank needs have arrived. */
static int met(const Run *run)
{
    if (run->all)
        return reached(run->board, run->number, run->tag, ARRIVED);
    for (int i = 0; i < run->table->size; i++)
        if (run->table->needed[i] && !has_come(run->board, i, run->number, run->tag, ARRIVED))
            return 0;
    return 1;
}

/* Find the shared result, in the memory of the rank that loans it. */
static int find_shared(Run *run)
{
    int owner = run->number % run->table->size;
    uint64_t home = atomic_load(&row_of(run->board, owner, run->number)->result);
    const Seat *seat = &run->board->seats[owner];
    if (home % LINE || home > seat->nbytes || run->table->result_bytes > seat->nbytes - home)
        return 0;
    run->target = seat->segment + home, run->home = home;
    return 1;
}

/* Return the end of another rank of this process in the same operation; NULL: there is none under way. */
static const Run *local_run(const Engine *engine, const Run *run, int position)
{
    for (const Run *other = engine->runs; other != NULL; other = other->next)
        if (other->board == run->board && other->table->position == position && other->tag == run->tag)
            return other;
    return NULL;
}

/* Return what a rank has given; addresses in this process are not taken from a row, which others can write over. */
static Given local_given(const Engine *engine, const Run *run, int position, uint64_t where, int mode, int slice)
{
    if (mode == PRIVATE && run->board->seats[position].pid == 0) {
        const Run *other = local_run(engine, run, position);
        where = other == NULL ? 0 : (uintptr_t)(slice ? other->target : other->source);
    }
    return (Given){where, mode};
}

/* Read the posts of the needed ranks, and start to take their inputs. */
static void begin_taking(Engine *engine, Run *run)
{
    const Table *table = run->table;
    int modes = 1 << run->mode;
    for (int i = 0; i < table->size; i++) {
        const Row *row = row_of(run->board, i, run->number);
        run->given[i] = local_given(engine, run, i, atomic_load(&row->where), atomic_load(&row->number_mode) & 255, 0);
        if ((run->all || table->needed[i]) && run->given[i].mode <= COMMON)
            modes |= 1 << run->given[i].mode;
    }
    if (modes & 1 << NO_HOME) {
        post_phase(engine, run, TAKEN, 0, 0);
        end_run(engine, run, HOMELESS);
        return;
    }
    run->private = (modes & (1 << PRIVATE | 1 << COMMON)) != 0, run->loaned = (modes & 1 << MAPPED) != 0;
    if (table->flags & SHARED && table->result_bytes && !find_shared(run))
        run->error = EPROTO;
    else if (table->flags & SLICES && (run->private || table->flags & ALWAYS_SLICES))
        begin_work(engine, run, REDUCING, table->reduce.pulls, table->reduce.count);
    else
        begin_work(engine, run, TAKING, table->take.pulls, table->take.count);
}

/* Say where the slice lies, and go on once all have theirs. */
static void say_slice(Engine *engine, Run *run)
{
    const Seat *seat = &run->board->seats[run->table->position];
    uint64_t where = run->place == NULL ? where_in(seat, run->target, run->table->nbytes) : run->place->where;
    run->phase = SLICING;
    post_phase(engine, run, SLICED, where == NONSENSE ? (uintptr_t)run->target | PRIVATE_BIT : where, 0);
}

static void begin_collecting(Engine *engine, Run *run)
{
    for (int i = 0; i < run->table->size; i++) {
        uint64_t result = atomic_load(&row_of(run->board, i, run->number)->result);
        run->given[i] = local_given(engine, run, i, result & ~PRIVATE_BIT, result & PRIVATE_BIT ? PRIVATE : MAPPED, 1);
    }
    begin_work(engine, run, COLLECTING, run->table->collect.pulls, run->table->collect.count);
}

/* All is taken: wait until the others have taken what is read where it is, or end. */
static void leave(Engine *engine, Run *run)
{
    int waits = (run->private && (run->table->flags & GIVES)) || run->table->flags & SHARED;
    if (waits || run->loaned || run->private)
        post_phase(engine, run, TAKEN, 0, 0);
    run->phase = LEAVING;
    if (!waits) {
        post_phase(engine, run, LAST, 0, 0);
        end_run(engine, run, DONE);
    }
}

static void after_work(Engine *engine, Run *run)
{
    if (run->cancelled || run->error)
        return; /* `advance` ends it, once nobody reads what it has given */
    if (run->phase == COPYING)
        post(engine, run);
    else if (run->phase == REDUCING)
        say_slice(engine, run);
    else
        leave(engine, run);
}

static int works(const Run *run)
{
    return run->phase == COPYING || run->phase == TAKING || run->phase == REDUCING || run->phase == COLLECTING;
}

/* Whether another rank of this process may read memory that is this rank's own: it is read until its work is done. */
static int is_read_here(const Engine *engine, const Run *run)
{
    for (const Run *other = engine->runs; other != NULL; other = other->next)
        if (other != run && other->board == run->board && other->tag == run->tag && works(other) &&
            (other->out || !(other->cancelled || other->error)))
            return 1;
    return 0;
}

/* Whether the row of a rank has the number of a run, but another call: the tag of an operation is 40 bits of its call, 16
   of its number, and 8 for the phase. */
static int calls_another(const Run *run, int position)
{
    uint64_t word = atomic_load(&row_of(run->board, position, run->number)->word), differs = word ^ run->tag;
    return word != 0 && differs >> 24 && (differs >> 8 & 0xFFFF) == 0;
}

/* End a run that waits for a rank with another call, and wake the others: they wait in vain, too. Once it has posted
   where its input lies, ranks with its call may read that: they must have taken it. One that comes later finds none. */
static int end_mismatch(Engine *engine, Run *run)
{
    int found = -1, taken = 1;
    for (int i = 0; i < run->table->size; i++) {
        int another = calls_another(run, i) && (run->table->needed[i] || !(run->table->flags & LOOKS));
        found = another && found < 0 ? i : found;
        taken &= another || i == run->table->position || has_come(run->board, i, run->number, run->tag, TAKEN);
    }
    if (run->fingerprint == 0 || found < 0 || (run->phase == LEAVING && !taken))
        return 0;
    if (run->mode == PRIVATE || run->mode == COMMON)
        atomic_store(&row_of(run->board, run->table->position, run->number)->number_mode, (run->number + 1) << 8 | NO_HOME);
    run->position = found;
    end_run(engine, run, MISMATCH);
    if (!(run->table->flags & LOOKS))
        ring_others(engine, run->board);
    return 1;
}

/* Whether an earlier operation of the same rank waits for a row, too. */
static int is_behind(const Engine *engine, const Run *run)
{
    for (const Run *other = engine->runs; other != run; other = other->next)
        if (other->phase == ROW && other->board == run->board && other->table->position == run->table->position)
            return 1;
    return 0;
}

/* Advance to the phase that the others allow; return whether anything happened. */
static int advance(Engine *engine, Run *run)
{
    int moved = 0;
    for (; !run->over; moved = 1) {
        const Table *table = run->table;
        int failed = run->cancelled || run->error, state = run->cancelled ? CANCELLED : LOST;
        if (run->error && !run->cancelled)
            state = run->error == ENOMEM ? NO_MEMORY : run->error == EPROTO ? CORRUPT : LOST;
        if (failed ? run->out || is_read_here(engine, run) : works(run))
            return moved;
        if (failed) {
            end_run(engine, run, state);
            return 1;
        }
        if (run->phase == ROW) {
            if (run->board->lost || (!is_behind(engine, run) && row_is_free(run))) {
                engine->rowless -= run->rowless, run->rowless = 0;
                if (run->place == NULL) {
                    post(engine, run);
                    continue;
                }
                run->copied[0] = (Pull){0, table->unread_start, 0, NULL};
                run->copied[1] = (Pull){table->unread_stop, table->nbytes - table->unread_stop, 0, NULL};
                begin_work(engine, run, COPYING, run->copied, 2);
                continue;
            }
            engine->rowless += !run->rowless, run->rowless = 1;
            return moved;
        }
        if (run->phase == MEETING && met(run))
            begin_taking(engine, run);
        else if (run->phase == SLICING && reached(run->board, run->number, run->tag, SLICED))
            begin_collecting(engine, run);
        else if (run->phase == LEAVING && reached(run->board, run->number, run->tag, TAKEN)) {
            post_phase(engine, run, LAST, 0, 0);
            end_run(engine, run, DONE);
        } else {
            if (run->board->lost && !is_read_here(engine, run))
                end_run(engine, run, LOST);
            else if ((run->phase == MEETING || run->phase == LEAVING) && end_mismatch(engine, run))
                moved = 1;
            return moved;
        }
    }
    return moved;
}

int progress_runs(Engine *engine)
{
    int moved = 0;
    for (Run *run = engine->runs, *next; run != NULL; run = next) {
        next = run->next;
        moved |= advance(engine, run);
    }
    return moved;
}

static Run *most_urgent(const Engine *engine)
{
    Run *found = NULL;
    for (Run *run = engine->runs; run != NULL; run = run->next)
        if (works(run) && run->left && !run->cancelled && !run->error && (found == NULL || run->priority < found->priority))
            found = run;
    return found;
}

static int is_long(const Run *run)
{
    return work_in(run->pulls, run->left) - run->at >= LONG_BYTES;
}

/* Return how many threads may work at a run: for long work also on the cores of ranks that only wait. */
static int most_threads(const Engine *engine, const Run *run)
{
    int active = run->table->active, idle = active < run->table->size && is_long(run) ? engine->cores / active : 0;
    return idle > engine->most ? idle : engine->most;
}

int work_waits(const Engine *engine)
{
    const Run *run = engine->runs == NULL ? NULL : most_urgent(engine);
    return run != NULL && engine->working < most_threads(engine, run);
}

/* Do a piece of work, unlocked; the run cannot end before, because the piece counts as out. */
void work(Engine *engine)
{
    Run *run = most_urgent(engine);
    const Pull *pull;
    uint64_t at, nbytes;
    next_piece(run, &pull, &at, &nbytes);
    Scratch *scratch = scratch_of(engine);
    run->out++, engine->working++;
    if (is_long(run) && work_waits(engine))
        ring_spare(engine->bells); /* `ring` wakes no thread where one attends */
    pthread_mutex_unlock(&engine->lock);
    int error = scratch == NULL ? ENOMEM : take_piece(run, pull, at, nbytes, scratch);
    lock(engine);
    run->out--, engine->working--;
    if (scratch != NULL)
        scratch->next = engine->scratch, engine->scratch = scratch;
    if (error)
        run->error = error;
    while (run->left && run->pulls->nbytes == 0)
        run->pulls++, run->left--;
    if (run->out == 0 && (run->left == 0 || run->error || run->cancelled)) {
        long pending = engine->pending;
        after_work(engine, run);
        advance(engine, run);
        if (engine->pending != pending && atomic_load(&engine->sleepers))
            ring_threads(engine->bells);
    }
}

void release_runs(Engine *engine)
{
    for (Run *run = engine->runs, *next; run != NULL; run = next) {
        next = run->next;
        Py_CLEAR(run->end.owner);
        Py_DECREF(run);
    }
    for (Scratch *scratch = engine->scratch, *next; scratch != NULL; scratch = next)
        next = scratch->next, free(scratch);
}

/* -- Python's side -------------------------------------------------------------------------------------------------- */

static void Run_dealloc(Run *run)
{
    Py_XDECREF(run->end.owner);
    Py_XDECREF(run->board);
    Py_XDECREF(run->table);
    Py_XDECREF(run->text);
    PyTypeObject *type = Py_TYPE(run);
    type->tp_free(run);
    Py_DECREF(type);
}

static PyObject *Run_state(Run *run, void *unused)
{
    return PyLong_FromLong(atomic_load(&run->end.state));
}

static PyGetSetDef Run_fields[] = {{"state", (getter)Run_state}, {NULL}};
static PyMemberDef Run_members[] = {
    {"ended_ns", T_LONGLONG, offsetof(Run, ended_ns), READONLY},
    {"home", T_ULONGLONG, offsetof(Run, home), READONLY},
    {"position", T_INT, offsetof(Run, position), READONLY},
    {"queued", T_INT, offsetof(Run, end.queued), READONLY},
    {NULL}};
static PyType_Slot Run_slots[] = {
    {Py_tp_dealloc, Run_dealloc}, {Py_tp_getset, Run_fields}, {Py_tp_members, Run_members}, {0}};
PyType_Spec Run_spec = {"transports.shared_memory._native.Run", sizeof(Run), sizeof(Given),
                        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, Run_slots};

/* Decide where the input goes, without reserving anything; NO_HOME: no place is left for it. */
static int mode_for(const Run *run, Place **place)
{
    const Table *table = run->table;
    Board *board = run->board;
    const Seat *seat = &board->seats[table->position];
    *place = NULL;
    if (run->source == NULL || table->nbytes == 0 || !(table->flags & GIVES))
        return NOWHERE;
    if (table->nbytes <= PAYLOAD_BYTES)
        return ON_BOARD;
    if (table->nbytes > COPIED_BYTES) { /* where all find it, if they will find this rank's slice, too */
        int found = run->target == NULL || where_in(seat, run->target, table->nbytes) != NONSENSE;
        if ((board->reads || found) && where_in(seat, run->source, table->nbytes) != NONSENSE)
            return COMMON;
        if (board->reads)
            return PRIVATE;
    }
    *place = free_place(board, table->nbytes);
    return *place == NULL ? NO_HOME : MAPPED;
}

static Run *new_run(Board *board, Table *table, PyObject *owner)
{
    Run *run = PyObject_NewVar(Run, Run_type, board->size);
    if (run == NULL)
        return NULL;
    memset((char *)run + offsetof(Run, end.next_ended), 0, offsetof(Run, given) - offsetof(Run, end.next_ended));
    run->end.owner = Py_NewRef(owner), run->end.heavy = table->heavy;
    run->board = (Board *)Py_NewRef(board), run->table = (Table *)Py_NewRef(table);
    return run;
}

/* Flags of a submission: there is no more memory to loan; the thread is about to wait for the run. */
enum { NO_PLACES = 1, WAITED_FOR };

/* submit(board, table, owner, number, tag, source, target, priority, home, how[, fingerprint, text]): begin a collective;
   None if it needs a place that the board has not got, unless there is none to be had. */
PyObject *Engine_submit(Engine *engine, PyObject *const *args, Py_ssize_t count)
{
    if ((count != 10 && count != 12) || Py_TYPE(args[0]) != Board_type || Py_TYPE(args[1]) != Table_type)
        return PyErr_Format(PyExc_TypeError, "submit takes a board, a table, and 8 or 10 more arguments");
    Board *board = (Board *)args[0];
    Table *table = (Table *)args[1];
    unsigned long long number = PyLong_AsUnsignedLongLong(args[3]), tag = PyLong_AsUnsignedLongLong(args[4]);
    unsigned long long source = PyLong_AsUnsignedLongLong(args[5]), target = PyLong_AsUnsignedLongLong(args[6]);
    int beyond;
    long priority = PyLong_AsLongAndOverflow(args[7], &beyond);
    if (beyond)
        priority = beyond * LONG_MAX;
    unsigned long long home = PyLong_AsUnsignedLongLong(args[8]);
    long how = PyLong_AsLong(args[9]);
    unsigned long long fingerprint = count == 12 ? PyLong_AsUnsignedLongLong(args[10]) : 0;
    if (count == 12 && (!PyBytes_Check(args[11]) || PyBytes_GET_SIZE(args[11]) > TEXT_BYTES))
        return PyErr_Format(PyExc_ValueError, "the text of a signature is bytes, at most %d", TEXT_BYTES);
    if (PyErr_Occurred() || refuse_fork(engine) || start_spare(engine) < 0)
        return NULL;
    if (board->size != table->size || board->engine != engine)
        return PyErr_Format(PyExc_ValueError, "the table is not for this board");
    Run *run = new_run(board, table, args[2]);
    if (run == NULL)
        return NULL;
    run->number = number, run->tag = tag, run->home = home, run->priority = priority;
    run->fingerprint = fingerprint, run->text = count == 12 ? Py_NewRef(args[11]) : NULL;
    run->source = (char *)(uintptr_t)source, run->target = (char *)(uintptr_t)target;
    Place *place;
    int refused = 0, at_once = 0;
    Py_INCREF(run); /* until it has ended and Python knows */
    Py_BEGIN_ALLOW_THREADS
    lock(engine);
    run->mode = mode_for(run, &place);
    if (run->mode == NO_HOME && how & NO_PLACES)
        run->mode = board->reads ? PRIVATE : NO_HOME;
    else
        refused = run->mode == NO_HOME;
    if (table->flags & SHARED && table->result_bytes && home == 0 && number % table->size == (unsigned)table->position)
        run->mode = NO_HOME; /* there is no room for the result */
    if (!refused) {
        if (place != NULL)
            place->used = place->held = 1, place->number = number, place->tag = tag, run->place = place;
        /* without common reading another rank may be homeless: then all must know */
        run->all = table->flags & NEEDS_ALL ||
                   (run->mode != ON_BOARD && !board->reads && !(table->flags & FROM_ONE));
        run->phase = table->flags & LOOKS ? MEETING : ROW, run->end.submitting = SUBMITTING;
        Run **last = &engine->runs;
        while (*last != NULL)
            last = &(*last)->next;
        *last = run;
        begin_end(engine, &run->end);
        engine->promised = how & WAITED_FOR;
        advance(engine, run);
        attend(engine);
        at_once = run->end.submitting == ENDED_AT_ONCE;
        run->end.submitting = 0;
        unlock(engine);
    } else
        pthread_mutex_unlock(&engine->lock);
    Py_END_ALLOW_THREADS
    if (refused || at_once) { /* nobody else knows it */
        Py_CLEAR(run->end.owner);
        Py_DECREF(run);
    }
    if (refused) {
        Py_DECREF(run);
        Py_RETURN_NONE;
    }
    return (PyObject *)run;
}

/* Cancel a run; return whether nothing of its rank's is touched any more: else that is so once it has ended. */
PyObject *Engine_cancel(Engine *engine, PyObject *given)
{
    if (Py_TYPE(given) != Run_type)
        return PyErr_Format(PyExc_TypeError, "cancel takes a Run");
    Run *run = (Run *)given;
    int over;
    if (engine->pid != getpid())
        Py_RETURN_TRUE;
    Py_BEGIN_ALLOW_THREADS
    lock(engine);
    run->cancelled = 1;
    advance(engine, run);
    over = run->over;
    if (atomic_load(&engine->sleepers))
        ring_threads(engine->bells);
    unlock(engine);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(over);
}

static void Board_dealloc(Board *board)
{
    PyTypeObject *type = Py_TYPE(board);
    for (int i = 0; i < board->held; i++)
        PyBuffer_Release(&board->buffers[i]);
    for (Place *place = board->places, *next; place != NULL; place = next)
        next = place->next, PyMem_Free(place);
    PyMem_Free(board->buffers);
    PyMem_Free(board->seats);
    Py_XDECREF(board->engine);
    type->tp_free(board);
    Py_DECREF(type);
}

static int take_seat(Board *board, PyObject *given, Seat *seat)
{
    PyObject *rows, *segment;
    int pid;
    if (!PyArg_ParseTuple(given, "OOii", &rows, &segment, &pid, &seat->peer))
        return -1;
    Py_buffer *buffers = &board->buffers[board->held];
    if (PyObject_GetBuffer(rows, &buffers[0], PyBUF_WRITABLE) < 0)
        return -1;
    board->held++;
    if (PyObject_GetBuffer(segment, &buffers[1], PyBUF_WRITABLE) < 0)
        return -1;
    board->held++;
    seat->rows = buffers[0].buf, seat->segment = buffers[1].buf, seat->nbytes = buffers[1].len, seat->pid = pid;
    int there = pid != 0;
    if (buffers[0].len < BOARD_BYTES || (uintptr_t)seat->rows % LINE ||
        (there && (seat->peer < 0 || seat->peer >= board->engine->size || board->engine->peers[seat->peer].bells == NULL))) {
        PyErr_SetString(PyExc_ValueError, "the rows of a board are too small, lie at an odd place, or are out of reach");
        return -1;
    }
    return 0;
}

/* Board(engine, seats, reads): each seat (rows, segment, pid or 0 for this process, number of its process). */
static PyObject *Board_new(PyTypeObject *type, PyObject *args, PyObject *names)
{
    PyObject *engine, *seats;
    int reads;
    if (!PyArg_ParseTuple(args, "OO!p", &engine, &PyList_Type, &seats, &reads))
        return NULL;
    if (Py_TYPE(engine) != Engine_type)
        return PyErr_Format(PyExc_TypeError, "a board belongs to an engine");
    Board *board = (Board *)type->tp_alloc(type, 0);
    if (board == NULL)
        return NULL;
    board->engine = (Engine *)Py_NewRef(engine), board->reads = reads;
    int size = (int)PyList_GET_SIZE(seats);
    board->seats = PyMem_Calloc(size + 1, sizeof(Seat));
    board->buffers = PyMem_Calloc(2 * size + 1, sizeof(Py_buffer));
    if (board->seats == NULL || board->buffers == NULL) {
        Py_DECREF(board);
        return PyErr_NoMemory();
    }
    for (board->size = 0; board->size < size; board->size++)
        if (take_seat(board, PyList_GET_ITEM(seats, board->size), &board->seats[board->size]) < 0) {
            Py_DECREF(board);
            return NULL;
        }
    return (PyObject *)board;
}

/* lose(): nothing more can be expected of one of the ranks. */
static PyObject *Board_lose(Board *board, PyObject *unused)
{
    if (board->engine->pid == getpid()) {
        Py_BEGIN_ALLOW_THREADS
        lock(board->engine);
        board->lost = 1;
        unlock(board->engine);
        if (atomic_load(&board->engine->sleepers))
            ring_threads(board->engine->bells);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

/* add_place(where, nbytes): loan memory of this process's segment to the operations of the board. */
static PyObject *Board_add_place(Board *board, PyObject *args)
{
    unsigned long long where, nbytes;
    if (!PyArg_ParseTuple(args, "KK", &where, &nbytes))
        return NULL;
    Place *place = PyMem_Calloc(1, sizeof(Place));
    if (place == NULL)
        return PyErr_NoMemory();
    place->where = where, place->nbytes = nbytes;
    Py_BEGIN_ALLOW_THREADS
    lock(board->engine);
    place->next = board->places, board->places = place;
    pthread_mutex_unlock(&board->engine->lock);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* take_places(all): take the places that no rank reads any more, or all; return their offsets. */
static PyObject *Board_take_places(Board *board, PyObject *all)
{
    PyObject *found = PyList_New(0);
    lock(board->engine);
    for (Place **at = &board->places; *at != NULL && found != NULL;) {
        Place *place = *at;
        if (place->held || (all != Py_True && !is_idle(board, place))) {
            at = &place->next;
            continue;
        }
        PyObject *where = PyLong_FromUnsignedLongLong(place->where);
        if (where == NULL || PyList_Append(found, where) < 0)
            Py_CLEAR(found);
        Py_XDECREF(where);
        *at = place->next;
        PyMem_Free(place);
    }
    pthread_mutex_unlock(&board->engine->lock);
    return found;
}

/* row(position, number): return word, number and mode, fingerprint and text of a row, as its rank has written them. */
static PyObject *Board_row(Board *board, PyObject *args)
{
    int position;
    unsigned long long number;
    if (!PyArg_ParseTuple(args, "iK", &position, &number))
        return NULL;
    if (position < 0 || position >= board->size)
        return PyErr_Format(PyExc_ValueError, "there is no rank at position %d of this board", position);
    const Row *row = row_of(board, position, number);
    uint64_t word = atomic_load(&row->word), number_mode = atomic_load(&row->number_mode);
    Label label = *label_of(board, position, number);
    if (label.text_bytes > TEXT_BYTES)
        return PyErr_Format(PyExc_ValueError, "the text of a row claims %u bytes", label.text_bytes);
    return Py_BuildValue("KKKy#", (unsigned long long)word, (unsigned long long)number_mode,
                         (unsigned long long)label.fingerprint, label.text, (Py_ssize_t)label.text_bytes);
}

static PyMethodDef Board_methods[] = {{"lose", (PyCFunction)Board_lose, METH_NOARGS, "lose()"},
                                      {"add_place", (PyCFunction)Board_add_place, METH_VARARGS, "add_place(where, nbytes)"},
                                      {"row", (PyCFunction)Board_row, METH_VARARGS, "row(position, number)"},
                                      {"take_places", (PyCFunction)Board_take_places, METH_O, "take_places(all)"},
                                      {NULL}};
static PyType_Slot Board_slots[] = {
    {Py_tp_new, Board_new}, {Py_tp_dealloc, Board_dealloc}, {Py_tp_methods, Board_methods}, {0}};
PyType_Spec Board_spec = {"transports.shared_memory._native.Board", sizeof(Board), 0, Py_TPFLAGS_DEFAULT, Board_slots};

static void free_stage(Stage *stage)
{
    for (int i = 0; i < stage->count; i++)
        PyMem_Free(stage->pulls[i].sources);
    PyMem_Free(stage->pulls);
}

static void Table_dealloc(Table *table)
{
    PyTypeObject *type = Py_TYPE(table);
    free_stage(&table->take);
    free_stage(&table->reduce);
    free_stage(&table->collect);
    PyMem_Free(table->needed);
    type->tp_free(table);
    Py_DECREF(type);
}

/* Read a list of (start, nbytes, [(rank, at)]). */
static int take_stage(const Table *table, PyObject *given, Stage *stage)
{
    Py_ssize_t count = PyList_GET_SIZE(given);
    stage->pulls = PyMem_Calloc(count + 1, sizeof(Pull));
    if (stage->pulls == NULL)
        return PyErr_NoMemory() == NULL ? -1 : 0;
    for (; stage->count < count; stage->count++) {
        Pull *pull = &stage->pulls[stage->count];
        PyObject *sources;
        unsigned long long start, nbytes;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(given, stage->count), "KKO!", &start, &nbytes, &PyList_Type, &sources))
            return -1;
        pull->start = start, pull->nbytes = nbytes, pull->count = (int)PyList_GET_SIZE(sources);
        if (start > table->result_bytes || nbytes > table->result_bytes - start ||
            (pull->count != 1 && (pull->count != table->size || table->reducer.fold == NULL)) ||
            nbytes % (table->reducer.fold == NULL ? 1 : table->reducer.itemsize)) {
            PyErr_SetString(PyExc_ValueError, "a pull is not in the result, or not from one rank or all");
            return -1;
        }
        pull->sources = PyMem_Calloc(pull->count + 1, sizeof(Source));
        if (pull->sources == NULL)
            return PyErr_NoMemory() == NULL ? -1 : 0;
        for (int i = 0; i < pull->count; i++) {
            unsigned long long at;
            Source *source = &pull->sources[i];
            if (!PyArg_ParseTuple(PyList_GET_ITEM(sources, i), "iK", &source->position, &at))
                return -1;
            source->at = at;
            if (source->position < 0 || source->position >= table->size || (pull->count > 1 && source->position != i)) {
                PyErr_SetString(PyExc_ValueError, "a pull is from ranks that do not exist, or not in their order");
                return -1;
            }
        }
    }
    return 0;
}

/* Table(position, size, flags, nbytes, result_bytes, unread, needed, take, reduce, collect, reducer). */
static PyObject *Table_new(PyTypeObject *type, PyObject *args, PyObject *names)
{
    Table *table = (Table *)type->tp_alloc(type, 0);
    PyObject *take, *reduce, *collect, *reducer;
    const char *needed;
    Py_ssize_t length;
    unsigned long long nbytes, result_bytes, start, stop;
    if (table == NULL)
        return NULL;
    if (!PyArg_ParseTuple(args, "iiiiKK(KK)y#O!O!O!O", &table->position, &table->size, &table->active, &table->flags,
                          &nbytes, &result_bytes, &start, &stop, &needed, &length, &PyList_Type, &take, &PyList_Type,
                          &reduce, &PyList_Type, &collect, &reducer))
        goto failed;
    table->nbytes = nbytes, table->result_bytes = result_bytes;
    table->unread_start = start, table->unread_stop = stop;
    if (length != table->size || table->position < 0 || table->position >= table->size || table->active < 1 ||
        table->active > table->size || start > stop || stop > nbytes) {
        PyErr_SetString(PyExc_ValueError, "a table does not fit its group");
        goto failed;
    }
    table->needed = PyMem_Malloc(length + 1);
    if (table->needed == NULL) {
        PyErr_NoMemory();
        goto failed;
    }
    memcpy(table->needed, needed, length);
    if (reducer != Py_None && reducer_from(reducer, &table->reducer) < 0)
        goto failed;
    if (take_stage(table, take, &table->take) < 0 || take_stage(table, reduce, &table->reduce) < 0 ||
        take_stage(table, collect, &table->collect) < 0)
        goto failed;
    table->heavy = nbytes > INLINE_BYTES || work_in(table->take.pulls, table->take.count) > INLINE_BYTES;
    return (PyObject *)table;
failed:
    Py_DECREF(table);
    return NULL;
}

static PyType_Slot Table_slots[] = {{Py_tp_new, Table_new}, {Py_tp_dealloc, Table_dealloc}, {0}};
PyType_Spec Table_spec = {"transports.shared_memory._native.Table", sizeof(Table), 0, Py_TPFLAGS_DEFAULT, Table_slots};
