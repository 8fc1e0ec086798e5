/* How functions of libcudart end: a status that is not success is what cudaGetLastError reports, too. */

#ifndef GPU_STUB_RUNTIME_H
#define GPU_STUB_RUNTIME_H

#include "core.h"

int done(int status);

/* Count the call; fail if it is told to. */
#define TOLD() do { int told = CALLED(); if (told) return done(told); } while (0)

#endif
