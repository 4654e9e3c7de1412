/* Load generator for wire v1 over one or more ZeroMQ DEALER sockets, and the echo server that finds its own maximum.
 *
 *   load --addr ipc://... --req FILE --conc N            closed loop: N requests in flight
 *   load --addr ipc://... --req FILE --rate R            open loop: Poisson arrivals, R a second
 *   load --echo ipc://... --reply-bytes N                answers [identity, header, id, N bytes] to every request
 *
 * FILE holds the frames of one request, each a uint32 length (host order) and its bytes; frame --id-frame (1) is replaced
 * by an 8-byte id. A reply is an answer when its first byte is --ok-byte (132 = 0x84, a map of four keys); else it is an
 * error, counted under the "code" its header holds.
 *
 * One thread. In an open loop a latency counts from the scheduled arrival, whenever the request was really sent, so a
 * stalled server cannot hide its stall. It sleeps between arrivals instead of spinning: on two cores a spinning client
 * takes half of what it measures. Prints one line of JSON.
 *
 * Build: cc -O2 load.c -lzmq -lm, or against the library inside the pyzmq wheel (load.py does it), which ships without
 * its header: the few declarations needed are below, and libzmq keeps them stable (ZMQ 4.x, zmq.h).
 */
#define _GNU_SOURCE
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#if defined(__has_include) && !defined(LOAD_WITHOUT_ZMQ_H)
#if __has_include(<zmq.h>)
#include <zmq.h>
#define HAVE_ZMQ_H 1
#endif
#endif
#ifndef HAVE_ZMQ_H
typedef struct { _Alignas(void *) unsigned char opaque[64]; } zmq_msg_t;
typedef void(zmq_free_fn)(void *, void *);
enum { ZMQ_DEALER = 5, ZMQ_ROUTER = 6 };
enum { ZMQ_FD = 14, ZMQ_EVENTS = 15, ZMQ_LINGER = 17, ZMQ_RECONNECT_IVL = 18, ZMQ_SNDHWM = 23, ZMQ_RCVHWM = 24 };
enum { ZMQ_POLLIN = 1, ZMQ_DONTWAIT = 1, ZMQ_SNDMORE = 2 };
void *zmq_ctx_new(void);
void *zmq_socket(void *, int);
int zmq_setsockopt(void *, int, const void *, size_t);
int zmq_getsockopt(void *, int, void *, size_t *);
int zmq_bind(void *, const char *);
int zmq_connect(void *, const char *);
int zmq_msg_init(zmq_msg_t *);
int zmq_msg_init_size(zmq_msg_t *, size_t);
int zmq_msg_init_data(zmq_msg_t *, void *, size_t, zmq_free_fn *, void *);
int zmq_msg_send(zmq_msg_t *, void *, int);
int zmq_msg_recv(zmq_msg_t *, void *, int);
int zmq_msg_close(zmq_msg_t *);
void *zmq_msg_data(zmq_msg_t *);
size_t zmq_msg_size(const zmq_msg_t *);
int zmq_msg_more(const zmq_msg_t *);
#endif

enum { MAX_FRAMES = 16, MAX_CONNECTIONS = 64, MAX_CODES = 16, MAX_CODE_LENGTH = 32 };
enum { OPEN_LOOP_IN_FLIGHT = 1 << 17 };   /* bounds the client's memory; further arrivals wait, their clock running */
enum { MAX_PENDING = 1 << 22 };           /* arrivals that wait for a slot; more are counted as unsent at once */
enum { COPY_BELOW = 4096 };               /* larger frames are sent from the one buffer without a copy */
enum { RECEIVE_AT_ONCE = 1024 };          /* then look at the clock: arrivals must not wait for a flood of replies */
enum { JOIN_ARRIVALS_ABOVE = 5000 };      /* above this rate arrivals within 0.2 ms go together, which saves wake-ups */

typedef struct { float *us; size_t count, capacity; } Latencies;
typedef struct { char name[MAX_CODE_LENGTH]; Latencies latencies; } Code;

static struct {
  const char *address;
  int connections, in_flight, id_frame, ok_byte;
  double rate, seconds, warm_s, drain_s, deadline_s;
} options;
static unsigned char *frames[MAX_FRAMES];
static uint32_t frame_bytes[MAX_FRAMES];
static int frame_count;

static double measure_from, measure_until;
static Latencies answers, errors;
static Code codes[MAX_CODES];
static int code_count;
static long sent, within_deadline, stray;
static long total_ok, total_errors, ok_in_span;

static double clock_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void fail(const char *what) {
  perror(what);
  exit(2);
}

static const char *option(int argc, char **argv, const char *name, const char *otherwise) {
  for (int i = 1; i + 1 < argc; i++)
    if (!strcmp(argv[i], name)) return argv[i + 1];
  return otherwise;
}

/* ---- what is counted ---- */

static void note(Latencies *l, double seconds) {
  if (l->count == l->capacity) {
    l->capacity = l->capacity ? l->capacity * 2 : 1 << 12;
    l->us = realloc(l->us, l->capacity * sizeof *l->us);
    if (!l->us) fail("memory");
  }
  l->us[l->count++] = (float)(seconds * 1e6);
}

/* The text after the key "code" in an error's msgpack header: a fixstr, or a str 8. */
static Code *code_of(const unsigned char *header, size_t bytes) {
  static const unsigned char key[] = {0xa4, 'c', 'o', 'd', 'e'};
  const unsigned char *at = memmem(header, bytes, key, sizeof key), *end = header + bytes;
  char name[MAX_CODE_LENGTH] = "unreadable";
  if (at && (at += sizeof key) < end) {
    size_t length = 0;
    if ((*at & 0xe0) == 0xa0) length = *at++ & 0x1f;
    else if (*at == 0xd9 && at + 1 < end) { length = at[1]; at += 2; }
    if (length && length < sizeof name && at + length <= end) { memcpy(name, at, length); name[length] = 0; }
  }
  for (int i = 0; i < code_count; i++)
    if (!strcmp(codes[i].name, name)) return &codes[i];
  if (code_count == MAX_CODES) return &codes[MAX_CODES - 1];
  strcpy(codes[code_count].name, name);
  return &codes[code_count++];
}

/* In a closed loop what ends inside the window counts; in an open loop what was to begin inside it. */
static void finished(double began, int is_answer, const unsigned char *header, size_t bytes) {
  double now = clock_s(), decides = options.rate > 0 ? began : now;
  if (is_answer) total_ok++; else total_errors++;
  ok_in_span += is_answer && now >= measure_from && now <= measure_until;
  if (decides < measure_from || decides > measure_until) return;
  if (is_answer) {
    note(&answers, now - began);
    within_deadline += now - began <= options.deadline_s;
  } else {
    note(&errors, now - began);
    note(&code_of(header, bytes)->latencies, now - began);
  }
}

static int compare(const void *left, const void *right) {
  float a = *(const float *)left, b = *(const float *)right;
  return (a > b) - (a < b);
}

static double quantile(const Latencies *l, double q) {
  if (!l->count) return -1;
  size_t at = (size_t)(q * (double)l->count);
  return l->us[at < l->count ? at : l->count - 1];
}

static void sort(Latencies *l) {
  if (l->count) qsort(l->us, l->count, sizeof *l->us, compare);
}

/* ---- arrivals ---- */

static uint64_t random_state = 0x9e3779b97f4a7c15u;
static double *pending;
static size_t pending_head, pending_tail;
static long unsent;

static double uniform(void) { /* splitmix64, in [0, 1) */
  uint64_t z = (random_state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return (double)((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

static void push_arrival(double at) {
  if (pending_tail - pending_head == MAX_PENDING) { unsent += at >= measure_from; return; }
  pending[pending_tail++ % MAX_PENDING] = at;
}

/* ---- sockets ---- */

static void *sockets[MAX_CONNECTIONS];
static struct pollfd descriptors[MAX_CONNECTIONS];

static void keep(void *data, void *hint) { (void)data; (void)hint; }

static void set(void *socket, int name, int value) {
  if (zmq_setsockopt(socket, name, &value, sizeof value)) fail("zmq_setsockopt");
}

static int has_input(void *socket) {
  int events = 0;
  size_t size = sizeof events;
  zmq_getsockopt(socket, ZMQ_EVENTS, &events, &size);
  return events & ZMQ_POLLIN;
}

static void connect_all(void) {
  void *context = zmq_ctx_new();
  for (int i = 0; i < options.connections; i++) {
    void *socket = zmq_socket(context, ZMQ_DEALER);
    if (!socket) fail("zmq_socket");
    set(socket, ZMQ_LINGER, 0);
    set(socket, ZMQ_RECONNECT_IVL, 5);
    set(socket, ZMQ_SNDHWM, 0);
    set(socket, ZMQ_RCVHWM, 0);
    if (zmq_connect(socket, options.address)) fail(options.address);
    size_t size = sizeof descriptors[i].fd;
    zmq_getsockopt(socket, ZMQ_FD, &descriptors[i].fd, &size);
    descriptors[i].events = POLLIN;
    sockets[i] = socket;
  }
}

static void send_request(void *socket, uint64_t id) {
  for (int f = 0; f < frame_count; f++) {
    zmq_msg_t message;
    if (f == options.id_frame) {
      zmq_msg_init_size(&message, sizeof id);
      memcpy(zmq_msg_data(&message), &id, sizeof id);
    } else if (frame_bytes[f] < COPY_BELOW) {
      zmq_msg_init_size(&message, frame_bytes[f]);
      memcpy(zmq_msg_data(&message), frames[f], frame_bytes[f]);
    } else {
      zmq_msg_init_data(&message, frames[f], frame_bytes[f], keep, NULL);
    }
    if (zmq_msg_send(&message, socket, f + 1 < frame_count ? ZMQ_SNDMORE : 0) < 0) fail("zmq_msg_send");
  }
  sent++;
}

/* Wait until a socket has something or `seconds` passed. ZMQ_FD signals edges only: the state is read before sleeping. */
static void wait_for_input(double seconds) {
  for (int i = 0; i < options.connections; i++)
    if (has_input(sockets[i])) return;
  if (seconds <= 0) return;
  struct timespec limit = {(time_t)seconds, (long)((seconds - floor(seconds)) * 1e9)};
  ppoll(descriptors, (nfds_t)options.connections, &limit, NULL);
}

/* ---- the loop ---- */

static int slots, free_count, *free_slots;
static uint32_t *generations;
static double *began;

static void start_one(double at) {
  int slot = free_slots[--free_count];
  began[slot] = at;
  send_request(sockets[slot % options.connections], (uint64_t)++generations[slot] << 32 | (uint32_t)slot);
}

/* One whole reply; 0 when there is none. */
static int receive_one(void *socket) {
  zmq_msg_t header, rest;
  zmq_msg_init(&header);
  if (zmq_msg_recv(&header, socket, ZMQ_DONTWAIT) < 0) { zmq_msg_close(&header); return 0; }
  uint64_t id = 0;
  int more = zmq_msg_more(&header);
  for (int f = 1; more; f++) {
    zmq_msg_init(&rest);
    if (zmq_msg_recv(&rest, socket, 0) < 0) fail("zmq_msg_recv");
    if (f == 1 && zmq_msg_size(&rest) == sizeof id) memcpy(&id, zmq_msg_data(&rest), sizeof id);
    more = zmq_msg_more(&rest);
    zmq_msg_close(&rest);
  }
  uint32_t slot = (uint32_t)id;
  if (slot < (uint32_t)slots && generations[slot] == id >> 32 && id >> 32) {
    const unsigned char *data = zmq_msg_data(&header);
    size_t bytes = zmq_msg_size(&header);
    finished(began[slot], bytes && data[0] == options.ok_byte, data, bytes);
    generations[slot]++; /* a second reply to the same id is a stray one */
    free_slots[free_count++] = (int)slot;
  } else {
    stray++;
  }
  zmq_msg_close(&header);
  return 1;
}

static void generate(void) {
  int is_open = options.rate > 0;
  slots = is_open ? OPEN_LOOP_IN_FLIGHT : options.in_flight;
  free_slots = malloc(sizeof *free_slots * (size_t)slots);
  generations = calloc((size_t)slots, sizeof *generations);
  began = calloc((size_t)slots, sizeof *began);
  pending = is_open ? malloc(sizeof *pending * MAX_PENDING) : NULL;
  if (!free_slots || !generations || !began || (is_open && !pending)) fail("memory");
  for (int i = slots - 1; i >= 0; i--) free_slots[free_count++] = i;
  double start = clock_s(), next = start;
  measure_from = start + options.warm_s;
  measure_until = measure_from + options.seconds;
  for (;;) {
    double now = clock_s();
    int sending = now < measure_until;
    if (!sending && (free_count == slots || now > measure_until + options.drain_s)) break;
    if (sending && !is_open)
      while (free_count) start_one(now);
    if (sending && is_open) {
      for (; next <= now; next -= log(1 - uniform()) / options.rate) push_arrival(next);
      while (free_count && pending_head != pending_tail) start_one(pending[pending_head++ % MAX_PENDING]);
    }
    int received = 0;
    for (int i = 0; i < options.connections; i++)
      while (received < RECEIVE_AT_ONCE && receive_one(sockets[i])) received++;
    if (received) continue;
    double wait = 0.005;
    if (sending && is_open && free_count) {
      wait = next - clock_s();
      if (options.rate > JOIN_ARRIVALS_ABOVE && wait < 0.0002) wait = 0.0002;
    }
    wait_for_input(wait);
  }
}

static void report(void) {
  long lost = slots - free_count;
  unsent += (long)(pending_tail - pending_head);
  sort(&answers);
  sort(&errors);
  printf("{\"ok\":%zu,\"rej\":%zu,\"err\":%ld,\"timeout\":%ld,\"unsent\":%ld,\"sent\":%ld,\"total_ok\":%ld,"
         "\"total_rej\":%ld,\"in_span\":%ld,\"rps\":%.2f,\"goodput\":%.2f,"
         "\"p50_us\":%.1f,\"p90_us\":%.1f,\"p99_us\":%.1f,\"p999_us\":%.1f,\"max_us\":%.1f,\"rp50_us\":%.1f,"
         "\"rp99_us\":%.1f,\"codes\":{",
         answers.count, errors.count, stray, lost, unsent, sent, total_ok, total_errors, ok_in_span,
         (double)answers.count / options.seconds, (double)within_deadline / options.seconds, quantile(&answers, .5),
         quantile(&answers, .9), quantile(&answers, .99), quantile(&answers, .999), quantile(&answers, 1),
         quantile(&errors, .5), quantile(&errors, .99));
  for (int i = 0; i < code_count; i++) {
    sort(&codes[i].latencies);
    printf("%s\"%s\":{\"count\":%zu,\"p99_us\":%.1f}", i ? "," : "", codes[i].name, codes[i].latencies.count,
           quantile(&codes[i].latencies, .99));
  }
  printf("}}\n");
}

/* ---- the echo: what the generator could measure at most ---- */

static void echo(const char *address, size_t reply_bytes) {
  void *socket = zmq_socket(zmq_ctx_new(), ZMQ_ROUTER);
  unsigned char *reply = calloc(1, reply_bytes ? reply_bytes : 1);
  set(socket, ZMQ_SNDHWM, 0);
  set(socket, ZMQ_RCVHWM, 0);
  if (zmq_bind(socket, address)) fail(address);
  for (;;) {
    zmq_msg_t kept[3], rest;
    int more = 1, f = 0;
    for (; more; f++) {
      zmq_msg_t *into = f < 3 ? &kept[f] : &rest;
      zmq_msg_init(into);
      if (zmq_msg_recv(into, socket, 0) < 0) fail("zmq_msg_recv");
      more = zmq_msg_more(into);
      if (f >= 3) zmq_msg_close(into);
    }
    if (f < 3) fail("a request of fewer than three frames");
    for (int i = 0; i < 3; i++) zmq_msg_send(&kept[i], socket, ZMQ_SNDMORE);
    zmq_msg_init_data(&rest, reply, reply_bytes, keep, NULL);
    zmq_msg_send(&rest, socket, 0);
  }
}

static void read_request(const char *path) {
  FILE *file = fopen(path, "rb");
  if (!file) fail(path);
  uint32_t bytes;
  while (frame_count < MAX_FRAMES && fread(&bytes, sizeof bytes, 1, file) == 1) {
    frames[frame_count] = malloc(bytes ? bytes : 1);
    if (!frames[frame_count] || fread(frames[frame_count], 1, bytes, file) != bytes) fail(path);
    frame_bytes[frame_count++] = bytes;
  }
  fclose(file);
}

int main(int argc, char **argv) {
  prctl(PR_SET_PDEATHSIG, SIGKILL); /* never outlive the bench */
  prctl(PR_SET_TIMERSLACK, 1000ul); /* ns: sleep until an arrival, not 50 us past it */
  const char *echo_address = option(argc, argv, "--echo", NULL);
  if (echo_address) echo(echo_address, (size_t)atol(option(argc, argv, "--reply-bytes", "16")));
  options.address = option(argc, argv, "--addr", NULL);
  const char *request = option(argc, argv, "--req", NULL);
  if (!options.address || !request) {
    fprintf(stderr, "usage: load --addr ENDPOINT --req FILE (--conc N | --rate R) [--secs S] [--warm S] [--slo-ms MS] "
                    "[--drain S] [--seed N] [--conns N] [--id-frame N] [--ok-byte N]\n"
                    "       load --echo ENDPOINT [--reply-bytes N]\n");
    return 2;
  }
  options.in_flight = atoi(option(argc, argv, "--conc", "1"));
  options.rate = atof(option(argc, argv, "--rate", "0"));
  options.seconds = atof(option(argc, argv, "--secs", "3"));
  options.warm_s = atof(option(argc, argv, "--warm", "1"));
  options.drain_s = atof(option(argc, argv, "--drain", "5"));
  options.deadline_s = atof(option(argc, argv, "--slo-ms", "1e9")) / 1e3;
  options.connections = atoi(option(argc, argv, "--conns", "1"));
  options.id_frame = atoi(option(argc, argv, "--id-frame", "1"));
  options.ok_byte = atoi(option(argc, argv, "--ok-byte", "132"));
  random_state += (uint64_t)atol(option(argc, argv, "--seed", "0")) * 0xd1342543de82ef95u;
  if (options.connections < 1 || options.connections > MAX_CONNECTIONS || options.in_flight < 1) {
    fprintf(stderr, "load: --conns 1 to %d, --conc at least 1\n", MAX_CONNECTIONS);
    return 2;
  }
  read_request(request);
  connect_all();
  generate();
  report();
  return 0;
}
