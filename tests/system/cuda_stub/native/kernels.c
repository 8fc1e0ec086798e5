/* Kernels that a library has registered, found by the address of the host's function for them. */

#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core.h"
#include "state.h"

#define NUM_BUCKETS 65536
#define DEFAULT_DYNAMIC_BYTES 49152

static struct kernel *buckets[NUM_BUCKETS];
static struct kernel *products; /* of libraries that run kernels of their own: by the function that was called */

static struct kernel **bucket_of(const void *address) { return &buckets[((size_t)address >> 4) % NUM_BUCKETS]; }

static struct kernel *add(struct kernel **list, const void *host, const char *name) {
    struct kernel *kernel = calloc(1, sizeof *kernel);
    *kernel = (struct kernel){.host = host, .name = name, .max_dynamic_bytes = DEFAULT_DYNAMIC_BYTES, .next = *list};
    *list = kernel;
    return kernel;
}

struct kernel *kernel_find(const void *host) {
    pthread_mutex_lock(&stub_lock);
    struct kernel *kernel = *bucket_of(host);
    while (kernel && kernel->host != host) kernel = kernel->next;
    pthread_mutex_unlock(&stub_lock);
    return kernel;
}

void kernel_register(const void *host, const char *name) {
    if (kernel_find(host)) return;
    pthread_mutex_lock(&stub_lock);
    add(bucket_of(host), host, name);
    pthread_mutex_unlock(&stub_lock);
}

struct kernel *kernel_named(const char *name) {
    pthread_mutex_lock(&stub_lock);
    struct kernel *kernel = products;
    while (kernel && strcmp(kernel->name, name) != 0) kernel = kernel->next;
    if (!kernel) kernel = add(&products, NULL, name);
    pthread_mutex_unlock(&stub_lock);
    return kernel;
}

static void each(void (*visit)(struct kernel *kernel, void *with), void *with) {
    for (struct kernel *one = products; one; one = one->next) visit(one, with);
    for (size_t i = 0; i < NUM_BUCKETS; i++)
        for (struct kernel *one = buckets[i]; one; one = one->next) visit(one, with);
}

static void forget(struct kernel *kernel, void *with) {
    (void)with;
    kernel->num_run = kernel->num_captured = kernel->num_replayed = 0;
}

static void write_line(struct kernel *kernel, void *file) {
    if (kernel->num_run + kernel->num_captured + kernel->num_replayed)
        fprintf(file, "kernel\t%s\t%lu\t%lu\t%lu\n", kernel->name, kernel->num_run, kernel->num_captured, kernel->num_replayed);
}

void reset_kernels(void) { each(forget, NULL); }

void dump_kernels(FILE *file) { each(write_line, file); }
