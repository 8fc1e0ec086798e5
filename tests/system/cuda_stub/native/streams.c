/* Streams: all work is done at once, in the order it is asked for, but for what is captured, which is done when its graph is launched. */

#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core.h"
#include "state.h"

struct graph {
    struct work *items;
    size_t count, room;
};

struct stream {
    int id;
    unsigned flags;
    struct graph *captured;
    int mode, is_invalid;
    unsigned long num_works;
    struct stream *next;
};

static struct stream standard;
static struct stream *streams;
static int num_streams;
static int num_capturing;
#define RELAXED 2 /* cudaStreamCaptureModeRelaxed: nothing is forbidden */
static __thread int thread_mode;
static unsigned long num_captures, num_broken_captures, num_instances, num_launches, num_stray_works;

static struct stream *known(const struct stream *stream) {
    if ((size_t)stream <= 2) return &standard;
    struct stream *one = streams;
    while (one && one != stream) one = one->next;
    return one;
}

struct stream *stream_create(unsigned flags) {
    struct stream *stream = calloc(1, sizeof *stream);
    pthread_mutex_lock(&stub_lock);
    stream->id = ++num_streams;
    stream->flags = flags;
    stream->next = streams;
    streams = stream;
    pthread_mutex_unlock(&stub_lock);
    return stream;
}

int stream_destroy(struct stream *stream) {
    pthread_mutex_lock(&stub_lock);
    struct stream **place = &streams;
    while (*place && *place != stream) place = &(*place)->next;
    int status = *place ? SUCCESS : INVALID_HANDLE;
    if (*place) *place = stream->next; /* what it counted is lost with it */
    pthread_mutex_unlock(&stub_lock);
    if (!status) free(stream);
    return status;
}

int stream_is_known(const struct stream *stream) {
    pthread_mutex_lock(&stub_lock);
    int is_known = known(stream) != NULL;
    pthread_mutex_unlock(&stub_lock);
    return is_known;
}

unsigned stream_flags(const struct stream *stream) { return (size_t)stream <= 2 ? 0 : stream->flags; }

int stream_capture_status(const struct stream *stream) {
    pthread_mutex_lock(&stub_lock);
    const struct stream *one = known(stream);
    int status = !one || !one->captured ? 0 : one->is_invalid ? 2 : 1;
    pthread_mutex_unlock(&stub_lock);
    return status;
}

struct graph *stream_graph(const struct stream *stream) { return (size_t)stream <= 2 ? NULL : stream->captured; }

int stream_begin_capture(struct stream *stream, int mode) {
    pthread_mutex_lock(&stub_lock);
    struct stream *one = known(stream);
    int status = !one ? INVALID_HANDLE : one == &standard ? CAPTURE_UNSUPPORTED : one->captured ? INVALID_VALUE : SUCCESS;
    if (!status) {
        one->captured = calloc(1, sizeof *one->captured);
        one->is_invalid = 0;
        one->mode = mode;
        num_capturing++;
    }
    pthread_mutex_unlock(&stub_lock);
    return status;
}

int stream_end_capture(struct stream *stream, struct graph **graph) {
    pthread_mutex_lock(&stub_lock);
    struct stream *one = known(stream);
    *graph = NULL;
    int status = !one ? INVALID_HANDLE : !one->captured ? CAPTURE_UNMATCHED : one->is_invalid ? CAPTURE_INVALIDATED : SUCCESS;
    if (one && one->captured) {
        num_capturing--;
        if (status) {
            num_broken_captures++;
            graph_free(one->captured);
        } else {
            num_captures++;
            *graph = one->captured;
        }
        one->captured = NULL;
    }
    pthread_mutex_unlock(&stub_lock);
    return status;
}

int unsafe(const char *name) {
    int is_forbidden = 0;
    pthread_mutex_lock(&stub_lock);
    for (struct stream *one = streams; one && thread_mode != RELAXED; one = one->next) {
        if (!one->captured || one->mode == RELAXED) continue; /* of a thread's own captures all are taken to be */
        one->is_invalid = is_forbidden = 1;
    }
    pthread_mutex_unlock(&stub_lock);
    if (is_forbidden) fault("%s is called while a stream is captured", name);
    return is_forbidden ? CAPTURE_UNSUPPORTED : SUCCESS;
}

void exchange_thread_mode(int *mode) {
    const int before = thread_mode;
    thread_mode = *mode;
    *mode = before;
}

int waits_for(struct stream *stream, const char *name) {
    if (!stream_is_known(stream)) return INVALID_HANDLE;
    return stream_capture_status(stream) ? unsafe(name) : SUCCESS;
}

static void perform(const struct work *work) {
    for (size_t row = 0; row < work->height; row++) {
        char *target = (char *)work->target + row * work->target_pitch;
        if (work->what == COPY) memmove(target, (const char *)work->source + row * work->source_pitch, work->width);
        if (work->what == FILL) memset(target, work->value, work->width);
    }
}

int submit(struct stream *stream, struct work work) {
    pthread_mutex_lock(&stub_lock);
    struct stream *one = known(stream);
    int status = one ? SUCCESS : INVALID_HANDLE;
    if (one) {
        one->num_works++;
        struct graph *graph = one->captured;
        if (graph) {
            if (graph->count == graph->room)
                graph->items = realloc(graph->items, (graph->room = graph->room * 2 + 64) * sizeof *graph->items);
            graph->items[graph->count++] = work;
        } else {
            num_stray_works += num_capturing > 0; /* done at once, and missing from the graph */
            perform(&work);
        }
        if (work.kernel) ++*(graph ? &work.kernel->num_captured : &work.kernel->num_run);
    }
    pthread_mutex_unlock(&stub_lock);
    if (status) fault("work is given to %p, which is no stream", (void *)stream);
    return status;
}

int copy_checked(const char *name, struct work work, int kind) {
    if (!work.width || !work.height) return SUCCESS;
    if (work.height > 1 && (work.width > work.target_pitch || work.width > work.source_pitch)) return INVALID_VALUE;
    const size_t target_bytes = (work.height - 1) * work.target_pitch + work.width;
    const size_t source_bytes = (work.height - 1) * work.source_pitch + work.width;
    /* To the device are 1 and 3, from it 2 and 3; 4 finds out by itself. */
    if ((kind == 1 || kind == 3) && memory_place(work.target, target_bytes) != DEVICE) {
        fault("%s writes %zu bytes that do not lie in one reserved block of the device", name, target_bytes);
        return INVALID_VALUE;
    }
    if ((kind == 2 || kind == 3) && memory_place(work.source, source_bytes) != DEVICE) {
        fault("%s reads %zu bytes that do not lie in one reserved block of the device", name, source_bytes);
        return INVALID_VALUE;
    }
    return SUCCESS;
}

size_t graph_size(const struct graph *graph) { return graph->count; }

struct graph *graph_instance(const struct graph *graph) {
    struct graph *instance = calloc(1, sizeof *instance);
    instance->items = malloc((graph->count + 1) * sizeof *instance->items);
    memcpy(instance->items, graph->items, graph->count * sizeof *instance->items);
    instance->count = instance->room = graph->count;
    pthread_mutex_lock(&stub_lock);
    num_instances++;
    pthread_mutex_unlock(&stub_lock);
    return instance;
}

int graph_launch(const struct graph *graph, struct stream *stream) {
    pthread_mutex_lock(&stub_lock);
    struct stream *one = known(stream);
    if (one) {
        num_launches++;
        one->num_works++;
        for (size_t i = 0; i < graph->count; i++) {
            perform(&graph->items[i]);
            if (graph->items[i].kernel) graph->items[i].kernel->num_replayed++;
        }
    }
    pthread_mutex_unlock(&stub_lock);
    return one ? SUCCESS : INVALID_HANDLE;
}

void graph_free(struct graph *graph) {
    if (!graph) return;
    free(graph->items);
    free(graph);
}

void reset_streams(void) {
    standard.num_works = 0;
    for (struct stream *one = streams; one; one = one->next) one->num_works = 0;
    num_captures = num_broken_captures = num_instances = num_launches = num_stray_works = 0;
}

void dump_streams(FILE *file) {
    fprintf(file, "stream\t%d\t%lu\n", standard.id, standard.num_works);
    for (struct stream *one = streams; one; one = one->next) fprintf(file, "stream\t%d\t%lu\n", one->id, one->num_works);
    fprintf(file, "graphs\tnum_captures\t%lu\ngraphs\tnum_broken_captures\t%lu\n", num_captures, num_broken_captures);
    fprintf(file, "graphs\tnum_instances\t%lu\ngraphs\tnum_launches\t%lu\n", num_instances, num_launches);
    fprintf(file, "graphs\tnum_stray_works\t%lu\n", num_stray_works);
}
