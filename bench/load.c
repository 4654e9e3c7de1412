/* Load generator for wire v1 over one or more ZeroMQ DEALER sockets, and the echo server that finds its own maximum.
 *
 *   load --addr ipc://... --req FILE --conc N            closed loop: N requests in flight
 *   load --addr ipc://... --req FILE --rate R            open loop: Poisson arrivals, R a second
 *   load --echo ipc://... --reply-bytes N                answers [identity, header, id, N bytes] to every request
 *
 * FILE holds the frames of one request, each a uint32 length (host order) and its bytes; frame --id-frame (1) is replaced
 * by an 8-byte id. A reply is an answer when its first byte is --ok-byte (132 = 0x84, a map of four keys), or one more,
 * with words; else it is an error, counted under the "code" its header holds.
 *
 * With --places N --memory BYTES the tensors are not sent: FILE holds N headers, which name places in region 1, and an
 * empty frame. The generator has that region made by the daemon's memory socket (docs/shared-memory.md), fills it with
 * 0.5, and sends each request with the header of its slot.
 *
 * One thread. In an open loop a latency counts from the scheduled arrival, whenever the request was really sent, so a
 * stalled server cannot hide its stall. It sleeps between arrivals instead of spinning: on two cores a spinning client
 * takes half of what it measures. Prints one line of JSON.
 *
 * Build: cc -O2 load.c -lzmq -lm, or against the library inside the pyzmq wheel (load.py does it), which ships without
 * its header: the few declarations needed are below, and libzmq keeps them stable (ZMQ 4.x, zmq.h).
 */
#include "counts.h"

#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>

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

enum { MAX_FRAMES = 260, MAX_CONNECTIONS = 64 };
enum { OPEN_LOOP_IN_FLIGHT = 1 << 17 };   /* bounds the client's memory; further arrivals wait, their clock running */
enum { COPY_BELOW = 4096 };               /* larger frames are sent from the one buffer without a copy */
enum { RECEIVE_AT_ONCE = 1024 };          /* then look at the clock: arrivals must not wait for a flood of replies */
enum { JOIN_ARRIVALS_ABOVE = 5000 };      /* above this rate arrivals within 0.2 ms go together, which saves wake-ups */

static unsigned char *frames[MAX_FRAMES];
static uint32_t frame_bytes[MAX_FRAMES];
static int frame_count;

/* The text after the key "code" in an error's msgpack header: a fixstr, or a str 8. */
static const char *code_of(const unsigned char *header, size_t bytes) {
  static const unsigned char key[] = {0xa4, 'c', 'o', 'd', 'e'};
  const unsigned char *at = memmem(header, bytes, key, sizeof key), *end = header + bytes;
  static char name[MAX_CODE_LENGTH];
  strcpy(name, "unreadable");
  if (at && (at += sizeof key) < end) {
    size_t length = 0;
    if ((*at & 0xe0) == 0xa0) length = *at++ & 0x1f;
    else if (*at == 0xd9 && at + 1 < end) { length = at[1]; at += 2; }
    if (length && length < sizeof name && at + length <= end) { memcpy(name, at, length); name[length] = 0; }
  }
  return name;
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

static void send_placed(void *socket, uint64_t id) {
  int f = (int)((uint32_t)id % (uint32_t)options.places);
  zmq_msg_t message;
  zmq_msg_init_size(&message, frame_bytes[f]);
  memcpy(zmq_msg_data(&message), frames[f], frame_bytes[f]);
  if (zmq_msg_send(&message, socket, ZMQ_SNDMORE) < 0) fail("zmq_msg_send");
  zmq_msg_init_size(&message, sizeof id);
  memcpy(zmq_msg_data(&message), &id, sizeof id);
  if (zmq_msg_send(&message, socket, 0) < 0) fail("zmq_msg_send");
  sent++;
}

static void send_request(void *socket, uint64_t id) {
  if (options.places) { send_placed(socket, id); return; }
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

/* Have the daemon make region 1, and attach it to the only connection. */
static void share_memory(uint64_t bytes) {
  struct { uint32_t version, operation; uint64_t bytes; } ask = {1, 1, bytes};
  struct { uint32_t version, answer; uint64_t region, bytes; unsigned char secret[16]; } told;
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  snprintf(address.sun_path, sizeof address.sun_path, "%s.memory", options.address + strlen("ipc://"));
  int memory = socket(AF_UNIX, SOCK_SEQPACKET, 0), fd;
  if (connect(memory, (struct sockaddr *)&address, sizeof address)) fail(address.sun_path);
  if (send(memory, &ask, sizeof ask, MSG_NOSIGNAL) != sizeof ask) fail("send");
  union { struct cmsghdr first; char room[CMSG_SPACE(sizeof(int))]; } control;
  struct iovec part = {&told, sizeof told};
  struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
  if (recvmsg(memory, &message, 0) != sizeof told || told.answer || told.region != 1) fail("no region");
  memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fd);
  float *data = mmap(NULL, told.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) fail("mmap");
  for (size_t i = 0; i < told.bytes / sizeof *data; i++) data[i] = 0.5f;
  char secret[33], header[128];
  for (int i = 0; i < 16; i++) snprintf(secret + 2 * i, 3, "%02x", told.secret[i]);
  int size = snprintf(header, sizeof header,
                      "\x83\xa1v\x01\xa2op\xad" "attach_memory\xaaparameters\x81\xa6secret\xd9\x20%s", secret);
  for (int f = 0; f < 2; f++) { /* the header and an empty id; then the reply's */
    zmq_msg_t sending;
    zmq_msg_init_size(&sending, f ? 0 : (size_t)size);
    if (!f) memcpy(zmq_msg_data(&sending), header, (size_t)size);
    if (zmq_msg_send(&sending, sockets[0], f ? 0 : ZMQ_SNDMORE) < 0) fail("zmq_msg_send");
  }
  for (int f = 0; f < 2; f++) {
    zmq_msg_t reply;
    zmq_msg_init(&reply);
    if (zmq_msg_recv(&reply, sockets[0], 0) < 0) fail("zmq_msg_recv");
    if (!f && memmem(zmq_msg_data(&reply), zmq_msg_size(&reply), "\xa5" "error", 6)) {
      fprintf(stderr, "load: the daemon refused attach_memory\n");
      exit(2);
    }
    zmq_msg_close(&reply);
  }
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

static uint32_t *generations;

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
    int is_answer = bytes && (data[0] == options.ok_byte || data[0] == options.ok_byte + 1);
    finished(began[slot], is_answer, is_answer ? NULL : code_of(data, bytes));
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
  make_slots(is_open ? OPEN_LOOP_IN_FLIGHT : options.in_flight);
  generations = calloc((size_t)slots, sizeof *generations);
  if (!generations) fail("memory");
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
  read_options(argc, argv);
  const char *request = option(argc, argv, "--req", NULL);
  if (!options.address || !request) {
    fprintf(stderr, "usage: load --addr ENDPOINT --req FILE (--conc N | --rate R) [--secs S] [--warm S] [--slo-ms MS] "
                    "[--drain S] [--seed N] [--conns N] [--id-frame N] [--ok-byte N]\n"
                    "       load --echo ENDPOINT [--reply-bytes N]\n");
    return 2;
  }
  options.connections = atoi(option(argc, argv, "--conns", "1"));
  options.id_frame = atoi(option(argc, argv, "--id-frame", "1"));
  options.ok_byte = atoi(option(argc, argv, "--ok-byte", "132"));
  if (options.connections < 1 || options.connections > MAX_CONNECTIONS || options.in_flight < 1) {
    fprintf(stderr, "load: --conns 1 to %d, --conc at least 1\n", MAX_CONNECTIONS);
    return 2;
  }
  options.places = atoi(option(argc, argv, "--places", "0"));
  read_request(request);
  if (options.places < 0 || (options.places && (options.places > frame_count || options.connections > 1))) {
    fprintf(stderr, "load: --places wants as many headers in the file, and one connection\n");
    return 2;
  }
  connect_all();
  if (options.places) share_memory((uint64_t)atoll(option(argc, argv, "--memory", "0")));
  generate();
  report();
  return 0;
}
