// Status: the result of everything in the native core that can fail, and the calling thread's last error.
//
// Ownership: a Status owns its text. Thread-safety: values; the last error is per thread. Failure: none of these functions
// throws except for want of memory while a message is built.
#ifndef HETERO_STATUS_H_
#define HETERO_STATUS_H_

#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <string>
#include <utility>

#include "hetero/api.h"

namespace hetero {

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(int32_t code, std::string message) : code_(code), message_(std::move(message)) {}

  static Status Ok() { return Status(); }

  [[nodiscard]] bool ok() const { return code_ == 0; }
  [[nodiscard]] int32_t code() const { return code_; }  // 0 or HETERO_E*
  [[nodiscard]] const std::string& message() const { return message_; }

 private:
  int32_t code_ = 0;
  std::string message_;
};

// A failure with a printf-style text: `return Fail(HETERO_EINVAL, "numel is %ld", n);`
[[nodiscard]] __attribute__((format(printf, 2, 3))) inline Status Fail(int32_t code, const char* format, ...) {
  va_list args;
  va_start(args, format);
  va_list again;
  va_copy(again, args);
  const int length = vsnprintf(nullptr, 0, format, args);
  va_end(args);
  std::string text(length > 0 ? static_cast<size_t>(length) : 0, '\0');
  vsnprintf(text.data(), text.size() + 1, format, again);
  va_end(again);
  return Status(code, std::move(text));
}

// "<what>: <strerror> (errno <n>)" with ENOSPC/EDQUOT mapped to HETERO_ENOSPC, ENOMEM to HETERO_ENOMEM, the rest to HETERO_EIO.
[[nodiscard]] inline Status FailErrno(const std::string& what, int error) {
  const int32_t code = (error == ENOSPC || error == EDQUOT) ? HETERO_ENOSPC : error == ENOMEM ? HETERO_ENOMEM : HETERO_EIO;
  return Status(code, what + ": " + strerror(error) + " (errno " + std::to_string(error) + ")");
}

// What hetero_last_error() and hetero_last_code() give the calling thread.
void SetLastError(int32_t code, const std::string& message) noexcept;
const char* LastError() noexcept;
int32_t LastCode() noexcept;

// For the functions of api.h: stores the text on failure; 0 or the negative code.
inline int32_t Report(const Status& status) noexcept {
  if (!status.ok()) SetLastError(status.code(), status.message());
  return status.code();
}

#define HETERO_RETURN_IF_ERROR(expression)         \
  do {                                             \
    ::hetero::Status hetero_status = (expression); \
    if (!hetero_status.ok()) return hetero_status; \
  } while (0)

}  // namespace hetero

#endif  // HETERO_STATUS_H_
