/* libcudart: memory, copies and fills. */

#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "core.h"
#include "runtime.h"

typedef struct stream *Stream;

static char the_pool; /* of ordered allocations, which hold nothing back here */

int cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    TOLD();
    memory_info(free_bytes, total_bytes);
    return SUCCESS;
}

static int allocate(const char *name, void **address, size_t size, enum place place) {
    int status = unsafe(name);
    return done(status ? status : memory_allocate(address, size, place));
}

static int give_back(const char *name, void *address, enum place place) {
    int status = unsafe(name);
    return done(status ? status : memory_free(address, place));
}

int cudaMalloc(void **address, size_t size) {
    TOLD();
    return allocate(__func__, address, size, DEVICE);
}

int cudaFree(void *address) {
    TOLD();
    return give_back(__func__, address, DEVICE);
}

/* Ordered allocations may be captured on a device; nothing here has been seen to do so. */
int cudaMallocAsync(void **address, size_t size, Stream stream) {
    TOLD();
    return stream_is_known(stream) ? allocate(__func__, address, size, DEVICE) : done(INVALID_HANDLE);
}

int cudaMallocFromPoolAsync(void **address, size_t size, void *pool, Stream stream) {
    TOLD();
    (void)pool;
    return stream_is_known(stream) ? allocate(__func__, address, size, DEVICE) : done(INVALID_HANDLE);
}

int cudaFreeAsync(void *address, Stream stream) {
    TOLD();
    return stream_is_known(stream) ? give_back(__func__, address, DEVICE) : done(INVALID_HANDLE);
}

int cudaMallocHost(void **address, size_t size) {
    TOLD();
    return allocate(__func__, address, size, HOST);
}

int cudaHostAlloc(void **address, size_t size, unsigned flags) {
    TOLD();
    (void)flags;
    return allocate(__func__, address, size, HOST);
}

int cudaFreeHost(void *address) {
    TOLD();
    return give_back(__func__, address, HOST);
}

int cudaHostGetDevicePointer(void **on_device, void *address, unsigned flags) {
    TOLD();
    (void)flags;
    *on_device = address;
    return done(memory_place(address, 1) == HOST ? SUCCESS : INVALID_VALUE);
}

/* Variables of kernels, which nothing reads. */
int cudaGetSymbolAddress(void **address, const void *symbol) {
    TOLD();
    (void)symbol;
    static void *variables;
    if (!variables) memory_allocate(&variables, 1 << 20, DEVICE);
    *address = variables;
    return SUCCESS;
}

int cudaMallocManaged(void **address, size_t size, unsigned flags) {
    TOLD();
    (void)flags;
    return allocate(__func__, address, size, DEVICE);
}

int cudaPointerGetAttributes(void *found, const void *address) {
    TOLD();
    const enum place place = memory_place(address, 1);
    const struct { int type, device; const void *on_device, *on_host; long reserved[8]; } all = {
        place, 0, place == UNKNOWN ? NULL : address, place == DEVICE ? NULL : address, {0}};
    memcpy(found, &all, sizeof all);
    return SUCCESS;
}

int cudaDeviceGetDefaultMemPool(void **pool, int device) {
    TOLD();
    (void)device;
    *pool = &the_pool;
    return SUCCESS;
}

int cudaMemPoolCreate(void **pool, const void *properties) {
    TOLD();
    (void)properties;
    *pool = &the_pool;
    return SUCCESS;
}

int cudaMemPoolGetAttribute(void *pool, int attribute, void *value) {
    TOLD();
    (void)pool;
    (void)attribute;
    memset(value, 0, sizeof(unsigned long));
    return SUCCESS;
}

/* Copies and fills. */

static int work(const char *name, struct work work, int kind, Stream stream) {
    int status = copy_checked(name, work, kind);
    return done(status ? status : submit(stream, work));
}

static int work_now(const char *name, struct work copy, int kind) {
    int status = unsafe(name);
    return status ? done(status) : work(name, copy, kind, NULL);
}

#define PLAIN_COPY ((struct work){COPY, NULL, target, source, size, size, size, 1, 0})
#define PITCHED_COPY ((struct work){COPY, NULL, target, source, target_pitch, source_pitch, width, height, 0})
#define PLAIN_FILL ((struct work){FILL, NULL, target, target, size, size, size, 1, value})

int cudaMemcpy(void *target, const void *source, size_t size, int kind) {
    TOLD();
    return work_now(__func__, PLAIN_COPY, kind);
}

int cudaMemcpyAsync(void *target, const void *source, size_t size, int kind, Stream stream) {
    TOLD();
    return work(__func__, PLAIN_COPY, kind, stream);
}

int cudaMemcpy2D(
    void *target, size_t target_pitch, const void *source, size_t source_pitch, size_t width, size_t height, int kind) {
    TOLD();
    return work_now(__func__, PITCHED_COPY, kind);
}

int cudaMemcpy2DAsync(void *target, size_t target_pitch, const void *source, size_t source_pitch, size_t width, size_t height,
                      int kind, Stream stream) {
    TOLD();
    return work(__func__, PITCHED_COPY, kind, stream);
}

int cudaMemset(void *target, int value, size_t size) {
    TOLD();
    return work_now(__func__, PLAIN_FILL, 1);
}

int cudaMemsetAsync(void *target, int value, size_t size, Stream stream) {
    TOLD();
    return work(__func__, PLAIN_FILL, 1, stream);
}
