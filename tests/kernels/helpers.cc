// Several callers at once ask for helpers, with pauses in which these fall asleep. Each piece must run exactly once, before its call returns.
// Prints how many calls were helped.

#include "../../src/tilewright/kernels/helpers.h"

#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

struct Work {
  std::vector<int> runs;  // of each piece; plain numbers, so that the thread sanitizer sees whoever is not waited for
};

void run(const void* given, int64_t piece) { ++const_cast<Work*>(static_cast<const Work*>(given))->runs[piece]; }

std::atomic<int> helped{0}, wrong{0};

void call(int number) {
  for (int turn = 0; turn < 400; ++turn) {
    const int64_t pieces = 2 + (turn * 7 + number) % 13;
    Work work{std::vector<int>(pieces, 0)};
    const bool had = native::helpers().help(1 + turn % 3, pieces, &work, run);
    helped += had;
    for (const int times : work.runs) wrong += times != (had ? 1 : 0);
    if (turn % 100 == 99) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

}  // namespace

int main() {
  std::vector<std::thread> callers;
  for (int number = 0; number < 3; ++number) callers.emplace_back(call, number);
  for (std::thread& caller : callers) caller.join();
  std::printf("%d\n", helped.load());
  std::fflush(stdout);
  std::_Exit(wrong.load() == 0 ? 0 : 1);  // the helpers go on
}
