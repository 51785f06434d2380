// Runs a kernel in a process of its own: `runner LIBRARY ARENA JOB`, or `runner ARENA JOB` with COMMDSL_LINKED, when the kernel
// is linked in.
// The arena is a file that all processes of a run map: heaps, error records and tensors. The job is a Head, the numbers of
// the 64-bit words of the arguments that are addresses, the packed arguments (calls x ranks), where those are offsets in the
// arena, and the delays before each call.
// Assumes commdsl wrote all three. Returns 0, or 2 with a word on stderr; ThreadSanitizer has exit codes of its own.
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

// A race is reported with its stacks and ends the run: ranks that it misled would wait until their time is over.
extern "C" const char* __tsan_default_options() { return "exitcode=66:halt_on_error=1"; }

namespace {

struct Head {
  uint64_t ranks, calls, args_bytes, addresses;
};

struct Mapping {
  char* data;
  size_t size;
};

[[noreturn]] void fail(const char* what, const char* which) {
  fprintf(stderr, "runner: %s: %s\n", what, which);
  exit(2);
}

Mapping map(const char* path, int sharing) {
  const int file = open(path, O_RDWR);
  struct stat status;
  if (file < 0 || fstat(file, &status) != 0) fail("cannot open", path);
  const size_t size = static_cast<size_t>(status.st_size);
  void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, sharing, file, 0);
  if (data == MAP_FAILED) fail("cannot map", path);
  close(file);
  return {static_cast<char*>(data), size};
}

using Launch = int (*)(const void*, int, int, const void*);

}  // namespace

#ifdef COMMDSL_LINKED
extern "C" int commdsl_launch(const void* args, int ranks, int calls, const void* delays);

static Launch find_launch(char**) { return commdsl_launch; }
#else
static Launch find_launch(char** argv) {
  void* library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) fail("cannot load", dlerror());
  const Launch launch = reinterpret_cast<Launch>(dlsym(library, "commdsl_launch"));
  if (launch == nullptr) fail("no commdsl_launch in", argv[1]);
  return launch;
}
#endif

int main(int argc, char** argv) {
  if (argc < 3) fail("takes", "[LIBRARY] ARENA JOB");
  const Launch launch = find_launch(argv);
  const Mapping arena = map(argv[argc - 2], MAP_SHARED);
  const Mapping job = map(argv[argc - 1], MAP_PRIVATE);
  const Head& head = *reinterpret_cast<const Head*>(job.data);
  const uint64_t launches = head.ranks * head.calls;
  const uint64_t front = sizeof(Head) + head.addresses * sizeof(uint64_t);
  if (front + launches * (head.args_bytes + sizeof(uint64_t)) != job.size) fail("wrong length of job", argv[argc - 1]);
  const uint64_t* addresses = reinterpret_cast<const uint64_t*>(&head + 1);
  char* args = job.data + front;
  for (uint64_t i = 0; i < launches; ++i) {
    uint64_t* words = reinterpret_cast<uint64_t*>(args + i * head.args_bytes);
    for (uint64_t j = 0; j < head.addresses; ++j) words[addresses[j]] += reinterpret_cast<uint64_t>(arena.data);
  }
  const int result =
      launch(args, static_cast<int>(head.ranks), static_cast<int>(head.calls), args + launches * head.args_bytes);
  if (result != 0) fail("cannot start a thread for every lane of", argv[argc - 1]);
  return 0;
}
