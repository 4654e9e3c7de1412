/* Runs a model with an FP32 input x [1, 16] and output y [1, 4] on shared memory (docs/shared-memory.md).
 * cc -O2 shared_memory_client.c -lzmq -o client && ./client /run/edge-runtime/infer.sock mlp */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <zmq.h>
struct ask { uint32_t version, operation; uint64_t argument; };
struct told { uint32_t version, answer; uint64_t region, bytes; unsigned char secret[16]; };
static void fail(const char *what) { perror(what); exit(1); }
/* Returns a region's memory. The connection stays open as long as the memory is used: its end ends the region. */
static float *allocate(const char *path, uint64_t bytes, struct told *told) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  snprintf(address.sun_path, sizeof address.sun_path, "%s.memory", path);
  int memory = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), fd;
  if (connect(memory, (struct sockaddr *)&address, sizeof address)) fail(address.sun_path);
  struct ask ask = {1, 1, bytes};
  if (send(memory, &ask, sizeof ask, MSG_NOSIGNAL) != sizeof ask) fail("send");
  union { struct cmsghdr first; char room[CMSG_SPACE(sizeof(int))]; } control;
  struct iovec part = {told, sizeof *told};
  struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
  if (recvmsg(memory, &message, MSG_CMSG_CLOEXEC) != sizeof *told || told->answer) fail("no region");
  memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fd);
  void *data = mmap(NULL, told->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return data == MAP_FAILED ? (fail("mmap"), NULL) : data;
}
/* Sends a header and an empty id, and waits for the reply's header and id. There are no other frames. */
static void ask_daemon(void *dealer, const char *header, size_t bytes) {
  char reply[4096], id[64];
  if (zmq_send(dealer, header, bytes, ZMQ_SNDMORE) < 0 || zmq_send(dealer, "", 0, 0) < 0) fail("zmq_send");
  int size = zmq_recv(dealer, reply, sizeof reply, 0);
  if (size < 0 || zmq_recv(dealer, id, sizeof id, 0) < 0) fail("zmq_recv");
  if (memmem(reply, (size_t)size, "\xa5" "error", 6)) { fprintf(stderr, "%.*s\n", size, reply); exit(1); }
}
int main(int argc, char **argv) {
  if (argc != 3 || strlen(argv[2]) > 31) return fprintf(stderr, "usage: client SOCKET MODEL\n"), 2;
  struct told told;
  float *data = allocate(argv[1], 128, &told);
  char address[256], header[512], secret[33];
  snprintf(address, sizeof address, "ipc://%s", argv[1]);
  void *dealer = zmq_socket(zmq_ctx_new(), ZMQ_DEALER);
  if (zmq_connect(dealer, address)) fail(address);
  for (int i = 0; i < 16; i++) snprintf(secret + 2 * i, 3, "%02x", told.secret[i]);
  int bytes = snprintf(header, sizeof header, "\x83\xa1v\x01\xa2op\xad" "attach_memory\xaaparameters\x81\xa6secret\xd9\x20%s", secret);
  ask_daemon(dealer, header, (size_t)bytes);
  for (int i = 0; i < 16; i++) data[i] = (float)i / 16;
  bytes = snprintf(header, sizeof header, /* msgpack: the input lies at byte 0 of the region, the output goes to byte 64 */
    "\x85\xa1v\x01\xa2op\xa5infer\xa5model%c%s\xa6inputs\x91\x85\xa4name\xa1x\xa8" "datatype\xa4" "FP32\xa5shape\x92\x01\x10"
    "\xa6region%c\xa6offset%c\xa7outputs\x91\x83\xa4name\xa1y\xa6region%c\xa6offset%c",
    (int)(0xa0 | strlen(argv[2])), argv[2], (int)told.region, 0, (int)told.region, 64);
  ask_daemon(dealer, header, (size_t)bytes);
  printf("%g %g %g %g\n", data[16], data[17], data[18], data[19]);
  return 0;
}
