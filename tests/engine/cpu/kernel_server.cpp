// The kernels alone, for another process that sends calls and the memory they read and write.
//
// Says where that memory is going to be; then, for each call, reads its number, arguments and
// memory, and writes the result and the memory.
#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

extern "C" {
void forward(), draft_chain(), scratch_bytes(), packed_bytes(), pack(), unpack(), linear(), topk();
void run_experts(), rare_matmul(), set_rare_matmul(void*);

thread_local int thread_number = 0;
static int team = 1;

// In place of an OpenMP library.
int omp_get_thread_num() { return thread_number; }
int omp_get_num_threads() { return team; }
void GOMP_parallel(void (*work)(void*), void* data, unsigned threads, unsigned) {
    team = int(threads);
    std::vector<std::thread> others;
    for (int i = 1; i < team; ++i) {
        others.emplace_back([=] {
            thread_number = i;
            work(data);
        });
    }
    work(data);
    for (std::thread& other : others) other.join();
}
}

constexpr int64_t ROOM = int64_t(1) << 30;
struct Message { int64_t function, bytes, arguments[9]; };
// All that they take are integers and pointers.
using Function = int64_t (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                             int64_t);

static void transfer(bool reads, void* data, int64_t bytes) {
    const size_t done = reads ? fread(data, 1, bytes, stdin) : fwrite(data, 1, bytes, stdout);
    if (int64_t(done) != bytes) exit(reads && feof(stdin) ? 0 : 1);
}

int main() {
    void (*const functions[])() = {forward, draft_chain, scratch_bytes, packed_bytes,
                                   pack,    unpack,      linear,        topk,
                                   run_experts};
    set_rare_matmul(reinterpret_cast<void*>(rare_matmul));
    void* memory = mmap(nullptr, ROOM, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    transfer(false, &memory, 8);
    for (;;) {
        fflush(stdout);
        Message m;
        transfer(true, &m, sizeof m);
        if (m.bytes > ROOM) return 1;
        transfer(true, memory, m.bytes);
        const int64_t* a = m.arguments;
        const int64_t result = reinterpret_cast<Function>(functions[m.function])(
            a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8]);
        transfer(false, const_cast<int64_t*>(&result), 8);
        transfer(false, memory, m.bytes);
    }
}
