#include "status.h"

namespace hetero {

namespace {
// A plain buffer: setting it cannot fail, and the pointer handed out stays valid until the thread's next error.
thread_local char last_error[1024];
thread_local int32_t last_code = 0;
}  // namespace

void SetLastError(int32_t code, const std::string& message) noexcept {
  last_code = code;
  const size_t length = message.size() < sizeof(last_error) - 1 ? message.size() : sizeof(last_error) - 1;
  memcpy(last_error, message.data(), length);
  last_error[length] = '\0';
}

const char* LastError() noexcept { return last_error; }

int32_t LastCode() noexcept { return last_code; }

}  // namespace hetero
