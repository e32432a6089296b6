/* Ends of messages and collectives, and notification of their owners.

   The caller of an end without an owner looks at it. An end with an owner is queued for the event loop, which is woken
   unless a thread waits for the end: the thread then removes it from the queue, or, if it was interrupted, the loop
   finds it before it sleeps again. An end within the call that began it is not queued. */

#include "engine.h"

/* Note that an end is under way. */
void begin_end(Engine *engine, End *end)
{
    engine->pending++;
    engine->owned += end->owner != NULL;
    engine->heavy += end->heavy;
}

void finish(Engine *engine, End *end, int state)
{
    int at_once = end->submitting == SUBMITTING || (end->submitting && engine->first_over == NULL && !engine->delivering);
    engine->pending--;
    engine->heavy -= end->heavy;
    end->queued = end->owner != NULL && !at_once;
    atomic_store(&end->state, state);
    if (end->owner == NULL) {
        End *first = atomic_load(&engine->ended);
        do
            end->next_ended = first;
        while (!atomic_compare_exchange_weak(&engine->ended, &first, end)); /* others only take all of them */
        return;
    }
    engine->owned--;
    if (at_once) {
        end->submitting = ENDED_AT_ONCE;
        return;
    }
    end->next_over = NULL;
    if (engine->last_over == NULL)
        engine->first_over = end;
    else
        engine->last_over->next_over = end;
    engine->last_over = end;
    if (!atomic_load(&end->waited) && !engine->taking && engine->door >= 0)
        open_door(engine->door);
}

/* Keep three integers of a peer for the event loop; return 0 if there is no room. */
int note_arrives(Engine *engine, int peer, const Head *head)
{
    Note *note = engine->notes < MOST_NOTES ? malloc(sizeof(Note)) : NULL;
    if (note == NULL)
        return 0;
    *note = (Note){NULL, peer, {head->tag, head->lane, head->nbytes}};
    if (engine->last_note == NULL)
        engine->first_note = note;
    else
        engine->last_note->next = note;
    engine->last_note = note, engine->notes++;
    if (!engine->taking && engine->door >= 0)
        open_door(engine->door);
    return 1;
}

static void release_end(End *end)
{
    Py_CLEAR(end->owner);
    Py_DECREF(end);
}

void release_over(Engine *engine)
{
    for (End *end = engine->first_over, *next; end != NULL; end = next)
        next = end->next_over, release_end(end);
    for (Note *note = engine->first_note, *next; note != NULL; note = next)
        next = note->next, free(note);
}

static int append_note(PyObject *list, const Note *note)
{
    PyObject *words = Py_BuildValue("iKKK", note->peer, (unsigned long long)note->words[0],
                                    (unsigned long long)note->words[1], (unsigned long long)note->words[2]);
    int failed = words == NULL || PyList_Append(list, words) < 0;
    Py_XDECREF(words);
    return failed;
}

/* Return the owners of what has ended and no thread has waited for, and what peers have noted: each in its order. Until
   it returns no owner, those of the last call are being told: what ends in order meanwhile is for the next call. */
PyObject *Engine_take_ended(Engine *engine, PyObject *unused)
{
    End *ended = NULL;
    Note *notes = NULL;
    PyObject *owners = PyList_New(0), *words = PyList_New(0);
    if (owners == NULL || words == NULL) {
        Py_XDECREF(owners);
        Py_XDECREF(words);
        return NULL;
    }
    if (engine->pid == getpid()) {
        Py_BEGIN_ALLOW_THREADS
        lock(engine);
        engine->taking = 1;
        attend(engine);
        engine->taking = 0;
        ended = engine->first_over, notes = engine->first_note;
        engine->first_over = engine->last_over = NULL, engine->first_note = engine->last_note = NULL;
        engine->notes = 0, engine->delivering = ended != NULL;
        unlock(engine);
        Py_END_ALLOW_THREADS
    }
    for (End *end = ended; end != NULL; end = ended) {
        ended = end->next_over, end->queued = 0;
        if (PyList_Append(owners, end->owner) < 0)
            PyErr_WriteUnraisable(NULL);
        release_end(end);
    }
    for (Note *note = notes; note != NULL; note = notes) {
        notes = note->next;
        if (append_note(words, note))
            PyErr_WriteUnraisable(NULL);
        free(note);
    }
    return Py_BuildValue("NN", owners, words);
}

/* forget(op or run): its owner knows of its end. */
PyObject *Engine_forget(Engine *engine, PyObject *given)
{
    if (Py_TYPE(given) != Op_type && Py_TYPE(given) != Run_type)
        return PyErr_Format(PyExc_TypeError, "forget takes an Op or a Run");
    End *end = (End *)given;
    int there = 0;
    if (engine->pid != getpid())
        Py_RETURN_NONE;
    Py_BEGIN_ALLOW_THREADS
    lock(engine);
    End *before = NULL, *at = engine->first_over;
    while (at != NULL && at != end)
        before = at, at = at->next_over;
    if (at != NULL) {
        there = 1;
        *(before == NULL ? &engine->first_over : &before->next_over) = end->next_over;
        if (engine->last_over == end)
            engine->last_over = before;
        end->queued = 0;
    }
    pthread_mutex_unlock(&engine->lock);
    Py_END_ALLOW_THREADS
    if (there)
        release_end(end);
    Py_RETURN_NONE;
}
