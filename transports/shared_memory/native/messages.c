/* Messages between processes of one host, copied through rings of shared memory by the threads that call.

   There is a ring for each ordered pair of processes, and a message is a head and its bytes. A receiver that needs a
   message behind others keeps those others, in bounded memory. So a message that is longer than the ring is offered: its
   head goes alone, the receiver asks for it by number once a receive takes it, and its bytes go then. Shorter ones are
   offered while the receiver keeps many. Nonsense from a peer ends all messages with it.

   Messages of one tag and lane arrive in the order in which they were sent. Of others the most urgent ones leave first.
   What has come stays in the ring while nobody here waits for anything of its sender, unless it is urgent: notes, the
   withdrawal of an offer, or everything while somebody probes. */

#include "engine.h"
#include <limits.h>
#include <string.h>

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

/* Return the checksum of a head: one wrong word changes it, whatever the bits, but for one case in 2^32. */
static uint32_t checksum_of(const Head *head)
{
    const uint64_t factor = 0x9E3779B97F4A7C15;
    uint64_t sums[4] = {1, 2, 3, 4}, words[HEAD_BYTES / 8];
    Head copy = *head;
    copy.checksum = 0;
    memcpy(words, &copy, HEAD_BYTES);
    for (int i = 0; i < HEAD_BYTES / 8; i++)
        sums[i % 4] = (sums[i % 4] ^ words[i]) * factor; /* four chains, for the processor to do at once */
    return (uint32_t)((((sums[0] * factor + sums[1]) * factor + sums[2]) * factor + sums[3]) * factor >> 32);
}

/* Return the bytes between two counts of a ring; NONSENSE unless they are whole lines that it can hold. */
static uint64_t between(const Ring *ring, uint64_t behind, uint64_t ahead)
{
    uint64_t nbytes = ahead - behind;
    return nbytes <= ring->room && nbytes % LINE == 0 ? nbytes : NONSENSE;
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

static unsigned bucket(uint64_t tag, uint64_t lane)
{
    return (unsigned)(((tag ^ (lane * 0xD6E8FEB86659FD93)) * 0x9E3779B97F4A7C15) >> 56);
}

/* How far a send has begun. */
enum { ASKED_FOR = 1, WRITING };

static int holds(const Queue *queue, const Op *op)
{
    const Op *held = queue->first;
    while (held != NULL && held != op)
        held = held->next;
    return held != NULL;
}

/* Whether one of two sends must not overtake the other. */
static int stay_in_order(const Op *a, const Op *b)
{
    return !a->begun && !b->begun && !a->control && !b->control && a->head.tag == b->head.tag &&
           a->head.lane == b->head.lane;
}

/* Queue a send behind those that are as urgent. */
static void queue_send(Queue *sends, Op *op)
{
    Op *behind = NULL;
    if (sends->last == NULL || sends->last->priority <= op->priority) {
        append(sends, op);
        return;
    }
    for (Op *at = sends->first; at != NULL; at = at->next)
        if (at->begun == WRITING || at->priority <= op->priority || stay_in_order(at, op))
            behind = at;
    op->next = behind == NULL ? sends->first : behind->next;
    *(behind == NULL ? &sends->first : &behind->next) = op;
    if (sends->last == behind)
        sends->last = op;
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

/* What a head that arrives leads to. */
enum { UNWANTED, ALONE, BYTES_FOLLOW, BAD };

/* -- progress; the mailbox is locked ------------------------------------------------------------------------------- */

static void queue_receive(Engine *engine, Op *op)
{
    append(&engine->receives[bucket(op->head.tag, op->head.lane)], op);
    engine->receiving++;
    *(op->peer < 0 ? &engine->from_any : &engine->peers[op->peer].receiving) += 1;
}

/* Return whether it waited for a message. */
static int take_receive(Engine *engine, Op *op)
{
    if (!take_out(&engine->receives[bucket(op->head.tag, op->head.lane)], op))
        return 0;
    engine->receiving--;
    *(op->peer < 0 ? &engine->from_any : &engine->peers[op->peer].receiving) -= 1;
    return 1;
}

/* A failure is for the event loop, also within the call: it may end the link to the peer. */
static void end(Engine *engine, Op *op, int state)
{
    if (state != DONE && state != SIZED)
        op->end.submitting = 0;
    finish(engine, &op->end, state);
}

static uint64_t kept_bytes(const Head *head)
{
    return head->kind == WHOLE ? HEAD_BYTES + ROUND_UP(head->nbytes) : 0;
}

static void count_kept(Peer *peer, uint64_t kept)
{
    peer->kept = kept;
    atomic_store(&peer->in.counts->kept, kept);
}

static void drop_early(Peer *peer, Early *early)
{
    EarlyQueue *queue = &peer->early_in[bucket(early->head.tag, early->head.lane)];
    Early *before = NULL;
    for (Early *kept = queue->first; kept != early; kept = kept->next)
        before = kept;
    *(before == NULL ? &queue->first : &before->next) = early->next;
    if (queue->last == early)
        queue->last = before;
    peer->early_offers -= early->head.kind == OFFER;
    count_kept(peer, peer->kept - kept_bytes(&early->head));
    free(early);
}

static void end_all(Engine *engine, Queue *queue, int state)
{
    for (Op *op; (op = queue->first) != NULL; end(engine, op, state))
        take_out(queue, op);
}

/* End the receives from a peer that nothing has met, if asked also those from any. */
static void end_receives(Engine *engine, int index, int any, int state)
{
    for (int i = 0; i < BUCKETS; i++)
        for (Op *op = engine->receives[i].first, *next; op != NULL; op = next) {
            next = op->next;
            if (op->peer == index || (any && op->peer < 0)) {
                take_receive(engine, op);
                op->source = index;
                end(engine, op, state);
            }
        }
}

/* End all messages with a peer that has written nonsense, also receives from anybody: they may wait for it in vain. */
static void fail(Engine *engine, int index)
{
    Peer *peer = &engine->peers[index];
    peer->corrupt = 1;
    engine->coming -= peer->coming;
    peer->coming = 0;
    end_receives(engine, index, 1, CORRUPT);
    Op *op = peer->op != NULL ? peer->op : peer->early != NULL ? peer->early->op : NULL;
    if (op != NULL)
        end(engine, op, CORRUPT);
    if (peer->early != NULL)
        drop_early(peer, peer->early);
    peer->op = NULL, peer->early = NULL;
    end_all(engine, &peer->sends, CORRUPT);
    end_all(engine, &peer->offered, CORRUPT);
    end_all(engine, &peer->asking, CORRUPT);
    end_all(engine, &peer->asked, CORRUPT);
    if (engine->door >= 0)
        open_door(engine->door);
    if (atomic_load(&engine->sleepers))
        ring_threads(engine->bells);
}

static uint64_t room_left(const Ring *out)
{
    uint64_t used = between(out, atomic_load(&out->counts->read), out->own);
    return used == NONSENSE ? NONSENSE : out->room - used;
}

static void write_head(Ring *out, const Head *head, uint32_t kind)
{
    Head written = *head;
    written.kind = (uint16_t)kind;
    written.checksum = checksum_of(&written);
    copy_in(out, out->own, (const char *)&written, HEAD_BYTES);
    out->own += HEAD_BYTES;
}

/* Write the question of a receive for the offer that it has taken. */
static void ask(Engine *engine, Peer *peer, Op *op)
{
    Head head = {.tag = op->number, .nbytes = op->wanted};
    take_out(&peer->asking, op);
    if (op->refused) {
        head = op->head, head.tag = op->number;
        head.nbytes = op->wanted == ANY_LENGTH ? NO_LENGTH : op->wanted;
    }
    write_head(&peer->out, &head, op->refused ? REFUSE : ASK);
    if (op->refused)
        end(engine, op, op->refused);
    else
        append(&peer->asked, op);
}

/* Write the head of a message; return whether its bytes follow. */
static int begin(Peer *peer, Op *op)
{
    Ring *out = &peer->out;
    if (op->begun) /* the peer has asked for it */
        write_head(out, &(Head){.tag = op->number, .nbytes = op->head.nbytes}, ANSWER);
    else if (op->head.nbytes <= out->room - HEAD_BYTES &&
             atomic_load(&out->counts->kept) + HEAD_BYTES + ROUND_UP(op->head.nbytes) <= KEPT_RINGS * out->room)
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

/* Confirm that an offer is forgotten. */
static void confirm(Peer *peer)
{
    Number *forgotten = peer->forgotten;
    peer->forgotten = forgotten->next;
    write_head(&peer->out, &(Head){.tag = forgotten->number, .nbytes = NONSENSE}, REFUSE);
    free(forgotten);
}

/* Let the peer read all that it has been sent, also what it does not wait for. */
static void press(Peer *peer)
{
    atomic_store(&peer->out.counts->urgent, 1);
    ring_anyhow(peer->bells, peer->door);
}

/* Write as much as there is room for; return whether anything was. */
static int push(Engine *engine, int index)
{
    Peer *peer = &engine->peers[index];
    Ring *out = &peer->out;
    uint64_t before = out->own;
    int urgent = 0;
    while (peer->sends.first != NULL || peer->asking.first != NULL || peer->forgotten != NULL) {
        uint64_t left = room_left(out);
        if (left < LEAST_ROOM) {
            atomic_store(&out->counts->full, 1);
            left = room_left(out);
            if (left < LEAST_ROOM && peer->sends.first != NULL && peer->sends.first->control)
                press(peer);
        }
        if (left == NONSENSE) {
            fail(engine, index);
            return 1;
        }
        if (left < LEAST_ROOM)
            break;
        Op *op = peer->sends.first;
        uint64_t n = 0;
        int between_messages = op == NULL || op->begun != WRITING;
        if (between_messages && peer->asking.first != NULL)
            ask(engine, peer, peer->asking.first);
        else if (between_messages && peer->forgotten != NULL)
            confirm(peer);
        else if (op->control) {
            write_head(out, &op->head, op->control);
            take_out(&peer->sends, op);
            end(engine, op, DONE);
            urgent = 1;
        } else if (op->begun == WRITING || (left -= HEAD_BYTES, begin(peer, op))) {
            n = op->head.nbytes - op->moved;
            n = n < left ? n : left;
            n = n < PIECE_BYTES ? n : PIECE_BYTES;
            copy_in(out, out->own, op->bytes + op->moved, n);
            op->moved += n;
            out->own += ROUND_UP(n);
            if (op->moved == op->head.nbytes) {
                take_out(&peer->sends, op);
                end(engine, op, DONE);
            }
        }
        atomic_store(&out->counts->written, out->own);
        if (n == PIECE_BYTES)
            ring(peer->bells, peer->door);
        if (atomic_load(&engine->wanted))
            break;
    }
    if (out->own == before)
        return 0;
    if (urgent)
        press(peer);
    else
        ring(peer->bells, peer->door);
    return 1;
}

/* Whether two signatures disagree: in a part that both of them state. */
static int disagree(uint64_t mine, uint64_t theirs)
{
    const uint64_t parts[] = {0xFFFFFF0000000000, 0x000000FFFFF00000, 0x00000000000FFFFF};
    uint64_t difference = mine ^ theirs;
    for (int i = 0; difference != 0 && i < 3; i++)
        if (difference & parts[i] && mine & parts[i] && theirs & parts[i])
            return 1;
    return 0;
}

/* Find the first receive that matches a message, and remove it; `waits`: whether there are others for the peer. */
static Op *matching(Engine *engine, int index, const Head *head, int *waits)
{
    *waits = engine->peers[index].receiving || engine->from_any;
    for (Op *op = engine->receives[bucket(head->tag, head->lane)].first; op != NULL; op = op->next) {
        if ((op->peer != index && op->peer >= 0) || op->head.tag != head->tag || op->head.lane != head->lane)
            continue;
        op->met = 1;
        take_receive(engine, op);
        return op;
    }
    return NULL;
}

/* Note where the message of a receive comes from; return whether the receive asked for something else. */
static int differs(Op *op, int index, const Head *head)
{
    op->source = index;
    int other = disagree(op->head.fingerprint, head->fingerprint);
    if (!other && op->wanted == head->nbytes)
        return 0;
    op->theirs = *head;
    return other || op->wanted != ANY_LENGTH;
}

/* Let a receive take an offer. */
static void take_offer(Peer *peer, Op *op, uint64_t number, int differs)
{
    op->number = number;
    op->refused = differs ? MISMATCH : 0;
    append(&peer->asking, op);
}

/* Make room for the message that arrives; where there is no memory, receives that wait fail, and it is lost. */
static void keep_early(Engine *engine, Peer *peer, uint64_t number, uint64_t claim)
{
    const Head *head = &peer->head;
    Early *early = malloc(sizeof(Early) + (head->kind == WHOLE ? head->nbytes : 0));
    if (early == NULL) {
        end_receives(engine, (int)(peer - engine->peers), 1, NO_MEMORY);
        return;
    }
    early->next = NULL, early->op = NULL, early->head = *head, early->moved = 0, early->number = number;
    early->claim = claim;
    int64_t now = now_ns();
    engine->arrival_ns = now > engine->arrival_ns ? now : engine->arrival_ns + 1;
    early->since_ns = engine->arrival_ns;
    EarlyQueue *queue = &peer->early_in[bucket(head->tag, head->lane)];
    *(queue->last == NULL ? &queue->first : &queue->last->next) = early;
    queue->last = early;
    peer->early = head->kind == WHOLE ? early : NULL;
    peer->early_offers += head->kind == OFFER;
    count_kept(peer, peer->kept + kept_bytes(head));
    if (engine->probing && engine->door >= 0)
        open_door(engine->door);
}

/* Let a receive of any length meet a message, which is kept until its owner accepts it. */
static uint64_t claim(Engine *engine, Op *op)
{
    op->claim = ++engine->claims;
    end(engine, op, SIZED);
    return op->claim;
}

static void give_early(Engine *engine, Peer *peer, Early *early)
{
    memcpy(early->op->bytes, early->bytes, early->head.nbytes);
    end(engine, early->op, DONE);
    drop_early(peer, early);
}

static void finish_message(Engine *engine, Peer *peer)
{
    peer->coming = 0, engine->coming--;
    if (peer->op != NULL)
        end(engine, peer->op, DONE);
    else if (peer->early != NULL && peer->early->op != NULL)
        give_early(engine, peer, peer->early);
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
static int answered_offer(Engine *engine, Peer *peer)
{
    Op *op = numbered(&peer->offered, peer->head.tag);
    if (op == NULL || (peer->head.kind == REFUSE && peer->head.nbytes == NONSENSE && !op->withdrawn))
        return BAD;
    take_out(&peer->offered, op);
    op->begun = ASKED_FOR, op->met = 1;
    if (peer->head.kind == ASK)
        queue_send(&peer->sends, op);
    else if (peer->head.nbytes == NONSENSE)
        end(engine, op, WITHDRAWN);
    else {
        op->theirs = peer->head;
        end(engine, op, MISMATCH);
    }
    return ALONE;
}

/* The peer withdraws an offer, unless it has been answered already. */
static int offer_is_withdrawn(Peer *peer)
{
    Early *early = NULL;
    if (peer->head.tag >= peer->offers_in)
        return BAD;
    for (int i = 0; early == NULL && i < BUCKETS; i++)
        for (early = peer->early_in[i].first; early != NULL; early = early->next)
            if (early->head.kind == OFFER && early->number == peer->head.tag)
                break;
    if (early == NULL || early->claim)
        return ALONE;
    Number *forgotten = malloc(sizeof(Number));
    if (forgotten == NULL)
        return BAD;
    drop_early(peer, early);
    *forgotten = (Number){NULL, peer->head.tag};
    Number **last = &peer->forgotten;
    while (*last != NULL)
        last = &(*last)->next;
    *last = forgotten;
    return ALONE;
}

/* The bytes of one of its offers follow; those of a receive that was withdrawn go nowhere. */
static int answer_begins(Peer *peer)
{
    Op *op = numbered(&peer->asked, peer->head.tag);
    if (peer->head.tag >= peer->offers_in || (op != NULL && op->wanted != peer->head.nbytes))
        return BAD;
    if (op != NULL)
        take_out(&peer->asked, op);
    peer->op = op;
    return BYTES_FOLLOW;
}

/* A message, or the offer of one, is next. It stays in the ring if nobody needs anything of the peer. */
static int message_begins(Engine *engine, int index)
{
    Peer *peer = &engine->peers[index];
    const Head *head = &peer->head;
    int waits;
    if (head->kind == OFFER && peer->early_offers == MOST_OFFERS)
        return BAD;
    if (head->kind == WHOLE && (head->nbytes > peer->in.room - HEAD_BYTES ||
                                peer->kept + kept_bytes(head) > (KEPT_RINGS + 1) * peer->in.room))
        return BAD;
    Op *op = matching(engine, index, head, &waits);
    if (op == NULL && !waits && peer->offered.first == NULL && peer->asked.first == NULL && !peer->forced)
        return UNWANTED;
    uint64_t number = head->kind == OFFER ? peer->offers_in++ : 0;
    int other = op != NULL && differs(op, index, head);
    if (op == NULL)
        keep_early(engine, peer, number, 0);
    else if (!other && op->wanted == ANY_LENGTH)
        keep_early(engine, peer, number, claim(engine, op));
    else if (head->kind == OFFER)
        take_offer(peer, op, number, other);
    else if (other)
        end(engine, op, MISMATCH);
    else
        peer->op = op;
    return head->kind == OFFER ? ALONE : BYTES_FOLLOW;
}

static int head_arrives(Engine *engine, int index)
{
    Peer *peer = &engine->peers[index];
    if (peer->head.checksum != checksum_of(&peer->head) || peer->head.text_bytes > TEXT_BYTES)
        return BAD;
    switch (peer->head.kind) {
    case WHOLE:
    case OFFER:
        return message_begins(engine, index);
    case ASK:
    case REFUSE:
        return answered_offer(engine, peer);
    case ANSWER:
        return answer_begins(peer);
    case NOTE:
        return note_arrives(engine, index, &peer->head) ? ALONE : BAD;
    case FORGET:
        return offer_is_withdrawn(peer);
    default:
        return BAD;
    }
}

/* Read what has arrived, as far as anybody wants it; return whether anything was. */
static int pull(Engine *engine, int index)
{
    Peer *peer = &engine->peers[index];
    Ring *in = &peer->in;
    uint64_t before = in->own;
    if (engine->probing || (atomic_load(&in->counts->urgent) && atomic_exchange(&in->counts->urgent, 0)))
        peer->forced = 1; /* the urgent packets were written before the flag */
    for (;;) {
        uint64_t there = between(in, in->own, atomic_load(&in->counts->written));
        int head = BYTES_FOLLOW;
        if (there == 0) {
            peer->forced = 0;
            break;
        }
        if (there != NONSENSE && !peer->coming) {
            copy_out(in, in->own, (char *)&peer->head, HEAD_BYTES);
            head = there < HEAD_BYTES ? BAD : head_arrives(engine, index);
            if (head == UNWANTED)
                break;
            if (head == BYTES_FOLLOW)
                peer->coming = 1, engine->coming++, peer->moved = 0;
            in->own += HEAD_BYTES, there -= HEAD_BYTES;
        }
        if (there == NONSENSE || head == BAD) {
            fail(engine, index);
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
            finish_message(engine, peer);
        if (atomic_load(&in->counts->full)) {
            atomic_store(&in->counts->full, 0);
            ring(peer->bells, peer->door);
        }
        if (atomic_load(&engine->wanted))
            break;
    }
    return in->own != before;
}

/* -- Python's side ------------------------------------------------------------------------------------------------- */

static void Op_dealloc(Op *op)
{
    Py_XDECREF(op->keeps);
    Py_XDECREF(op->end.owner);
    PyTypeObject *type = Py_TYPE(op);
    type->tp_free(op);
    Py_DECREF(type);
}

static PyObject *Op_state(Op *op, void *unused)
{
    return PyLong_FromLong(atomic_load(&op->end.state));
}

/* The fingerprint, text and length of the other end, where they differ or were not known. */
static PyObject *Op_theirs(Op *op, void *unused)
{
    const Head *theirs = &op->theirs;
    return Py_BuildValue("Ky#K", (unsigned long long)theirs->fingerprint, theirs->text, (Py_ssize_t)theirs->text_bytes,
                         (unsigned long long)theirs->nbytes);
}

static PyGetSetDef Op_fields[] = {{"state", (getter)Op_state}, {"theirs", (getter)Op_theirs}, {NULL}};

static PyMemberDef Op_members[] = {{"source", T_INT, offsetof(Op, source), READONLY},
                                   {"met", T_INT, offsetof(Op, met), READONLY},
                                   {"queued", T_INT, offsetof(Op, end.queued), READONLY},
                                   {NULL}};

static PyType_Slot Op_slots[] = {
    {Py_tp_dealloc, Op_dealloc}, {Py_tp_getset, Op_fields}, {Py_tp_members, Op_members}, {0}};
PyType_Spec Op_spec = {"transports.shared_memory._native.Op", sizeof(Op), 0,
                              Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, Op_slots};
PyTypeObject *Op_type;

static Op *new_op(Engine *engine, int peer, uint64_t tag, unsigned long long address, uint64_t nbytes, PyObject *keeps)
{
    if (refuse_fork(engine))
        return NULL;
    if (peer < -1 || peer >= engine->size || (peer >= 0 && engine->peers[peer].bells == NULL)) {
        PyErr_SetString(PyExc_ValueError, "there is no way to this peer");
        return NULL;
    }
    if (start_spare(engine) < 0)
        return NULL;
    Op *op = PyObject_New(Op, Op_type);
    if (op == NULL)
        return NULL;
    memset((char *)op + offsetof(Op, end.next_ended), 0, sizeof(Op) - offsetof(Op, end.next_ended));
    op->keeps = Py_NewRef(keeps);
    op->bytes = nbytes ? (char *)(uintptr_t)address : op->head.text; /* memory of nothing may be NULL */
    op->peer = peer;
    op->head.tag = tag, op->head.nbytes = op->wanted = nbytes;
    return op;
}

/* Give an op its signature. Return -1 with an error if the text is too long. */
static int sign(Op *op, PyObject *fingerprint, PyObject *given)
{
    char *text;
    Py_ssize_t length;
    op->head.fingerprint = PyLong_AsUnsignedLongLongMask(fingerprint);
    if (PyErr_Occurred() || PyBytes_AsStringAndSize(given, &text, &length) < 0)
        return -1;
    if (length > TEXT_BYTES) {
        PyErr_Format(PyExc_ValueError, "the text of a signature has at most %d bytes, not %zd", TEXT_BYTES, length);
        return -1;
    }
    op->head.text_bytes = (uint16_t)length;
    memcpy(op->head.text, text, length);
    return 0;
}

/* Give an op its owner, if there is one. */
static void own(Op *op, PyObject *owner, int submitting)
{
    op->end.owner = Py_NewRef(owner);
    op->end.submitting = submitting;
    op->end.heavy = op->wanted > PIECE_BYTES && op->wanted != ANY_LENGTH;
}

/* Return the address of a buffer, or the number that is given instead of one. */
static unsigned long long address_in(PyObject *address, PyObject *keeps, int written)
{
    Py_buffer buffer;
    if (address != Py_None)
        return PyLong_AsUnsignedLongLong(address);
    if (PyObject_GetBuffer(keeps, &buffer, written ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
        return 0;
    unsigned long long found = (uintptr_t)buffer.buf;
    PyBuffer_Release(&buffer); /* `keeps` holds it */
    return found;
}

static long clamped(PyObject *given)
{
    int beyond;
    long found = PyLong_AsLongAndOverflow(given, &beyond);
    return beyond ? beyond * LONG_MAX : found;
}

static void begin_send(Engine *engine, Op *op)
{
    Peer *to = &engine->peers[op->peer];
    begin_end(engine, &op->end);
    if (to->corrupt || to->lost)
        end(engine, op, to->corrupt ? CORRUPT : LOST);
    else {
        queue_send(&to->sends, op);
        if (to->sends.first == op)
            push(engine, op->peer);
        if (op->control && atomic_load(&op->end.state) == PENDING)
            press(to); /* it waits behind a message that is half written, and that the peer may not want */
    }
}

/* Begin an op of the peer, once it has been made; return it. */
static PyObject *start(Engine *engine, Op *op, void (*begin)(Engine *engine, Op *op))
{
    int at_once;
    Py_INCREF(op); /* as long as it is pending */
    Py_BEGIN_ALLOW_THREADS
    lock(engine);
    engine->promised = atomic_exchange(&engine->promises, 0);
    begin(engine, op);
    attend(engine);
    at_once = op->end.submitting == ENDED_AT_ONCE; /* then nobody else knows it, and nobody waits for it */
    op->end.submitting = 0;
    engine->promised &= !at_once;
    unlock(engine);
    Py_END_ALLOW_THREADS
    if (at_once) {
        Py_CLEAR(op->end.owner);
        Py_DECREF(op);
    }
    release_ended(engine);
    return (PyObject *)op;
}

PyObject *Engine_send(Engine *engine, PyObject *const *args, Py_ssize_t count)
{
    if (count != 7 && count != 10)
        return PyErr_Format(PyExc_TypeError, "send takes 7 arguments or 10");
    int peer = (int)PyLong_AsLong(args[0]);
    uint64_t tag = PyLong_AsUnsignedLongLongMask(args[1]);
    unsigned long long address = address_in(args[4], args[6], 0);
    uint64_t nbytes = PyLong_AsUnsignedLongLong(args[5]);
    uint64_t lane = count == 10 ? PyLong_AsUnsignedLongLong(args[7]) : 0;
    long priority = count == 10 ? clamped(args[8]) : 0;
    if (PyErr_Occurred())
        return NULL;
    Op *op = peer < 0 ? (PyErr_SetString(PyExc_ValueError, "a send has one peer"), NULL)
                      : new_op(engine, peer, tag, address, nbytes, args[6]);
    if (op == NULL || sign(op, args[2], args[3]) < 0) {
        Py_XDECREF(op);
        return NULL;
    }
    op->head.lane = lane, op->priority = priority;
    if (count == 10)
        own(op, args[9], SUBMITTING);
    return start(engine, op, begin_send);
}

/* note(peer, word, word, word[, owner]): write three integers for a peer, whose event loop takes them. */
PyObject *Engine_note(Engine *engine, PyObject *const *args, Py_ssize_t count)
{
    if (count != 4 && count != 5)
        return PyErr_Format(PyExc_TypeError, "note takes a peer, three integers, and an owner");
    int peer = (int)PyLong_AsLong(args[0]);
    uint64_t words[3];
    for (int i = 0; i < 3; i++)
        words[i] = PyLong_AsUnsignedLongLongMask(args[1 + i]);
    Op *op = PyErr_Occurred() ? NULL : new_op(engine, peer, words[0], 0, 0, Py_None);
    if (op == NULL)
        return NULL;
    op->control = NOTE, op->priority = LONG_MIN;
    op->head.lane = words[1], op->head.nbytes = words[2];
    if (count == 5)
        own(op, args[4], SUBMITTING);
    return start(engine, op, begin_send);
}

/* Return the oldest message for a receive that is here, and where it comes from; NULL: there is none. */
static Early *early_for(Engine *engine, Op *op, int *from)
{
    Early *oldest = NULL;
    for (int i = 0; i < engine->size; i++) {
        if (op->peer >= 0 && op->peer != i)
            continue;
        for (Early *early = engine->peers[i].early_in[bucket(op->head.tag, op->head.lane)].first; early != NULL;
             early = early->next)
            if (early->head.tag == op->head.tag && early->head.lane == op->head.lane && early->op == NULL &&
                early->claim == op->claim) {
                if (oldest == NULL || early->since_ns < oldest->since_ns)
                    oldest = early, *from = i;
                break;
            }
    }
    return oldest;
}

static void take_early(Engine *engine, Op *op, int from, Early *early)
{
    Peer *peer = &engine->peers[from];
    int other = differs(op, from, &early->head);
    op->met = 1;
    if (!other && op->wanted == ANY_LENGTH) {
        early->claim = claim(engine, op);
        return;
    }
    if (early->head.kind == WHOLE && !other) {
        early->op = op;
        if (peer->early != early)
            give_early(engine, peer, early);
        return;
    }
    if (early->head.kind == OFFER && (peer->corrupt || peer->lost))
        end(engine, op, peer->corrupt ? CORRUPT : LOST);
    else if (early->head.kind == OFFER)
        take_offer(peer, op, early->number, other);
    else
        end(engine, op, MISMATCH);
    if (peer->early == early)
        peer->early = NULL; /* the rest of it goes nowhere */
    drop_early(peer, early);
}

/* Return a peer that has written nonsense, if a receive may wait for it; else -1. */
static int corrupt_peer(Engine *engine, int peer)
{
    for (int i = 0; i < engine->size; i++)
        if (engine->peers[i].corrupt && (peer < 0 || peer == i))
            return i;
    return -1;
}

static void begin_receive(Engine *engine, Op *op)
{
    int from = -1;
    begin_end(engine, &op->end);
    Early *early = early_for(engine, op, &from);
    if (early != NULL)
        take_early(engine, op, from, early);
    else if ((from = corrupt_peer(engine, op->peer)) >= 0) {
        op->source = from;
        end(engine, op, CORRUPT);
    } else if (op->peer >= 0 && (engine->peers[op->peer].lost || op->claim))
        end(engine, op, LOST);
    else
        queue_receive(engine, op);
}

/* receive(peer, tag, fingerprint, text, address, nbytes, keeps[, lane, owner]) */
PyObject *Engine_receive(Engine *engine, PyObject *const *args, Py_ssize_t count)
{
    if (count != 7 && count != 9)
        return PyErr_Format(PyExc_TypeError, "receive takes 7 arguments or 9");
    int peer = (int)PyLong_AsLong(args[0]);
    uint64_t tag = PyLong_AsUnsignedLongLongMask(args[1]);
    uint64_t nbytes = PyLong_AsUnsignedLongLong(args[5]);
    unsigned long long address = nbytes == ANY_LENGTH ? 0 : address_in(args[4], args[6], 1);
    uint64_t lane = count == 9 ? PyLong_AsUnsignedLongLong(args[7]) : 0;
    if (PyErr_Occurred())
        return NULL;
    Op *op = new_op(engine, peer, tag, address, nbytes, args[6]);
    if (op == NULL || sign(op, args[2], args[3]) < 0) {
        Py_XDECREF(op);
        return NULL;
    }
    op->head.lane = lane;
    if (count == 9)
        own(op, args[8], SUBMITTING_IN_ORDER);
    return start(engine, op, begin_receive);
}

/* accept(op, address, keeps[, owner]): receive the message that a SIZED receive has met; without memory, refuse it. */
PyObject *Engine_accept(Engine *engine, PyObject *const *args, Py_ssize_t count)
{
    if ((count != 3 && count != 4) || Py_TYPE(args[0]) != Op_type || ((Op *)args[0])->claim == 0)
        return PyErr_Format(PyExc_TypeError, "accept takes a receive that is SIZED, an address, its memory, and an owner");
    const Op *sized = (Op *)args[0];
    int refused = args[2] == Py_None;
    unsigned long long address = refused ? 0 : address_in(args[1], args[2], 1);
    Op *op = PyErr_Occurred() ? NULL
                              : new_op(engine, sized->source, sized->head.tag, address, sized->theirs.nbytes, args[2]);
    if (op == NULL)
        return NULL;
    op->head = sized->head, op->claim = sized->claim;
    op->head.nbytes = op->wanted;
    if (refused)
        op->wanted = NO_LENGTH;
    if (count == 4)
        own(op, args[3], SUBMITTING_IN_ORDER);
    return start(engine, op, begin_receive);
}

/* Give a rank's end up, if nothing has met it; False if that is still open, or something has: then it goes on. */
static int withdraw_owned(Engine *engine, Op *op, Op *forget)
{
    int found = take_receive(engine, op);
    for (int i = 0; !found && i < engine->size; i++) {
        Peer *peer = &engine->peers[i];
        if (holds(&peer->offered, op) && !op->withdrawn) {
            op->withdrawn = 1;
            forget->peer = i, forget->head.tag = op->number;
            begin_send(engine, forget);
            return 0;
        }
        if (op->begun == WRITING && holds(&peer->sends, op)) { /* it is sent, once the peer has read what is before it */
            press(peer);
            return 0;
        }
        found = !op->begun && take_out(&peer->sends, op);
    }
    if (found)
        end(engine, op, WITHDRAWN);
    return found;
}

/* Give an end up; False if a message is offered or half written, which must go on. What is half read goes nowhere. */
static int withdraw(Engine *engine, Op *op)
{
    int found = take_receive(engine, op);
    for (int i = 0; !found && i < engine->size; i++) {
        Peer *peer = &engine->peers[i];
        if (holds(&peer->offered, op) || (op->begun && holds(&peer->sends, op)))
            return 0;
        if (holds(&peer->asking, op)) {
            op->refused = WITHDRAWN; /* it ends so when the sender can be notified */
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
        end(engine, op, WITHDRAWN);
    return 1;
}

PyObject *Engine_withdraw(Engine *engine, PyObject *given)
{
    if (Py_TYPE(given) != Op_type)
        return PyErr_Format(PyExc_TypeError, "withdraw takes an Op");
    Op *op = (Op *)given, *forget = NULL;
    int gone;
    if (engine->pid != getpid())
        Py_RETURN_TRUE;
    if (op->end.owner != NULL) {
        forget = new_op(engine, -1, 0, 0, 0, Py_None);
        if (forget == NULL)
            return NULL;
        forget->control = FORGET, forget->priority = LONG_MIN;
    }
    Py_BEGIN_ALLOW_THREADS
    lock(engine);
    gone = atomic_load(&op->end.state) != PENDING || (forget ? withdraw_owned(engine, op, forget) : withdraw(engine, op));
    if (atomic_load(&engine->sleepers))
        ring_threads(engine->bells);
    unlock(engine);
    Py_END_ALLOW_THREADS
    if (forget != NULL && forget->peer < 0)
        Py_DECREF(forget); /* it was not needed */
    release_ended(engine);
    return PyBool_FromLong(gone);
}

/* End everything under way with a lost peer, after all packets that it has written. */
static void lose(Engine *engine, int index)
{
    Peer *peer = &engine->peers[index];
    if (!peer->corrupt && !peer->lost)
        do
            peer->forced = 1;
        while (pull(engine, index) && peer->forced && !peer->corrupt);
    peer->lost = 1;
    engine->coming -= peer->coming, peer->coming = 0;
    Op *op = peer->op != NULL ? peer->op : peer->early != NULL ? peer->early->op : NULL;
    if (op != NULL)
        end(engine, op, LOST);
    if (peer->early != NULL)
        drop_early(peer, peer->early);
    peer->op = NULL, peer->early = NULL;
    end_receives(engine, index, 0, LOST);
    end_all(engine, &peer->sends, LOST);
    end_all(engine, &peer->offered, LOST);
    end_all(engine, &peer->asking, LOST);
    end_all(engine, &peer->asked, LOST);
}

/* lose(peer): its process is gone. */
PyObject *Engine_lose(Engine *engine, PyObject *given)
{
    long index = PyLong_AsLong(given);
    if (index < 0 || index >= engine->size)
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "there is no peer %ld", index);
    if (refuse_fork(engine))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    lock(engine);
    if (engine->peers[index].bells != NULL)
        lose(engine, (int)index);
    if (atomic_load(&engine->sleepers))
        ring_threads(engine->bells);
    unlock(engine);
    Py_END_ALLOW_THREADS
    release_ended(engine);
    Py_RETURN_NONE;
}

int progress_messages(Engine *engine)
{
    int moved = 0;
    engine->turn = engine->turn + 1 < engine->size ? engine->turn + 1 : 0;
    for (int i = 0; i < engine->size; i++) {
        int index = (engine->turn + i) % engine->size;
        Peer *peer = &engine->peers[index];
        if (peer->bells == NULL || peer->corrupt || peer->lost)
            continue;
        if (engine->receiving || peer->coming || peer->offered.first != NULL || peer->asked.first != NULL ||
            peer->forced || engine->probing || atomic_load(&peer->in.counts->urgent))
            moved |= pull(engine, index);
        if (peer->sends.first != NULL || peer->asking.first != NULL || peer->forgotten != NULL) /* `pull` adds to them */
            moved |= push(engine, index);
    }
    return moved;
}

/* probe(on): somebody wants to know of messages that no receive waits for, or does so no more. */
PyObject *Engine_probe(Engine *engine, PyObject *on)
{
    if (engine->pid == getpid()) {
        if (start_spare(engine) < 0)
            return NULL;
        Py_BEGIN_ALLOW_THREADS
        lock(engine);
        engine->probing += on == Py_True ? 1 : -1;
        unlock(engine);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

typedef struct {
    int64_t since_ns;
    int peer;
    Head head;
} Announced;

/* Copy the unmatched messages for a rank; return their number. */
static size_t copy_announced(Engine *engine, uint32_t rank, Announced *copies, size_t room)
{
    size_t count = 0;
    for (int i = 0; i < engine->size * BUCKETS; i++)
        for (const Early *early = engine->peers[i / BUCKETS].early_in[i % BUCKETS].first; early != NULL; early = early->next)
            if (early->op == NULL && early->claim == 0 && (uint32_t)early->head.lane == rank &&
                count++ < room)
                copies[count - 1] = (Announced){early->since_ns, i / BUCKETS, early->head};
    return count;
}

/* announced(rank): return (since_ns, peer, lane, tag, nbytes, fingerprint, text) of each unmatched message for a rank, which is the lower
   half of its lane; since_ns is the time of its arrival, different for each message. */
PyObject *Engine_announced(Engine *engine, PyObject *rank)
{
    unsigned long wanted = PyLong_AsUnsignedLong(rank);
    Announced *copies = NULL;
    size_t room = 0, count;
    PyObject *found = PyErr_Occurred() ? NULL : PyList_New(0);
    if (found == NULL || engine->pid != getpid())
        return found;
    Py_BEGIN_ALLOW_THREADS
    lock(engine);
    engine->probing++;
    attend(engine);
    engine->probing--;
    count = copy_announced(engine, (uint32_t)wanted, NULL, 0);
    copies = count ? malloc(count * sizeof(Announced)) : NULL;
    if (copies != NULL)
        room = copy_announced(engine, (uint32_t)wanted, copies, count);
    unlock(engine);
    Py_END_ALLOW_THREADS
    if (count && copies == NULL)
        PyErr_NoMemory();
    for (size_t i = 0; i < room && !PyErr_Occurred(); i++) {
        const Head *head = &copies[i].head;
        PyObject *words = Py_BuildValue(
            "LiKKKKy#", (long long)copies[i].since_ns, copies[i].peer, (unsigned long long)head->lane,
            (unsigned long long)head->tag, (unsigned long long)head->nbytes, (unsigned long long)head->fingerprint,
            head->text, (Py_ssize_t)head->text_bytes);
        if (words != NULL)
            PyList_Append(found, words);
        Py_XDECREF(words);
    }
    free(copies);
    if (PyErr_Occurred())
        Py_CLEAR(found);
    release_ended(engine);
    return found;
}

static void release_queue(Queue *queue)
{
    for (Op *op = queue->first, *next; op != NULL; op = next) {
        next = op->next;
        Py_CLEAR(op->end.owner);
        Py_DECREF(op);
    }
}

void release_messages(Engine *engine)
{
    for (int i = 0; i < BUCKETS; i++)
        release_queue(&engine->receives[i]);
    for (int i = 0; i < engine->size; i++) {
        Peer *peer = &engine->peers[i];
        release_queue(&peer->sends);
        release_queue(&peer->offered);
        release_queue(&peer->asking);
        release_queue(&peer->asked);
        Py_XDECREF(peer->op);
        for (Number *forgotten; (forgotten = peer->forgotten) != NULL; free(forgotten))
            peer->forgotten = forgotten->next;
        for (int k = 0; k < BUCKETS; k++)
            for (Early *early; (early = peer->early_in[k].first) != NULL; drop_early(peer, early))
                Py_XDECREF(early->op);
    }
}
