// SPDX-License-Identifier: Apache-2.0
// Reasons of errors, as the public interface promises them.

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <set>
#include <string>

namespace tandem::router {
namespace {

std::string Contents(const std::filesystem::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::set<std::string> Matches(const std::string& text, const char* pattern) {
  std::set<std::string> all;
  const std::regex expression(pattern);
  for (std::sregex_iterator it(text.begin(), text.end(), expression), end;
       it != end; ++it) {
    all.insert((*it)[1]);
  }
  return all;
}

// Programs compare reasons, and find them in inference.proto: all that the
// router's sources give, and no other.
TEST(Reasons, AreThoseThatTheProtocolLists) {
  const std::filesystem::path root = TANDEM_SOURCE_DIR;
  // Of operators' and workers' services.
  const std::set<std::string> others = {"adapter_control.cc",
                                        "compatibility.cc", "key_file.cc",
                                        "otlp_exporter.cc", "registry.cc"};
  std::set<std::string> used;
  for (const char* folder : {"core", "grpc", "intake", "placement", "telemetry",
                             "tenants", "text", "validate"}) {
    for (const auto& file :
         std::filesystem::directory_iterator(root / "router" / folder)) {
      const std::string extension = file.path().extension();
      if ((extension != ".cc" && extension != ".h") ||
          others.contains(file.path().filename())) {
        continue;
      }
      used.merge(
          Matches(Contents(file.path()), R"x("([A-Z]{3,}(?:_[A-Z]+)*)")x"));
    }
  }
  used.erase("WORKER_RESTARTED");   // from worker to router
  used.erase("REQUEST_NOT_FOUND");  // AdminService
  const std::string proto = Contents(root / "proto/tandem/v1/inference.proto");
  const size_t begin = proto.find("whose reason is one of");
  const size_t end = proto.find("A stream that ends with OK");
  ASSERT_LT(begin, end);
  std::string list = proto.substr(begin, end - begin);
  // Behind the canonical codes.
  list = std::regex_replace(list, std::regex("\n//   [A-Z_]+ "), "\n");
  EXPECT_EQ(Matches(list, "\\b([A-Z]{3,}(?:_[A-Z]+)*)\\b"), used);
}

}  // namespace
}  // namespace tandem::router
