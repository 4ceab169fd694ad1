// A test harness in one header, for one source file per executable: TEST(name) { ... } with CHECK* inside.
//
// Usage: ./memory_test [substring ...]   runs the tests whose names contain one of the substrings (all without arguments).
// A failed CHECK is reported and the test goes on; REQUIRE* leaves the test at once. Checks may be used from any thread
// (REQUIRE* only from the test's own).
#ifndef HETERO_TESTS_CHECK_H_
#define HETERO_TESTS_CHECK_H_

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <mutex>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

namespace check {

struct Case {
  const char* name;
  void (*run)();
};

inline std::vector<Case>& Cases() {
  static std::vector<Case> cases;
  return cases;
}

struct Registrar {
  Registrar(const char* name, void (*run)()) { Cases().push_back({name, run}); }
};

struct Abort {};  // thrown by REQUIRE*

inline std::atomic<int64_t>& Failures() {
  static std::atomic<int64_t> failures{0};
  return failures;
}

inline void Report(const char* file, int line, const std::string& text) {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  if (++Failures() <= 50) std::fprintf(stderr, "%s:%d: %s\n", file, line, text.c_str());
}

template <class T>
std::string Show(const T& value) {
  std::ostringstream out;
  out.precision(17);
  if constexpr (std::is_enum_v<T>) {
    out << static_cast<long long>(value);
  } else if constexpr (std::is_same_v<T, uint8_t> || std::is_same_v<T, int8_t>) {
    out << static_cast<int>(value);
  } else if constexpr (std::is_same_v<T, std::nullptr_t>) {
    out << "nullptr";
  } else {
    out << value;
  }
  return out.str();
}

template <class A, class B, class F>
bool Compare(const char* file, int line, const char* text, const char* op, const A& a, const B& b, F holds) {
  if (holds(a, b)) return true;
  Report(file, line, std::string("CHECK failed: ") + text + "   got " + Show(a) + " " + op + " " + Show(b) + " is false");
  return false;
}

inline bool Selected(const char* name, int argc, char** argv) {
  if (argc <= 1) return true;
  for (int i = 1; i < argc; ++i) {
    if (std::strstr(name, argv[i]) != nullptr) return true;
  }
  return false;
}

inline int RunAll(int argc, char** argv) {
  int num_run = 0;
  int num_failed = 0;
  for (const Case& test : Cases()) {
    if (!Selected(test.name, argc, argv)) continue;
    ++num_run;
    const int64_t before = Failures();
    const auto begin = std::chrono::steady_clock::now();
    try {
      test.run();
    } catch (const Abort&) {
    } catch (const std::exception& error) {
      Report(__FILE__, __LINE__, std::string("unexpected exception: ") + error.what());
    }
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    const bool failed = Failures() != before;
    num_failed += failed ? 1 : 0;
    std::printf("%s %s (%.2f s)\n", failed ? "FAILED" : "ok    ", test.name, seconds);
    std::fflush(stdout);
  }
  std::printf("%d tests, %d failed\n", num_run, num_failed);
  return num_failed == 0 && num_run > 0 ? 0 : 1;
}

}  // namespace check

#define TEST(name)                                                                     \
  static void hetero_test_##name();                                                    \
  static const ::check::Registrar hetero_registrar_##name(#name, &hetero_test_##name); \
  static void hetero_test_##name()

#define CHECK(condition)                                                                \
  do {                                                                                  \
    if (!(condition)) ::check::Report(__FILE__, __LINE__, "CHECK failed: " #condition); \
  } while (0)
#define REQUIRE(condition)                                                \
  do {                                                                    \
    if (!(condition)) {                                                   \
      ::check::Report(__FILE__, __LINE__, "REQUIRE failed: " #condition); \
      throw ::check::Abort{};                                             \
    }                                                                     \
  } while (0)
#define HETERO_CHECK_OP(a, op, b)                                        \
  ::check::Compare(__FILE__, __LINE__, #a " " #op " " #b, #op, (a), (b), \
                   [](const auto& hetero_x, const auto& hetero_y) { return hetero_x op hetero_y; })
#define CHECK_EQ(a, b) (void)HETERO_CHECK_OP(a, ==, b)
#define CHECK_NE(a, b) (void)HETERO_CHECK_OP(a, !=, b)
#define CHECK_LT(a, b) (void)HETERO_CHECK_OP(a, <, b)
#define CHECK_LE(a, b) (void)HETERO_CHECK_OP(a, <=, b)
#define CHECK_GT(a, b) (void)HETERO_CHECK_OP(a, >, b)
#define CHECK_GE(a, b) (void)HETERO_CHECK_OP(a, >=, b)
#define REQUIRE_EQ(a, b)                                    \
  do {                                                      \
    if (!HETERO_CHECK_OP(a, ==, b)) throw ::check::Abort{}; \
  } while (0)
// For hetero::Status: the text is part of the report.
#define CHECK_OK(expression)                                                                                            \
  do {                                                                                                                  \
    const auto hetero_result = (expression);                                                                            \
    if (!hetero_result.ok())                                                                                            \
      ::check::Report(__FILE__, __LINE__, std::string("CHECK_OK failed: " #expression ": ") + hetero_result.message()); \
  } while (0)
#define REQUIRE_OK(expression)                                                                                            \
  do {                                                                                                                    \
    const auto hetero_result = (expression);                                                                              \
    if (!hetero_result.ok()) {                                                                                            \
      ::check::Report(__FILE__, __LINE__, std::string("REQUIRE_OK failed: " #expression ": ") + hetero_result.message()); \
      throw ::check::Abort{};                                                                                             \
    }                                                                                                                     \
  } while (0)

int main(int argc, char** argv) { return ::check::RunAll(argc, argv); }

#endif  // HETERO_TESTS_CHECK_H_
