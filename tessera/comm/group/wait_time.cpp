#include "tessera/comm/group/wait_time.h"

namespace tessera {
namespace {

thread_local WaitTime* innermost = nullptr;

}  // namespace

WaitTime::WaitTime() : outer_(innermost) { innermost = this; }

WaitTime::~WaitTime() {
  innermost = outer_;
  if (outer_) outer_->total_ += total_;
}

bool WaitTime::counts() { return innermost != nullptr; }

void WaitTime::add(Clock::duration waited) { innermost->total_ += waited; }

}  // namespace tessera
