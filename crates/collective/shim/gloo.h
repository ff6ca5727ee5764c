/* What the crate calls of libgloo (Debian libgloo-dev, 0.0~git20220518), in C.
 *
 * No exception crosses: every function catches all and returns a code below; the text of the last
 * failure on this thread is gloo_shim_error(). Nothing here blocks but the functions that say so.
 * Pointers are not checked for null. Declared again in src/backend/gloo/sys.rs. */
#ifndef COLLECTIVE_GLOO_H
#define COLLECTIVE_GLOO_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
  GLOO_SHIM_OK = 0,
  /* Not yet; only of gloo_shim_wait. */
  GLOO_SHIM_PENDING = 1,
  /* A connection failed. */
  GLOO_SHIM_IO = 2,
  /* The caller's check asked to stop. */
  GLOO_SHIM_STOPPED = 3,
  /* A peer's part did not come in time. */
  GLOO_SHIM_LATE = 4,
  /* Anything else: a wrong call, no memory. */
  GLOO_SHIM_REFUSED = 5
};

/* A connection to each peer, and a thread that serves them. */
typedef struct gloo_shim_mesh gloo_shim_mesh;
/* Memory that messages are sent from or received into. */
typedef struct gloo_shim_buffer gloo_shim_buffer;

/* out = a . b for count elements; out may be a. */
typedef void (*gloo_shim_fold)(void *arg, void *out, const void *a, const void *b, size_t count);
/* Whether to stop: called every millisecond of a wait inside a collective of gloo's own. */
typedef int (*gloo_shim_check)(void *arg);

typedef struct {
  size_t count;
  size_t element_bytes;
  uint32_t tag;
  uint32_t timeout_ms; /* for each step */
  gloo_shim_fold fold;
  gloo_shim_check check;
  void *arg; /* of both */
  int peer;  /* out: who was waited for when LATE or STOPPED, else -1 */
} gloo_shim_reduction;

/* The text stays until this thread's next failure. */
const char *gloo_shim_error(void);

/* Opens a listening socket for each peer, bound to one address of this machine. */
int gloo_shim_mesh_new(const char *address, int rank, int size, uint32_t connect_timeout_ms,
                       gloo_shim_mesh **out);
/* Where peer is to connect to: *len bytes of out, at most capacity. */
int gloo_shim_mesh_address(gloo_shim_mesh *mesh, int peer, uint8_t *out, size_t capacity, size_t *len);
/* Connects to the peer that lies at the address; blocks until it has too, or for the timeout. */
int gloo_shim_mesh_connect(gloo_shim_mesh *mesh, int peer, const uint8_t *address, size_t len);
/* All its buffers have been freed. Closes the connections; waits a few ticks of the thread, and for
 * its end. */
void gloo_shim_mesh_free(gloo_shim_mesh *mesh);

int gloo_shim_buffer_new(gloo_shim_mesh *mesh, void *memory, size_t len, gloo_shim_buffer **out);
/* Afterwards gloo does not touch the memory, whatever was in flight. */
void gloo_shim_buffer_free(gloo_shim_buffer *buffer);
/* Sends or receives a part of the memory. Messages of one slot match in order. */
int gloo_shim_send(gloo_shim_buffer *buffer, int peer, uint64_t slot, size_t offset, size_t len);
int gloo_shim_receive(gloo_shim_buffer *buffer, int peer, uint64_t slot, size_t offset, size_t len);
/* Takes note of one message sent or received; waits for it at most so long, and only for it to be
 * PENDING otherwise: unlike gloo's own waits this leaves everything as it is when time is over. */
int gloo_shim_wait(gloo_shim_buffer *buffer, int received, uint32_t micros);

/* Gloo's own collectives, in place. They block. */
int gloo_shim_all_reduce(gloo_shim_mesh *mesh, void *memory, gloo_shim_reduction *reduction);
/* Overwrites the memory on every rank. */
int gloo_shim_reduce(gloo_shim_mesh *mesh, void *memory, int root, gloo_shim_reduction *reduction);

#ifdef __cplusplus
}
#endif

#endif
