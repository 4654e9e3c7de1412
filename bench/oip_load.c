/* Load generator for the Open Inference Protocol: HTTP/1.1 with kept connections, and gRPC over HTTP/2.
 *
 *   oip_load --addr HOST:PORT --req FILE --conc N            closed loop: N requests in flight
 *   oip_load --addr HOST:PORT --req FILE --rate R            open loop: Poisson arrivals, R a second
 *
 * Over HTTP FILE is one whole request, head and body, and each request in flight has a connection to itself (--conns in an
 * open loop). With --grpc PATH it is one message, and the requests share --conns connections (4), each on a stream of its
 * own. HOST:PORT is numeric, or unix:/path. An answer is a status 200, or over gRPC a message; all else is an error,
 * counted under the "code" of its JSON, or the trailer edge-runtime-code, or its status.
 *
 * One thread, one epoll. Latencies, sleeping and the printed line are load.c's (counts.h). Build: cc -O2 oip_load.c -lm
 */
#include "counts.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { OPEN_LOOP_CONNECTIONS = 512, OPEN_LOOP_STREAMS = 4096, GRPC_CONNECTIONS = 4, MAX_EVENTS = 256 };
enum { IN_BYTES = 1 << 18, OUT_BYTES = 1 << 18, STREAM_TABLE = 1 << 13 };
enum { DATA = 0, HEADERS = 1, RST_STREAM = 3, SETTINGS = 4, PING = 6, GOAWAY = 7, WINDOW_UPDATE = 8 };
enum { END_STREAM = 1, ACK = 1, END_HEADERS = 4, FRAME_HEAD = 9, WINDOW_RENEWED = 1 << 20 };
enum { JOIN_ABOVE = 5000 }; /* a second: as in load.c */

typedef struct {
  int fd, index, wants_write;
  size_t sent, in_bytes;       /* sent: of the HTTP request that is on its way */
  unsigned char *in;
  /* gRPC */
  unsigned char *out;
  size_t out_from, out_to;
  int64_t window;
  uint32_t next_stream, max_frame, initial_window, received;
  uint32_t slot_of[STREAM_TABLE];
} Connection;

typedef struct { int connection, is_active, has_message; uint32_t stream; int64_t window; size_t sent; } Slot;

static Connection *connections;
static Slot *requests;
static unsigned char *request;
static size_t request_bytes;
static const char *grpc_path;
static int epoll;
static unsigned char header_block[1024];
static size_t header_bytes;

/* ---- connections ---- */

static int connected_socket(void) {
  int fd;
  if (!strncmp(options.address, "unix:", 5)) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%s", options.address + 5);
    fd = socket(AF_UNIX, SOCK_STREAM, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address)) fail(options.address);
  } else {
    char host[64];
    const char *colon = strrchr(options.address, ':');
    if (!colon || colon - options.address >= (long)sizeof host) { fprintf(stderr, "oip_load: --addr HOST:PORT\n"); exit(2); }
    snprintf(host, sizeof host, "%.*s", (int)(colon - options.address), options.address);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(colon + 1))};
    if (inet_pton(AF_INET, host, &address.sin_addr) != 1) fail(host);
    fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address)) fail(options.address);
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  }
  fcntl(fd, F_SETFL, O_NONBLOCK);
  return fd;
}

static void put_frame_head(unsigned char *at, size_t bytes, int type, int flags, uint32_t stream) {
  at[0] = (unsigned char)(bytes >> 16); at[1] = (unsigned char)(bytes >> 8); at[2] = (unsigned char)bytes;
  at[3] = (unsigned char)type; at[4] = (unsigned char)flags;
  at[5] = (unsigned char)(stream >> 24); at[6] = (unsigned char)(stream >> 16);
  at[7] = (unsigned char)(stream >> 8); at[8] = (unsigned char)stream;
}

static uint32_t be32(const unsigned char *at) {
  return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

static void put32(unsigned char *at, uint32_t value) {
  at[0] = (unsigned char)(value >> 24); at[1] = (unsigned char)(value >> 16);
  at[2] = (unsigned char)(value >> 8); at[3] = (unsigned char)value;
}

static void put_frame(Connection *c, int type, int flags, uint32_t stream, const void *payload, size_t bytes) {
  if (c->out_to + FRAME_HEAD + bytes > OUT_BYTES) fail("output buffer");
  put_frame_head(c->out + c->out_to, bytes, type, flags, stream);
  if (bytes) memcpy(c->out + c->out_to + FRAME_HEAD, payload, bytes);
  c->out_to += FRAME_HEAD + bytes;
}

static void watch(Connection *c, int wants_write) {
  if (c->wants_write == wants_write) return;
  c->wants_write = wants_write;
  struct epoll_event event = {.events = EPOLLIN | (wants_write ? EPOLLOUT : 0), .data.ptr = c};
  epoll_ctl(epoll, EPOLL_CTL_MOD, c->fd, &event);
}

static void open_connection(Connection *c) {
  c->fd = connected_socket();
  c->wants_write = 0;
  c->in_bytes = c->sent = 0;
  struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
  if (epoll_ctl(epoll, EPOLL_CTL_ADD, c->fd, &event)) fail("epoll_ctl");
  if (!grpc_path) return;
  c->out_from = c->out_to = 0;
  c->window = 65535;
  c->next_stream = 1;
  c->max_frame = 16384;
  c->initial_window = 65535;
  c->received = 0;
  memcpy(c->out, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 24);
  c->out_to = 24;
  /* no dynamic table for the server's headers, no pushes, a window that never fills */
  static const unsigned char settings[] = {0, 1, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 4, 0x3f, 0xff, 0xff, 0xff};
  put_frame(c, SETTINGS, 0, 0, settings, sizeof settings);
  unsigned char window[4];
  put32(window, 0x3fffffff);
  put_frame(c, WINDOW_UPDATE, 0, 0, window, sizeof window);
}

/* ---- HTTP/1.1 ---- */

static void end_request(int slot, int is_answer, const char *code) {
  finished(began[slot], is_answer, code);
  requests[slot].is_active = 0;
  free_slots[free_count++] = slot;
}

static void reopen(Connection *c, const char *code) {
  close(c->fd);
  if (!grpc_path) {
    if (requests[c->index].is_active) end_request(c->index, 0, code);
  } else {
    for (int s = 0; s < slots; s++)
      if (requests[s].is_active && requests[s].connection == c->index) end_request(s, 0, code);
  }
  open_connection(c);
}

static void send_http(Connection *c) {
  while (requests[c->index].is_active && c->sent < request_bytes) {
    ssize_t count = send(c->fd, request + c->sent, request_bytes - c->sent, MSG_NOSIGNAL);
    if (count < 0) {
      if (errno == EAGAIN) break;
      return; /* the answer, or the end of the connection, is read next */
    }
    c->sent += (size_t)count;
  }
  watch(c, requests[c->index].is_active && c->sent < request_bytes);
}

/* The text between the quotes after "code": in a JSON body. */
static const char *json_code(const unsigned char *body, size_t bytes, const char *otherwise) {
  static char name[MAX_CODE_LENGTH];
  const unsigned char *at = memmem(body, bytes, "\"code\":", 7), *end = body + bytes;
  if (!at) return otherwise;
  for (at += 7; at < end && (*at == ' ' || *at == '"'); at++) {}
  size_t length = 0;
  while (at + length < end && at[length] != '"' && length + 1 < sizeof name) length++;
  memcpy(name, at, length);
  name[length] = 0;
  return name;
}

static void receive_http(Connection *c) {
  for (;;) {
    ssize_t count = recv(c->fd, c->in + c->in_bytes, IN_BYTES - c->in_bytes, 0);
    if (count == 0 || (count < 0 && errno != EAGAIN)) { reopen(c, "closed"); return; }
    if (count < 0) return;
    c->in_bytes += (size_t)count;
    for (;;) {
      unsigned char *end = memmem(c->in, c->in_bytes, "\r\n\r\n", 4);
      if (!end) break;
      size_t head = (size_t)(end - c->in) + 4, body = 0;
      *end = 0;
      char *length = strcasestr((char *)c->in, "\r\ncontent-length:");
      if (length) body = strtoul(length + 17, NULL, 10);
      int closes = strcasestr((char *)c->in, "\r\nconnection: close") != NULL;
      *end = '\r';
      if (c->in_bytes < head + body) break;
      int status = atoi((char *)c->in + 9), is_early = c->sent < request_bytes;
      char otherwise[16];
      snprintf(otherwise, sizeof otherwise, "http %d", status);
      if (status >= 200) {
        if (!requests[c->index].is_active) { stray++; reopen(c, "stray"); return; }
        const char *code = status == 200 ? NULL : json_code(c->in + head, body, otherwise);
        end_request(c->index, status == 200, code);
        closes |= is_early; /* refused by its head: the rest of the body is not sent */
      }
      c->in_bytes -= head + body;
      memmove(c->in, c->in + head + body, c->in_bytes);
      if (closes) { reopen(c, "closed"); return; }
    }
    if (c->in_bytes == IN_BYTES) { fprintf(stderr, "oip_load: an answer above %d bytes\n", IN_BYTES); exit(2); }
  }
}

/* ---- gRPC ---- */

static void put_header(const char *name, const char *value) {
  size_t n = strlen(name), v = strlen(value);
  if (header_bytes + n + v + 3 > sizeof header_block || n > 126 || v > 126) fail("header");
  header_block[header_bytes++] = 0; /* literal, without indexing, neither Huffman-coded */
  header_block[header_bytes++] = (unsigned char)n;
  memcpy(header_block + header_bytes, name, n);
  header_bytes += n;
  header_block[header_bytes++] = (unsigned char)v;
  memcpy(header_block + header_bytes, value, v);
  header_bytes += v;
}

static void flush_out(Connection *c) {
  while (c->out_from < c->out_to) {
    ssize_t count = send(c->fd, c->out + c->out_from, c->out_to - c->out_from, MSG_NOSIGNAL);
    if (count < 0) break;
    c->out_from += (size_t)count;
  }
  if (c->out_from == c->out_to) c->out_from = c->out_to = 0;
  else if (c->out_from > OUT_BYTES / 2) {
    memmove(c->out, c->out + c->out_from, c->out_to - c->out_from);
    c->out_to -= c->out_from;
    c->out_from = 0;
  }
}

/* Frames of the streams of a connection, in turn, as far as windows and the buffer allow. */
static void send_grpc(Connection *c) {
  size_t total = request_bytes;
  for (;;) {
    int progress = 0;
    for (int s = c->index; s < slots; s += options.connections) {
      Slot *slot = &requests[s];
      if (!slot->is_active || slot->sent >= total) continue;
      size_t bytes = total - slot->sent;
      if (bytes > c->max_frame) bytes = c->max_frame;
      if ((int64_t)bytes > c->window) bytes = c->window > 0 ? (size_t)c->window : 0;
      if ((int64_t)bytes > slot->window) bytes = slot->window > 0 ? (size_t)slot->window : 0;
      if (!bytes || c->out_to + FRAME_HEAD + bytes > OUT_BYTES) continue;
      int ends = slot->sent + bytes == total;
      put_frame(c, DATA, ends ? END_STREAM : 0, slot->stream, request + slot->sent, bytes);
      slot->sent += bytes;
      slot->window -= (int64_t)bytes;
      c->window -= (int64_t)bytes;
      progress = 1;
    }
    size_t before = c->out_from;
    flush_out(c);
    if (!progress || (c->out_to && before == c->out_from)) break;
  }
  watch(c, c->out_from < c->out_to);
}

static const char *trailer_code(const unsigned char *block, size_t bytes) {
  static char name[MAX_CODE_LENGTH];
  static const char *const keys[] = {"edge-runtime-code", "grpc-status"};
  for (int k = 0; k < 2; k++) {
    const unsigned char *at = memmem(block, bytes, keys[k], strlen(keys[k])), *end = block + bytes;
    if (!at || (at += strlen(keys[k])) >= end) continue;
    size_t length = *at & 0x7f;
    if (*at & 0x80 || length + 8 > sizeof name || at + 1 + length > end) continue;
    snprintf(name, sizeof name, "%s%.*s", k ? "grpc " : "", (int)length, (const char *)at + 1);
    return name;
  }
  return "no status";
}

static void receive_frame(Connection *c, int type, int flags, uint32_t stream, const unsigned char *data, size_t bytes) {
  uint32_t found = stream ? c->slot_of[(stream >> 1) % STREAM_TABLE] : 0;
  Slot *slot = found ? &requests[found - 1] : NULL;
  if (slot && (!slot->is_active || slot->stream != stream)) slot = NULL;
  switch (type) {
    case SETTINGS:
      if (flags & ACK) return;
      for (size_t i = 0; i + 6 <= bytes; i += 6) {
        uint32_t value = be32(data + i + 2);
        if (data[i + 1] == 5) c->max_frame = value < 65536 ? value : 65536;
        if (data[i + 1] != 4) continue;
        for (int s = c->index; s < slots; s += options.connections)
          requests[s].window += (int64_t)value - c->initial_window;
        c->initial_window = value;
      }
      put_frame(c, SETTINGS, ACK, 0, NULL, 0);
      return;
    case PING:
      if (!(flags & ACK)) put_frame(c, PING, ACK, 0, data, bytes);
      return;
    case WINDOW_UPDATE:
      if (!stream) c->window += be32(data);
      else if (slot) slot->window += be32(data);
      return;
    case DATA:
      c->received += (uint32_t)bytes;
      if (c->received >= WINDOW_RENEWED) {
        unsigned char window[4];
        put32(window, c->received);
        put_frame(c, WINDOW_UPDATE, 0, 0, window, sizeof window);
        c->received = 0;
      }
      if (slot && bytes) slot->has_message = 1;
      break;
    case HEADERS: break;
    case RST_STREAM:
      if (slot) end_request((int)(slot - requests), 0, "reset");
      return;
    default: return;
  }
  if (!(flags & END_STREAM)) return;
  if (!slot) { stray++; return; }
  const char *code = slot->has_message ? NULL : type == HEADERS ? trailer_code(data, bytes) : "no status";
  end_request((int)(slot - requests), slot->has_message, code);
}

static void receive_grpc(Connection *c) {
  for (;;) {
    ssize_t count = recv(c->fd, c->in + c->in_bytes, IN_BYTES - c->in_bytes, 0);
    if (count == 0 || (count < 0 && errno != EAGAIN)) { reopen(c, "closed"); return; }
    if (count < 0) break;
    c->in_bytes += (size_t)count;
    size_t at = 0;
    while (c->in_bytes - at >= FRAME_HEAD) {
      const unsigned char *head = c->in + at;
      size_t bytes = (size_t)head[0] << 16 | (size_t)head[1] << 8 | head[2];
      if (c->in_bytes - at < FRAME_HEAD + bytes) break;
      receive_frame(c, head[3], head[4], be32(head + 5) & 0x7fffffff, head + FRAME_HEAD, bytes);
      at += FRAME_HEAD + bytes;
    }
    c->in_bytes -= at;
    memmove(c->in, c->in + at, c->in_bytes);
  }
  send_grpc(c);
}

/* ---- the loop ---- */

static Connection *start_one(double at) {
  int s = free_slots[--free_count];
  Slot *slot = &requests[s];
  Connection *c = &connections[slot->connection];
  began[s] = at;
  slot->is_active = 1;
  slot->sent = 0;
  slot->has_message = 0;
  sent++;
  if (!grpc_path) {
    c->sent = 0;
    send_http(c);
    return c;
  }
  slot->stream = c->next_stream;
  slot->window = c->initial_window;
  c->next_stream += 2;
  c->slot_of[(slot->stream >> 1) % STREAM_TABLE] = (uint32_t)s + 1;
  if (c->out_to + FRAME_HEAD + header_bytes > OUT_BYTES) { send_grpc(c); }
  put_frame(c, HEADERS, END_HEADERS, slot->stream, header_block, header_bytes);
  return c;
}

static void flush_all(void) {
  if (!grpc_path) return;
  for (int i = 0; i < options.connections; i++) send_grpc(&connections[i]);
}

static void generate(void) {
  int is_open = options.rate > 0;
  double start = clock_s(), next = start;
  measure_from = start + options.warm_s;
  measure_until = measure_from + options.seconds;
  struct epoll_event events[MAX_EVENTS];
  for (;;) {
    double now = clock_s();
    int sending = now < measure_until, begun = 0;
    if (!sending && (free_count == slots || now > measure_until + options.drain_s)) break;
    if (sending && !is_open)
      for (; free_count; begun++) start_one(now);
    if (sending && is_open) {
      for (; next <= now; next -= log(1 - uniform()) / options.rate) push_arrival(next);
      for (; free_count && pending_head != pending_tail; begun++) start_one(pending[pending_head++ % MAX_PENDING]);
    }
    if (begun) flush_all();
    double wait = 0.005;
    if (sending && is_open && free_count) {
      wait = next - clock_s();
      if (options.rate > JOIN_ABOVE && wait < 0.0002) wait = 0.0002;
      if (wait < 0) wait = 0;
    }
    struct timespec limit = {(time_t)wait, (long)((wait - floor(wait)) * 1e9)};
    int count = epoll_pwait2(epoll, events, MAX_EVENTS, &limit, NULL);
    for (int i = 0; i < count; i++) {
      Connection *c = events[i].data.ptr;
      if (events[i].events & EPOLLOUT) { if (grpc_path) send_grpc(c); else send_http(c); }
      if (events[i].events & ~(uint32_t)EPOLLOUT) { if (grpc_path) receive_grpc(c); else receive_http(c); }
    }
  }
}

static void read_request(const char *path) {
  FILE *file = fopen(path, "rb");
  if (!file || fseek(file, 0, SEEK_END)) fail(path);
  size_t prefix = grpc_path ? 5 : 0, bytes = (size_t)ftell(file);
  request = malloc(prefix + bytes + 1);
  rewind(file);
  if (!request || fread(request + prefix, 1, bytes, file) != bytes) fail(path);
  fclose(file);
  request_bytes = prefix + bytes;
  if (grpc_path) { request[0] = 0; put32(request + 1, (uint32_t)bytes); }
}

int main(int argc, char **argv) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  prctl(PR_SET_TIMERSLACK, 1000ul);
  read_options(argc, argv);
  grpc_path = option(argc, argv, "--grpc", NULL);
  const char *path = option(argc, argv, "--req", NULL), *timeout = option(argc, argv, "--grpc-timeout", NULL);
  if (!options.address || !path || options.in_flight < 1) {
    fprintf(stderr, "usage: oip_load --addr HOST:PORT|unix:/path --req FILE (--conc N | --rate R) [--grpc PATH] [--conns N] "
                    "[--secs S] [--warm S] [--slo-ms MS] [--drain S] [--seed N] [--grpc-timeout 500m]\n");
    return 2;
  }
  int is_open = options.rate > 0, in_flight = is_open ? OPEN_LOOP_CONNECTIONS : options.in_flight;
  if (grpc_path && is_open) in_flight = OPEN_LOOP_STREAMS;
  int most = grpc_path ? (in_flight < GRPC_CONNECTIONS ? in_flight : GRPC_CONNECTIONS) : in_flight;
  const char *given = option(argc, argv, "--conns", NULL);
  options.connections = given && (grpc_path || is_open) ? atoi(given) : most;
  if (!grpc_path) in_flight = options.connections;
  if (options.connections < 1 || options.connections > in_flight) { fprintf(stderr, "oip_load: --conns\n"); return 2; }
  if (grpc_path) {
    put_header(":method", "POST");
    put_header(":scheme", "http");
    put_header(":path", grpc_path);
    put_header(":authority", "localhost");
    put_header("te", "trailers");
    put_header("content-type", "application/grpc");
    if (timeout) put_header("grpc-timeout", timeout);
  }
  read_request(path);
  make_slots(in_flight);
  requests = calloc((size_t)slots, sizeof *requests);
  connections = calloc((size_t)options.connections, sizeof *connections);
  epoll = epoll_create1(EPOLL_CLOEXEC);
  if (!requests || !connections || epoll < 0) fail("memory");
  for (int s = 0; s < slots; s++) requests[s].connection = s % options.connections;
  for (int i = 0; i < options.connections; i++) {
    Connection *c = &connections[i];
    c->index = i;
    c->in = malloc(IN_BYTES);
    c->out = grpc_path ? malloc(OUT_BYTES) : NULL;
    if (!c->in || (grpc_path && !c->out)) fail("memory");
    open_connection(c);
  }
  generate();
  report();
  return 0;
}
