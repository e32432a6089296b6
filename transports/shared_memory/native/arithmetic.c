/* Reductions with the bits of numpy: its own inner loops, called by pointer, and for types of 16 bits sums in float32.
   And a copy that bypasses the caches.

   Everything here works on bytes that lie one behind the other, and touches nothing of Python's. Contraction of a
   product and a sum to one operation is switched off by the build, for it has other bits. */

#include "engine.h"
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define BLOCK 2048 /* elements that are widened at once, on the stack */

/* The beginning of numpy's PyUFuncObject, which is a part of its public interface. */
typedef struct {
    PyObject_HEAD
    int nin, nout, nargs, identity;
    Loop **functions;
    void **data;
    int ntypes, reserved;
    const char *name, *types;
} UFunc;

/* Find the loop of a ufunc of two arguments for one dtype, by its number. */
static int find_loop(PyObject *given, int number, Loop **loop, void **data)
{
    UFunc *ufunc = (UFunc *)given;
    PyObject *kinds = PyObject_GetAttrString(given, "ntypes");
    long ntypes = kinds == NULL ? -1 : PyLong_AsLong(kinds);
    Py_XDECREF(kinds);
    if (PyErr_Occurred())
        return -1;
    if (ntypes == ufunc->ntypes && ufunc->nin == 2 && ufunc->nout == 1)
        for (int i = 0; i < ufunc->ntypes; i++) {
            const char *types = ufunc->types + 3 * i;
            if (types[0] == number && types[1] == number && types[2] == number && ufunc->functions[i] != NULL) {
                *loop = ufunc->functions[i];
                *data = ufunc->data == NULL ? NULL : ufunc->data[i];
                return 0;
            }
        }
    PyErr_SetString(PyExc_LookupError, "this ufunc has no loop for the dtype");
    return -1;
}

/* Read (ufunc that folds, ufunc that divides or None, number of the dtype, bytes of an element, divisor as bytes, kind
   of a narrow type). */
int reducer_from(PyObject *given, Reducer *reducer)
{
    PyObject *fold, *by;
    const char *divisor;
    Py_ssize_t length;
    int number;
    if (!PyArg_ParseTuple(given, "OOiiy#i", &fold, &by, &number, &reducer->itemsize, &divisor, &length, &reducer->narrow))
        return -1;
    if (length > (Py_ssize_t)sizeof reducer->divisor || reducer->itemsize < 1) {
        PyErr_SetString(PyExc_ValueError, "an element is too large");
        return -1;
    }
    memcpy(reducer->divisor, divisor, length);
    if (find_loop(fold, number, &reducer->fold, &reducer->fold_data) < 0)
        return -1;
    return by == Py_None ? 0 : find_loop(by, number, &reducer->divide, &reducer->divide_data);
}

static void call(Loop *loop, void *data, const char *a, const char *b, char *out, intptr_t count, intptr_t size,
                 intptr_t b_step)
{
    char *args[3] = {(char *)a, (char *)b, out};
    intptr_t steps[3] = {size, b_step, size};
    loop(args, &count, steps, data);
}

void combine(const Reducer *reducer, const char *a, const char *b, char *target, size_t nbytes)
{
    call(reducer->fold, reducer->fold_data, a, b, target, nbytes / reducer->itemsize, reducer->itemsize,
         reducer->itemsize);
}

void divide(const Reducer *reducer, char *target, size_t nbytes)
{
    if (reducer->divide != NULL)
        call(reducer->divide, reducer->divide_data, target, reducer->divisor, target, nbytes / reducer->itemsize,
             reducer->itemsize, 0);
}

static uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static float half_to_float(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 0x3ff;
    if (exponent == 31)
        return float_of(sign | 0x7f800000 | fraction << 13);
    if (exponent != 0)
        return float_of(sign | (exponent + 112) << 23 | fraction << 13);
    return float_of(sign | bits_of((float)fraction * 0x1p-24f));
}

/* Round to the nearest, ties to even. */
static uint16_t float_to_half(float value)
{
    uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000) /* not a number: with the bits that are left of its payload, or one */
        return sign | 0x7c00 | (size >> 13 & 0x3ff ? size >> 13 & 0x3ff : 1);
    if (size >= 0x47800000)
        return sign | 0x7c00;
    if (size < 0x38800000) /* below the normal ones: the sum rounds at the last place of a half */
        return sign | (uint16_t)(bits_of(float_of(size) + 0.5f) - 0x3f000000);
    return sign | (uint16_t)((size + 0xfff + (size >> 13 & 1) - 0x38000000) >> 13);
}

static uint16_t float_to_bfloat(float value)
{
    uint32_t bits = bits_of(value);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return (bits >> 16 & 0x8000) | 0x7fc0;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static void widen(int narrow, const char *from, float *to, size_t count)
{
    const uint16_t *values = (const uint16_t *)from;
    for (size_t i = 0; i < count; i++)
        to[i] = narrow == FLOAT16 ? half_to_float(values[i]) : float_of((uint32_t)values[i] << 16);
}

/* The mean of integers: their sum in 64 bits, truncated towards zero. */
#define MEAN(Type, Wide)                                                                     \
    for (size_t i = 0; i < nbytes / sizeof(Type); i++) {                                     \
        uint64_t total = 0;                                                                  \
        for (int k = 0; k < count; k++)                                                      \
            total += (uint64_t)((const Type *)sources[k])[i];                                \
        ((Type *)target)[i] = (Type)((Wide)total / (Wide)count);                             \
    }

static void fold_mean(const Reducer *reducer, const char *const *sources, int count, char *target, size_t nbytes)
{
    switch (reducer->narrow == SIGNED_MEAN ? -reducer->itemsize : reducer->itemsize) {
    case 1: MEAN(uint8_t, uint64_t) break;
    case 2: MEAN(uint16_t, uint64_t) break;
    case 4: MEAN(uint32_t, uint64_t) break;
    case 8: MEAN(uint64_t, uint64_t) break;
    case -1: MEAN(int8_t, int64_t) break;
    case -2: MEAN(int16_t, int64_t) break;
    case -4: MEAN(int32_t, int64_t) break;
    case -8: MEAN(int64_t, int64_t) break;
    }
}

void fold_narrow(const Reducer *reducer, const char *const *sources, int count, char *target, size_t nbytes)
{
    float total[BLOCK], value[BLOCK];
    if (reducer->narrow >= SIGNED_MEAN) {
        fold_mean(reducer, sources, count, target, nbytes);
        return;
    }
    for (size_t at = 0; at < nbytes; at += 2 * BLOCK) {
        size_t n = nbytes - at < 2 * BLOCK ? (nbytes - at) / 2 : BLOCK;
        widen(reducer->narrow, sources[0] + at, total, n);
        for (int i = 1; i < count; i++) {
            widen(reducer->narrow, sources[i] + at, value, n);
            call(reducer->fold, reducer->fold_data, (char *)total, (char *)value, (char *)total, n, 4, 4);
        }
        if (reducer->divide != NULL)
            call(reducer->divide, reducer->divide_data, (char *)total, reducer->divisor, (char *)total, n, 4, 0);
        uint16_t *out = (uint16_t *)(target + at);
        for (size_t i = 0; i < n; i++)
            out[i] = reducer->narrow == FLOAT16 ? float_to_half(total[i]) : float_to_bfloat(total[i]);
    }
}

/* Copy by stores that bypass the caches: a plain store reads the line first that it then replaces. */
void copy_uncached(char *target, const char *source, size_t nbytes)
{
#ifdef __SSE2__
    size_t head = -(uintptr_t)target % 16;
    if (head < nbytes) {
        memcpy(target, source, head);
        target += head, source += head, nbytes -= head;
        for (; nbytes >= 16; target += 16, source += 16, nbytes -= 16)
            _mm_stream_si128((__m128i *)target, _mm_loadu_si128((const __m128i *)source));
        _mm_sfence(); /* these stores are in no order with others */
    }
#endif
    memcpy(target, source, nbytes);
}
