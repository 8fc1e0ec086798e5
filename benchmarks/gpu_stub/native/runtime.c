/* libcudart: the device, its memory, streams, events and copies. What is not here succeeds and does nothing, see build.py. */

#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core.h"
#include "device.h"
#include "runtime.h"

typedef struct stream *Stream;

static __thread int last_error;

int done(int status) {
    if (status) last_error = status;
    return status;
}

/* Errors. */

int cudaGetLastError(void) {
    CALLED();
    int status = last_error;
    last_error = SUCCESS;
    return status;
}

int cudaPeekAtLastError(void) {
    CALLED();
    return last_error;
}

static const struct { int status; const char *name, *text; } errors[] = {
    {SUCCESS, "cudaSuccess", "no error"},
    {INVALID_VALUE, "cudaErrorInvalidValue", "invalid argument"},
    {MEMORY_ALLOCATION, "cudaErrorMemoryAllocation", "out of memory"},
    {INVALID_CONFIGURATION, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {INVALID_DEVICE_FUNCTION, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {INVALID_DEVICE, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {INVALID_HANDLE, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {CAPTURE_UNSUPPORTED, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
    {CAPTURE_INVALIDATED, "cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"},
    {CAPTURE_UNMATCHED, "cudaErrorStreamCaptureUnmatched", "capture was not ended in the same stream as it began"},
};

const char *cudaGetErrorName(int status) {
    CALLED();
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].status == status) return errors[i].name;
    return "cudaErrorUnknown";
}

const char *cudaGetErrorString(int status) {
    CALLED();
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].status == status) return errors[i].text;
    return "unknown error";
}

/* The device. */

int cudaGetDeviceCount(int *count) {
    TOLD();
    *count = 1;
    return SUCCESS;
}

int cudaSetDevice(int device) {
    TOLD();
    return done(device == 0 ? SUCCESS : INVALID_DEVICE);
}

int cudaGetDevice(int *device) {
    TOLD();
    *device = 0;
    return SUCCESS;
}

int cudaGetDeviceProperties(void *properties, int device) {
    TOLD();
    if (device) return done(INVALID_DEVICE);
    device_describe(properties);
    return SUCCESS;
}

int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    TOLD();
    if (device) return done(INVALID_DEVICE);
    *value = device_attribute(attribute);
    return SUCCESS;
}

int cudaDriverGetVersion(int *version) {
    TOLD();
    *version = CUDA_VERSION;
    return SUCCESS;
}

int cudaRuntimeGetVersion(int *version) {
    TOLD();
    *version = CUDA_VERSION;
    return SUCCESS;
}

int cudaDeviceGetPCIBusId(char *text, int size, int device) {
    TOLD();
    snprintf(text, size, "0000:%02x:00.0", device + 1);
    return SUCCESS;
}

int cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    TOLD();
    *can = device == peer;
    return SUCCESS;
}

int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    TOLD();
    *least = 0;
    *greatest = -5;
    return SUCCESS;
}

int cudaDeviceSynchronize(void) {
    TOLD();
    return done(unsafe(__func__));
}

/* Memory. */

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
    *pool = &last_error; /* any address that is not NULL: pools hold nothing here */
    return SUCCESS;
}

int cudaMemPoolCreate(void **pool, const void *properties) {
    TOLD();
    (void)properties;
    *pool = &last_error;
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

/* Streams and events. Everything is done when it is asked for, so that there is nothing to wait for. */

int cudaStreamCreate(Stream *stream) {
    TOLD();
    *stream = stream_create(0);
    return SUCCESS;
}

int cudaStreamCreateWithFlags(Stream *stream, unsigned flags) {
    TOLD();
    *stream = stream_create(flags);
    return SUCCESS;
}

int cudaStreamCreateWithPriority(Stream *stream, unsigned flags, int priority) {
    TOLD();
    (void)priority;
    *stream = stream_create(flags);
    return SUCCESS;
}

int cudaStreamDestroy(Stream stream) {
    TOLD();
    return done(stream_destroy(stream));
}

int cudaStreamSynchronize(Stream stream) {
    TOLD();
    return done(waits_for(stream, __func__));
}

int cudaStreamQuery(Stream stream) {
    TOLD();
    return done(waits_for(stream, __func__));
}

int cudaStreamGetFlags(Stream stream, unsigned *flags) {
    TOLD();
    *flags = stream_flags(stream);
    return SUCCESS;
}

int cudaStreamGetPriority(Stream stream, int *priority) {
    TOLD();
    (void)stream;
    *priority = 0;
    return SUCCESS;
}

int cudaStreamWaitEvent(Stream stream, void *event, unsigned flags) {
    TOLD();
    (void)flags;
    return done(event && stream_is_known(stream) ? SUCCESS : INVALID_HANDLE);
}

int cudaLaunchHostFunc(Stream stream, void (*function)(void *), void *with) {
    TOLD();
    if (stream_capture_status(stream)) return done(submit(stream, (struct work){.what = HOST_CALL}));
    function(with);
    return SUCCESS;
}

int cudaEventCreate(void **event) {
    TOLD();
    *event = calloc(1, 64);
    return SUCCESS;
}

int cudaEventCreateWithFlags(void **event, unsigned flags) {
    TOLD();
    (void)flags;
    *event = calloc(1, 64);
    return SUCCESS;
}

int cudaEventDestroy(void *event) {
    TOLD();
    free(event);
    return SUCCESS;
}

int cudaEventRecord(void *event, Stream stream) {
    TOLD();
    return done(event && stream_is_known(stream) ? SUCCESS : INVALID_HANDLE);
}

int cudaEventSynchronize(void *event) {
    TOLD();
    return done(event ? SUCCESS : INVALID_HANDLE);
}

int cudaEventQuery(void *event) {
    TOLD();
    return done(event ? unsafe(__func__) : INVALID_HANDLE);
}

int cudaEventElapsedTime(float *milliseconds, void *start, void *stop) {
    TOLD();
    *milliseconds = 0.001F;
    return done(start && stop ? SUCCESS : INVALID_HANDLE);
}

/* Graphs. */

int cudaStreamBeginCapture(Stream stream, int mode) {
    TOLD();
    return done(stream_begin_capture(stream, mode));
}

int cudaStreamEndCapture(Stream stream, struct graph **graph) {
    TOLD();
    return done(stream_end_capture(stream, graph));
}

int cudaStreamIsCapturing(Stream stream, int *status) {
    TOLD();
    *status = stream_capture_status(stream);
    return SUCCESS;
}

int cudaStreamGetCaptureInfo(Stream stream, int *status, unsigned long long *id, struct graph **graph, const void **dependencies,
                             const void **edges, size_t *num_dependencies) {
    TOLD();
    *status = stream_capture_status(stream);
    if (id) *id = (size_t)stream;
    if (graph) *graph = stream_graph(stream);
    if (dependencies) *dependencies = NULL;
    if (edges) *edges = NULL;
    if (num_dependencies) *num_dependencies = 0;
    return SUCCESS;
}

int cudaThreadExchangeStreamCaptureMode(int *mode) {
    TOLD();
    static __thread int present;
    const int before = present;
    present = *mode;
    *mode = before;
    return SUCCESS;
}

int cudaGraphGetNodes(struct graph *graph, void **nodes, size_t *count) {
    TOLD();
    if (nodes) memset(nodes, 0, *count * sizeof *nodes);
    *count = graph_size(graph);
    return SUCCESS;
}

int cudaGraphInstantiate(struct graph **instance, struct graph *graph, unsigned long long flags) {
    TOLD();
    (void)flags;
    *instance = graph_instance(graph);
    return SUCCESS;
}

int cudaGraphLaunch(struct graph *instance, Stream stream) {
    TOLD();
    return done(graph_launch(instance, stream));
}

int cudaGraphDestroy(struct graph *graph) {
    TOLD();
    graph_free(graph);
    return SUCCESS;
}

int cudaGraphExecDestroy(struct graph *instance) {
    TOLD();
    graph_free(instance);
    return SUCCESS;
}
