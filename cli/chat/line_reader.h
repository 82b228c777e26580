// SPDX-License-Identifier: Apache-2.0
// Lines of a person or of a pipe. On a terminal with editing and history
// (libedit); elsewhere as they come, without a prompt.

#ifndef TANDEM_CLI_CHAT_LINE_READER_H_
#define TANDEM_CLI_CHAT_LINE_READER_H_

#include <memory>
#include <optional>
#include <string>

namespace tandem::chat {

class LineReader {
 public:
  // `history`: a file that keeps lines between runs; empty: none. It is made
  // for its owner's eyes only.
  LineReader(bool terminal, bool colour, std::string history);
  ~LineReader();
  LineReader(const LineReader&) = delete;
  LineReader& operator=(const LineReader&) = delete;

  // What was typed, without the end of its line; nothing at the end of the
  // input. A line that ends with \ goes on in the next one, and """ opens text
  // of several lines up to the next """. Ctrl-C gives the line up: "".
  std::optional<std::string> Read();

 private:
  struct Editor;

  std::optional<std::string> ReadLine(bool more);

  std::unique_ptr<Editor> editor_;  // null off a terminal
};

}  // namespace tandem::chat

#endif  // TANDEM_CLI_CHAT_LINE_READER_H_
