/* What every load generator counts and prints, and the arrivals of an open loop. Included by load.c and oip_load.c. */
#define _GNU_SOURCE
#include <math.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

enum { MAX_CODES = 16, MAX_CODE_LENGTH = 32 };
enum { MAX_PENDING = 1 << 22 };           /* arrivals that wait for a slot; more are counted as unsent at once */

typedef struct { float *us; size_t count, capacity; } Latencies;
typedef struct { char name[MAX_CODE_LENGTH]; Latencies latencies; } Code;

static struct {
  const char *address;
  int connections, in_flight, id_frame, ok_byte, places;
  double rate, seconds, warm_s, drain_s, deadline_s;
} options;
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

static Code *code_named(const char *name) {
  for (int i = 0; i < code_count; i++)
    if (!strcmp(codes[i].name, name)) return &codes[i];
  if (code_count == MAX_CODES) return &codes[MAX_CODES - 1];
  snprintf(codes[code_count].name, MAX_CODE_LENGTH, "%s", name);
  return &codes[code_count++];
}

/* In a closed loop what ends inside the window counts; in an open loop what was to begin inside it. */
static void finished(double began, int is_answer, const char *code) {
  double now = clock_s(), decides = options.rate > 0 ? began : now;
  if (is_answer) total_ok++; else total_errors++;
  ok_in_span += is_answer && now >= measure_from && now <= measure_until;
  if (decides < measure_from || decides > measure_until) return;
  if (is_answer) {
    note(&answers, now - began);
    within_deadline += now - began <= options.deadline_s;
  } else {
    note(&errors, now - began);
    note(&code_named(code)->latencies, now - began);
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

static int slots, free_count, *free_slots;
static double *began;

static void read_options(int argc, char **argv) {
  options.address = option(argc, argv, "--addr", NULL);
  options.in_flight = atoi(option(argc, argv, "--conc", "1"));
  options.rate = atof(option(argc, argv, "--rate", "0"));
  options.seconds = atof(option(argc, argv, "--secs", "3"));
  options.warm_s = atof(option(argc, argv, "--warm", "1"));
  options.drain_s = atof(option(argc, argv, "--drain", "5"));
  options.deadline_s = atof(option(argc, argv, "--slo-ms", "1e9")) / 1e3;
  random_state += (uint64_t)atol(option(argc, argv, "--seed", "0")) * 0xd1342543de82ef95u;
}

/* Slots that a request takes from its beginning to its end. */
static void make_slots(int count) {
  slots = count;
  free_slots = malloc(sizeof *free_slots * (size_t)slots);
  began = calloc((size_t)slots, sizeof *began);
  pending = options.rate > 0 ? malloc(sizeof *pending * MAX_PENDING) : NULL;
  if (!free_slots || !began || (options.rate > 0 && !pending)) fail("memory");
  for (int i = slots - 1; i >= 0; i--) free_slots[free_count++] = i;
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
