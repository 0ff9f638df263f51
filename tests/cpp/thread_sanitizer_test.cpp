// Whatever starts a thread is in a file that the thread sanitizer's build has (threaded_tests in CMakeLists.txt): looked at after
// each test, where all of them are built.
#if !defined(__SANITIZE_THREAD__) && !defined(OFFLOAD_WITH_CUDA) // whose driver starts some, too

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include <atomic>
#include <string>
#include <string_view>

namespace {

std::atomic<int> started{0};

/// Whether the file is in `OFFLOAD_THREADED_TESTS`, names without `_test.cpp` with a space behind each.
bool isListed(std::string_view file) {
  const std::size_t begin = file.rfind('/') + 1;
  const std::string name{file.substr(begin, file.rfind("_test.cpp") - begin)};
  return std::string(" " OFFLOAD_THREADED_TESTS).find(" " + name + " ") != std::string::npos;
}

class Listener : public testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo& /*test*/) override {
    before_ = started;
  }

  void OnTestEnd(const testing::TestInfo& test) override {
    if (started != before_ && !isListed(test.file())) {
      ADD_FAILURE() << test.test_suite_name() << "." << test.name() << " starts threads: add " << test.file()
                    << " to threaded_tests in CMakeLists.txt, so that the thread sanitizer looks at it";
    }
  }

  int before_ = 0;
};

const bool listens = [] {
  testing::UnitTest::GetInstance()->listeners().Append(new Listener); // which owns it
  return true;
}();

TEST(ThreadSanitizer, IsToldOfThreadsByTheirFiles) {
  EXPECT_TRUE(isListed("/somewhere/tests/cpp/thread_test.cpp"));
  EXPECT_TRUE(isListed("thread_test.cpp"));
  EXPECT_FALSE(isListed("/somewhere/tests/cpp/read_test.cpp"));
  EXPECT_FALSE(isListed("/somewhere/tests/cpp/thread_sanitizer_test.cpp"));
}

} // namespace

/// In the C library's place.
extern "C" [[gnu::visibility("default")]] int pthread_create(
    pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*), void* argument) noexcept {
  static const auto real = reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  ++started;
  return real(thread, attributes, run, argument);
}

#endif
