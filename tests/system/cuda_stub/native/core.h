/* What all stub libraries share: who was called, what lies where, what is in order on which stream. */

#ifndef GPU_STUB_CORE_H
#define GPU_STUB_CORE_H

#include <stddef.h>

/* Statuses of CUDA's runtime that the stubs give. */
enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    MEMORY_ALLOCATION = 2,
    INVALID_CONFIGURATION = 9,
    INVALID_DEVICE_FUNCTION = 98,
    INVALID_DEVICE = 101,
    INVALID_HANDLE = 400,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_UNMATCHED = 903,
};

/* A function that is counted; there is one of these in each. */
struct call {
    const char *name;
    unsigned long count;
    struct call *next;
};

/* Count a call; the status it is told to fail with, or 0. */
int called(struct call *call);

#define CALLED() ({ static struct call here = {__func__, 0, NULL}; called(&here); })

/* Note something that a real device would punish, once for each text. */
void fault(const char *format, ...) __attribute__((format(printf, 1, 2)));

enum place { UNKNOWN = 0, HOST = 1, DEVICE = 2 };

/* Memory: reserved from the kernel, so that what nobody touches costs nothing. */
int memory_allocate(void **address, size_t size, enum place place);
int memory_free(void *address, enum place place);
enum place memory_place(const void *address, size_t size);
void memory_info(size_t *free_bytes, size_t *total_bytes);

/* Streams, and what is captured on them. NULL, 1 and 2 are the default streams. */
struct stream;
struct graph;
struct kernel;
struct stream *stream_create(unsigned flags);
int stream_destroy(struct stream *stream);
int stream_is_known(const struct stream *stream);
unsigned stream_flags(const struct stream *stream);
int stream_begin_capture(struct stream *stream, int mode);
int stream_end_capture(struct stream *stream, struct graph **graph);
int stream_capture_status(const struct stream *stream); /* 0 none, 1 active, 2 invalid */
struct graph *stream_graph(const struct stream *stream);

/* Whether a call is one of those that end a capture under way; the status it has to give then. */
int unsafe(const char *name);
void exchange_thread_mode(int *mode);
int waits_for(struct stream *stream, const char *name);

/* One piece of work: a kernel, a library's product, a copy or a fill. Copies are done, kernels are counted. */
struct work {
    enum { KERNEL, PRODUCT, COPY, FILL, HOST_CALL } what;
    struct kernel *kernel;
    void *target;
    const void *source;
    size_t target_pitch, source_pitch, width, height;
    int value;
};
int submit(struct stream *stream, struct work work);
int copy_checked(const char *name, struct work work, int kind);

size_t graph_size(const struct graph *graph);
int graph_launch(const struct graph *graph, struct stream *stream);
void graph_free(struct graph *graph);
struct graph *graph_instance(const struct graph *graph);

/* Kernels, by the address that the host has for them. */
struct kernel {
    const void *host;
    const char *name;
    int max_dynamic_bytes;
    unsigned long num_run, num_captured, num_replayed;
    struct kernel *next;
};
void kernel_register(const void *host, const char *name);
struct kernel *kernel_find(const void *host);
struct kernel *kernel_named(const char *name);

#endif
