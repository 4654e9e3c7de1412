/* A delegate of LiteRT, as a vendor of accelerators writes one, for tests: it takes every operator of a model and computes
   nothing, takes none, or fails to start. Structures as in tflite/core/c/common.h, as far as they are used. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct { int size; int data[]; } IntArray;

typedef struct Context Context;
typedef struct Delegate Delegate;

typedef struct {
  void *(*init)(Context *, const char *, size_t);
  void (*free)(Context *, void *);
  int (*prepare)(Context *, void *);
  int (*invoke)(Context *, void *);
  const char *(*profiling_string)(const Context *, const void *);
  int32_t builtin_code;
  const char *custom_name;
  int version;
  void *registration_external;
  void *(*async_kernel)(Context *, void *);
  uint64_t inplace_operator;
} Registration;

struct Context {
  size_t tensors_size;
  int (*get_execution_plan)(Context *, IntArray **);
  void *tensors, *impl, *resize_tensor, *report_error, *add_tensors, *get_node_and_registration;
  int (*replace_nodes)(Context *, Registration, const IntArray *, Delegate *);
};

struct Delegate {
  void *data;
  int (*prepare)(Context *, Delegate *);
  void *copy_from, *copy_to, *free_buffer;
  int64_t flags;
  void *builder;
};

static int done(Context *context, void *node) { (void)context, (void)node; return 0; }

static int take_all(Context *context, Delegate *delegate) {
  Registration kernel = {.prepare = done, .invoke = done, .custom_name = "OwnKernel", .version = 1};
  IntArray *plan;
  return context->get_execution_plan(context, &plan) || context->replace_nodes(context, kernel, plan, delegate);
}

static int take_nothing(Context *context, Delegate *delegate) { (void)context, (void)delegate; return 0; }

void *tflite_plugin_create_delegate(char **keys, char **values, size_t count, void (*report)(const char *)) {
  Delegate *made = calloc(1, sizeof *made);
  made->prepare = take_all;
  for (size_t index = 0; index < count; index++) {
    if (!strcmp(keys[index], "take") && !strcmp(values[index], "nothing")) {
      made->prepare = take_nothing;
    } else {
      report("there is no accelerator at this place");
      free(made);
      return NULL;
    }
  }
  return made;
}

void tflite_plugin_destroy_delegate(void *delegate) { free(delegate); }
