/* What the parts of the core ask of each other; all of it with the lock held. */

#ifndef GPU_STUB_STATE_H
#define GPU_STUB_STATE_H

#include <pthread.h>
#include <stdio.h>

extern pthread_mutex_t stub_lock;

void reset_calls(void);
void reset_memory(void);
void reset_streams(void);
void reset_kernels(void);
void dump_calls(FILE *file);
void dump_memory(FILE *file);
void dump_streams(FILE *file);
void dump_kernels(FILE *file);

#endif
