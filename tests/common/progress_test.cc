// SPDX-License-Identifier: Apache-2.0
#include "common/progress.h"

#include <cstdio>
#include <cstdlib>
#include <string>

#include "gtest/gtest.h"

namespace tandem {
namespace {

// Loads 1000 MiB in `seconds`, in a hundred updates; returns what was shown.
std::string Show(double seconds, bool tty, int columns = 80) {
  char* text = nullptr;
  size_t size = 0;
  std::FILE* file = open_memstream(&text, &size);
  absl::Time now = absl::UnixEpoch();
  {
    Progress progress({.what = "tales",
                       .total_bytes = int64_t{1000} << 20,
                       .output = file,
                       .tty = tty,
                       .now = [&] { return now; },
                       .columns = columns});
    for (int i = 1; i <= 100; ++i) {
      now += absl::Seconds(seconds / 100);
      progress.Update((int64_t{10} << 20) * i);
    }
  }
  std::fclose(file);
  std::string shown(text, size);
  std::free(text);
  return shown;
}

TEST(ProgressTest, NothingIsShownForWhatIsOverWithinASecond) {
  EXPECT_EQ(Show(0.9, false), "");
  EXPECT_EQ(Show(0.9, true), "");
}

TEST(ProgressTest, OffATerminalThereIsOneLinePerTenth) {
  EXPECT_EQ(Show(20, false),
            "tales: 10 % (100 MiB of 1000 MiB, 50.0 MiB/s)\n"
            "tales: 20 % (200 MiB of 1000 MiB, 50.0 MiB/s)\n"
            "tales: 30 % (300 MiB of 1000 MiB, 50.0 MiB/s)\n"
            "tales: 40 % (400 MiB of 1000 MiB, 50.0 MiB/s)\n"
            "tales: 50 % (500 MiB of 1000 MiB, 50.0 MiB/s)\n"
            "tales: 60 % (600 MiB of 1000 MiB, 50.0 MiB/s)\n"
            "tales: 70 % (700 MiB of 1000 MiB, 50.0 MiB/s)\n"
            "tales: 80 % (800 MiB of 1000 MiB, 50.0 MiB/s)\n"
            "tales: 90 % (900 MiB of 1000 MiB, 50.0 MiB/s)\n"
            "tales: 100 % (1000 MiB of 1000 MiB, 50.0 MiB/s)\n");
}

TEST(ProgressTest, ATerminalGetsABarThatEndsFull) {
  const std::string shown = Show(10, true);
  EXPECT_NE(shown.find("\rtales [###############...............]  50 % 500 "
                       "MiB, 100 MiB/s, 5s left"),
            std::string::npos)
      << shown;
  const size_t last = shown.rfind('\r');
  EXPECT_EQ(shown.substr(last),
            "\rtales [##############################] 100 % 1000 MiB, 100 "
            "MiB/s, 0s left\033[K\n");
}

// A line that wraps cannot be drawn over.
TEST(ProgressTest, NarrowTerminalsGetShorterLines) {
  for (const int columns : {80, 60, 40, 30, 12}) {
    const std::string shown = Show(10, true, columns);
    size_t begin = shown.find('\r');
    ASSERT_NE(begin, std::string::npos);
    while (begin < shown.size()) {
      const size_t end = shown.find("\033[K", begin);
      ASSERT_NE(end, std::string::npos);
      EXPECT_LT(end - begin - 1, static_cast<size_t>(columns))
          << shown.substr(begin + 1, end - begin - 1);
      begin = shown.find('\r', end);
    }
    EXPECT_NE(shown.find(" 50 %"), std::string::npos) << columns;
  }
}

TEST(ProgressTest, BytesAreReadable) {
  struct Case {
    double bytes;
    const char* text;
  };
  for (const Case& c :
       {Case{0, "0 B"}, Case{1023, "1023 B"}, Case{1024, "1.0 KiB"},
        Case{1536, "1.5 KiB"}, Case{102400, "100 KiB"},
        Case{1048575, "1.0 MiB"}, Case{1.5 * (1 << 30), "1.5 GiB"}}) {
    EXPECT_EQ(HumanBytes(c.bytes), c.text);
  }
}

}  // namespace
}  // namespace tandem
