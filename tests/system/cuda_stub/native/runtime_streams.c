/* libcudart: streams, events and graphs. Everything is done when it is asked for, so that there is nothing to wait for. */

#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "core.h"
#include "runtime.h"

typedef struct stream *Stream;

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
    exchange_thread_mode(mode);
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
