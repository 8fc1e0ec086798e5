/* What is written of all that was counted, and how it is forgotten. */

#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "state.h"

/* Forget what was counted; memory, streams and graphs stay, and so does what is to fail. */
void stub_reset(void) {
    pthread_mutex_lock(&stub_lock);
    reset_calls();
    reset_memory();
    reset_streams();
    reset_kernels();
    pthread_mutex_unlock(&stub_lock);
}

/* Write what was counted: a line each, its parts between tabs. */
int stub_dump(const char *path) {
    FILE *file = fopen(path, "w");
    if (!file) return 1;
    pthread_mutex_lock(&stub_lock);
    dump_calls(file);
    dump_memory(file);
    dump_streams(file);
    dump_kernels(file);
    pthread_mutex_unlock(&stub_lock);
    return fclose(file);
}

__attribute__((destructor)) static void dump_at_exit(void) {
    const char *folder = getenv("GPU_STUB_LOG");
    if (!folder) return;
    char path[4096];
    snprintf(path, sizeof path, "%s/%d.txt", folder, (int)getpid());
    stub_dump(path);
}
