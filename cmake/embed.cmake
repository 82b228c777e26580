# Files as constants in a C++ source, so that a binary brings them along:
#   cmake -DOUTPUT=assets.cc -DFOLDER=router/page/assets -DFILES=a,b -P embed.cmake
set(arrays "")
set(rows "")
set(index 0)
string(REPLACE "," ";" files "${FILES}")
foreach(file ${files})
  file(READ ${FOLDER}/${file} hex HEX)
  string(LENGTH "${hex}" size)
  math(EXPR size "${size} / 2")
  string(REGEX REPLACE "(..)" "0x\\1," bytes "${hex}")
  string(APPEND arrays
    "const unsigned char kFile${index}[] = {${bytes}0};\n")
  string(APPEND rows
    "    {\"${file}\", {reinterpret_cast<const char*>(kFile${index}), ${size}}},\n")
  math(EXPR index "${index} + 1")
endforeach()
file(WRITE ${OUTPUT}
"// Made by cmake/embed.cmake.
#include \"router/page/assets.h\"

namespace tandem::router {
namespace {
${arrays}
const Asset kAssets[] = {
${rows}};
}  // namespace

absl::Span<const Asset> Assets() { return kAssets; }

}  // namespace tandem::router
")
