/* The device's memory, in the host's: reserved blocks, and what is left. */

#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "core.h"
#include "state.h"

#define DEFAULT_BYTES (80UL << 30)

struct block {
    char *address;
    size_t size;
    enum place place;
};

static struct block *blocks;
static size_t num_blocks, room;
static size_t total_bytes, used_bytes, peak_bytes, host_bytes;
static unsigned long num_allocations, num_frees, num_refusals;

static size_t total(void) {
    if (!total_bytes) {
        const char *told = getenv("GPU_STUB_BYTES");
        total_bytes = told ? strtoull(told, NULL, 10) : DEFAULT_BYTES;
    }
    return total_bytes;
}

/* Change how much memory the device has; what is in use stays. */
void stub_set_bytes(size_t bytes) {
    pthread_mutex_lock(&stub_lock);
    total_bytes = bytes;
    pthread_mutex_unlock(&stub_lock);
}

int memory_allocate(void **address, size_t size, enum place place) {
    *address = NULL;
    if (!size) return SUCCESS;
    size = (size + 511) / 512 * 512;
    pthread_mutex_lock(&stub_lock);
    int status = MEMORY_ALLOCATION;
    if (place == HOST || (used_bytes <= total() && size <= total() - used_bytes)) {
        /* Pages that nobody may touch lie between blocks, so that what runs over an end is seen. */
        char *found = mmap(NULL, size + 8192, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (found != MAP_FAILED) {
            size_t pages = (size + 4095) / 4096 * 4096;
            char *start = found + 4096;
            mprotect(start, pages, PROT_READ | PROT_WRITE);
            if (num_blocks == room) blocks = realloc(blocks, (room = room * 2 + 64) * sizeof *blocks);
            blocks[num_blocks++] = (struct block){start, size, place};
            *address = start;
            if (place == HOST) {
                host_bytes += size;
            } else {
                used_bytes += size;
                num_allocations++;
                if (used_bytes > peak_bytes) peak_bytes = used_bytes;
            }
            status = SUCCESS;
        }
    }
    if (status) num_refusals++;
    pthread_mutex_unlock(&stub_lock);
    return status;
}

int memory_free(void *address, enum place place) {
    if (!address) return SUCCESS;
    int status = INVALID_VALUE;
    pthread_mutex_lock(&stub_lock);
    for (size_t i = 0; i < num_blocks; i++) {
        if (blocks[i].address != address || blocks[i].place != place) continue;
        munmap(blocks[i].address - 4096, blocks[i].size + 8192);
        *(place == HOST ? &host_bytes : &used_bytes) -= blocks[i].size;
        num_frees += place == DEVICE;
        blocks[i] = blocks[--num_blocks];
        status = SUCCESS;
        break;
    }
    pthread_mutex_unlock(&stub_lock);
    if (status) fault("memory at %p is given back and was not reserved", address);
    return status;
}

enum place memory_place(const void *address, size_t size) {
    enum place place = UNKNOWN;
    pthread_mutex_lock(&stub_lock);
    for (size_t i = 0; i < num_blocks && !place; i++) {
        const struct block *block = &blocks[i];
        if ((const char *)address >= block->address && (const char *)address + size <= block->address + block->size)
            place = block->place;
    }
    pthread_mutex_unlock(&stub_lock);
    return place;
}

void memory_info(size_t *free_bytes, size_t *all_bytes) {
    pthread_mutex_lock(&stub_lock);
    *all_bytes = total();
    *free_bytes = used_bytes < total() ? total() - used_bytes : 0;
    pthread_mutex_unlock(&stub_lock);
}

void reset_memory(void) {
    peak_bytes = used_bytes;
    num_allocations = num_frees = num_refusals = 0;
}

void dump_memory(FILE *file) {
    fprintf(file, "memory\tused_bytes\t%zu\nmemory\tpeak_bytes\t%zu\nmemory\thost_bytes\t%zu\n", used_bytes, peak_bytes, host_bytes);
    fprintf(file, "memory\tnum_allocations\t%lu\nmemory\tnum_frees\t%lu\n", num_allocations, num_frees);
    fprintf(file, "memory\tnum_refusals\t%lu\n", num_refusals);
}
