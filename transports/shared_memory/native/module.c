/* The engine and its types as Python has them. */

#include "engine.h"

PyTypeObject *Engine_type;

/* A fork shares the rings, but not the counts of this process. */
int refuse_fork(Engine *engine)
{
    if (engine->pid != getpid())
        PyErr_SetString(PyExc_RuntimeError, "this process is a fork of the one that has this engine");
    return engine->pid != getpid();
}

void release_ended(Engine *engine)
{
    End *ended = atomic_exchange(&engine->ended, NULL);
    while (ended != NULL) {
        End *next = ended->next_ended;
        Py_DECREF(ended);
        ended = next;
    }
}

/* wait(op or run, seconds[, longest look in seconds]): return the state of it, once it has ended or time is up. */
static PyObject *Engine_wait(Engine *engine, PyObject *const *args, Py_ssize_t count)
{
    if (count < 2 || count > 3 || (Py_TYPE(args[0]) != Op_type && Py_TYPE(args[0]) != Run_type))
        return PyErr_Format(PyExc_TypeError, "wait takes an Op or a Run, and seconds");
    End *end = (End *)args[0];
    double seconds = PyFloat_AsDouble(args[1]), look_s = count == 3 ? PyFloat_AsDouble(args[2]) : 0;
    if (PyErr_Occurred())
        return NULL;
    if (engine->pid == getpid()) { /* a fork shares the rings */
        if (atomic_load(&end->state) == PENDING) {
            int64_t limit_ns = seconds < 1e9 ? (int64_t)(seconds * 1e9) : INT64_MAX / 4;
            int64_t look_ns = count == 3 ? (int64_t)(look_s * 1e9) : engine->look_ns;
            Py_BEGIN_ALLOW_THREADS
            wait_for(engine, end, limit_ns, look_ns);
            Py_END_ALLOW_THREADS
        }
        release_ended(engine);
    }
    return PyLong_FromLong(atomic_load(&end->state));
}

/* loop(awake): the event loop has woken, or is about to sleep. */
static PyObject *Engine_loop(Engine *engine, PyObject *awake)
{
    if (engine->pid == getpid()) {
        pthread_mutex_lock(&engine->lock); /* short, and never while bytes are moved */
        engine->awake = awake == Py_True;
        engine->promised = 0; /* the thread that promised to wait may have been interrupted */
        if (awake == Py_False && engine->first_over != NULL && engine->door >= 0)
            open_door(engine->door); /* nobody waits for it any more */
        unlock(engine);
    }
    Py_RETURN_NONE;
}

/* promise(): the next message is waited for at once, so nobody need be woken for what comes before. */
static PyObject *Engine_promise(Engine *engine, PyObject *unused)
{
    atomic_store(&engine->promises, 1);
    Py_RETURN_NONE;
}

static PyObject *Engine_close(Engine *engine, PyObject *unused)
{
    atomic_store(&engine->closing, 1);
    if (engine->spare_runs && engine->pid == getpid()) {
        engine->spare_runs = 0;
        Py_BEGIN_ALLOW_THREADS
        join_spare(engine);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

static void Engine_dealloc(Engine *engine)
{
    PyTypeObject *type = Py_TYPE(engine);
    if (engine->pid == getpid()) {
        Py_XDECREF(Engine_close(engine, NULL));
        release_ended(engine);
        release_messages(engine);
        release_runs(engine);
        release_over(engine);
        for (int i = 0; i < engine->held; i++)
            PyBuffer_Release(&engine->buffers[i]);
        PyMem_Free(engine->buffers);
        PyMem_Free(engine->peers);
        pthread_mutex_destroy(&engine->lock);
        pthread_mutex_destroy(&engine->next);
    }
    type->tp_free(engine);
    Py_DECREF(type);
}

char *taken(Engine *engine, PyObject *memory, Py_ssize_t least)
{
    Py_buffer *buffer = &engine->buffers[engine->held];
    if (PyObject_GetBuffer(memory, buffer, PyBUF_WRITABLE) < 0)
        return NULL;
    engine->held++;
    if (buffer->len < least || (uintptr_t)buffer->buf % LINE) {
        PyErr_SetString(PyExc_ValueError, "the memory of an engine is too small, or lies at an odd place");
        return NULL;
    }
    return buffer->buf;
}

static int take_ring(Engine *engine, PyObject *memory, Ring *ring)
{
    char *start = taken(engine, memory, COUNTS_BYTES + 2 * LEAST_ROOM);
    if (start == NULL)
        return -1;
    ring->counts = (Counts *)start;
    ring->bytes = start + COUNTS_BYTES;
    ring->room = (uint64_t)(engine->buffers[engine->held - 1].len - COUNTS_BYTES) & ~(uint64_t)(LINE - 1);
    return 0;
}

static PyObject *Engine_new(PyTypeObject *type, PyObject *args, PyObject *names)
{
    PyObject *own, *peers;
    double look_s;
    int door = -1, most = 1, yields = 0, cores = 1;
    if (!PyArg_ParseTuple(args, "OO!d|iiii", &own, &PyList_Type, &peers, &look_s, &door, &most, &yields, &cores))
        return NULL;
    Engine *engine = (Engine *)type->tp_alloc(type, 0);
    if (engine == NULL)
        return NULL;
    engine->pid = getpid();
    pthread_mutex_init(&engine->lock, NULL);
    pthread_mutex_init(&engine->next, NULL);
    engine->look_ns = (int64_t)(look_s * 1e9);
    engine->door = door, engine->most = most, engine->yields = yields, engine->cores = cores;
    int size = (int)PyList_GET_SIZE(peers);
    engine->peers = PyMem_Calloc(size ? size : 1, sizeof(Peer));
    engine->buffers = PyMem_Calloc(3 * size + 1, sizeof(Py_buffer));
    if (engine->peers == NULL || engine->buffers == NULL) {
        Py_DECREF(engine);
        return PyErr_NoMemory();
    }
    engine->size = size;
    engine->bells = (Bells *)taken(engine, own, sizeof(Bells));
    for (int i = 0; engine->bells != NULL && i < size; i++) {
        PyObject *out, *in, *theirs, *each = PyList_GET_ITEM(peers, i);
        Peer *peer = &engine->peers[i];
        if (each == Py_None)
            continue;
        peer->door = -1;
        if (!PyArg_ParseTuple(each, "OOO|i", &out, &in, &theirs, &peer->door) || take_ring(engine, out, &peer->out) < 0 ||
            take_ring(engine, in, &peer->in) < 0 || (peer->bells = (Bells *)taken(engine, theirs, sizeof(Bells))) == NULL)
            break;
    }
    if (PyErr_Occurred()) {
        Py_DECREF(engine);
        return NULL;
    }
    return (PyObject *)engine;
}

static PyMethodDef Engine_methods[] = {
    {"send", (PyCFunction)(void (*)(void))Engine_send, METH_FASTCALL,
     "send(peer, tag, fingerprint, text, address, nbytes, keeps[, lane, priority, owner])"},
    {"receive", (PyCFunction)(void (*)(void))Engine_receive, METH_FASTCALL,
     "receive(peer, tag, fingerprint, text, address, nbytes, keeps[, lane, owner])"},
    {"accept", (PyCFunction)(void (*)(void))Engine_accept, METH_FASTCALL, "accept(op, address, keeps[, owner])"},
    {"note", (PyCFunction)(void (*)(void))Engine_note, METH_FASTCALL, "note(peer, word, word, word)"},
    {"probe", (PyCFunction)Engine_probe, METH_O, "probe(on)"},
    {"announced", (PyCFunction)Engine_announced, METH_O, "announced(rank)"},
    {"wait", (PyCFunction)(void (*)(void))Engine_wait, METH_FASTCALL, "wait(end, seconds[, look_s])"},
    {"withdraw", (PyCFunction)Engine_withdraw, METH_O, "withdraw(op)"},
    {"lose", (PyCFunction)Engine_lose, METH_O, "lose(peer)"},
    {"submit", (PyCFunction)(void (*)(void))Engine_submit, METH_FASTCALL,
     "submit(board, table, owner, number, tag, source, target, priority, home, how[, fingerprint, text])"},
    {"loop", (PyCFunction)Engine_loop, METH_O, "loop(awake)"},
    {"promise", (PyCFunction)Engine_promise, METH_NOARGS, "promise()"},
    {"cancel", (PyCFunction)Engine_cancel, METH_O, "cancel(run)"},
    {"forget", (PyCFunction)Engine_forget, METH_O, "forget(end)"},
    {"take_ended", (PyCFunction)Engine_take_ended, METH_NOARGS, "take_ended()"},
    {"close", (PyCFunction)Engine_close, METH_NOARGS, "close()"},
    {NULL}};

static PyType_Slot Engine_slots[] = {
    {Py_tp_new, Engine_new}, {Py_tp_dealloc, Engine_dealloc}, {Py_tp_methods, Engine_methods}, {0}};
static PyType_Spec Engine_spec = {"transports.shared_memory._native.Engine", sizeof(Engine), 0, Py_TPFLAGS_DEFAULT,
                                   Engine_slots};

static int add(PyObject *module, PyType_Spec *spec, const char *name, PyTypeObject **type)
{
    *type = (PyTypeObject *)PyType_FromSpec(spec);
    return *type == NULL ? -1 : PyModule_AddObjectRef(module, name, (PyObject *)*type);
}

static int execute(PyObject *module)
{
    return add(module, &Op_spec, "Op", &Op_type) < 0 || add(module, &Run_spec, "Run", &Run_type) < 0 ||
                   add(module, &Board_spec, "Board", &Board_type) < 0 ||
                   add(module, &Table_spec, "Table", &Table_type) < 0 ||
                   add(module, &Engine_spec, "Engine", &Engine_type) < 0 ||
                   PyModule_AddIntConstant(module, "INTERFACE", 5) < 0 // as engine.py: changed with what Python uses
               ? -1
               : 0;
}

static PyObject *copy(PyObject *module, PyObject *args)
{
    Py_buffer target, source;
    if (!PyArg_ParseTuple(args, "w*y*", &target, &source))
        return NULL;
    int fits = target.len == source.len;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        copy_uncached(target.buf, source.buf, source.len);
        Py_END_ALLOW_THREADS
    } else
        PyErr_Format(PyExc_ValueError, "%zd bytes do not fill %zd", source.len, target.len);
    PyBuffer_Release(&target);
    PyBuffer_Release(&source);
    return fits ? Py_NewRef(Py_None) : NULL;
}

/* The beginning of what `__array_struct__` points to, which is a part of numpy's public interface. */
typedef struct {
    int two, nd;
    char kind;
    int itemsize, flags;
    Py_intptr_t *shape, *strides;
    void *data;
} ArrayStruct;

/* address_of(array): where its first element lies. From `__array_interface__` it would take ten times as long. */
static PyObject *address_of(PyObject *module, PyObject *array)
{
    PyObject *capsule = PyObject_GetAttrString(array, "__array_struct__");
    const ArrayStruct *there = capsule == NULL ? NULL : PyCapsule_GetPointer(capsule, NULL);
    PyObject *address = there == NULL ? NULL : PyLong_FromVoidPtr(there->data);
    Py_XDECREF(capsule);
    return address;
}

static PyMethodDef functions[] = {{"address_of", address_of, METH_O, "address_of(array)"},
                                  {"copy_uncached", copy, METH_VARARGS, "copy_uncached(target, source)"},
                                  {NULL}};

static PyModuleDef_Slot slots[] = {{Py_mod_exec, execute}, {0}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", NULL, 0, functions, slots};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModuleDef_Init(&definition);
}