// SPDX-License-Identifier: Apache-2.0
// Messages that no good peer sends: each differs from a good one in one field,
// found by walking its descriptor, so that a field that is added is covered.

#ifndef TANDEM_TESTS_HOSTILE_MESSAGES_H_
#define TANDEM_TESTS_HOSTILE_MESSAGES_H_

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "google/protobuf/descriptor.h"
#include "google/protobuf/message.h"

namespace tandem::testing {

// One field of a message, as hostile values are set to it.
class HostileField {
 public:
  using Message = google::protobuf::Message;
  using Field = google::protobuf::FieldDescriptor;
  using Visit =
      std::function<void(const Message& message, const std::string& what)>;

  // `visit` gets each message that differs from `good` in one field.
  static void ForEach(const Message& good, const Visit& visit) {
    Walk(good, "", 0, visit);
  }

 private:
  static constexpr int kDepth = 5;    // of messages in messages
  static constexpr int kMany = 5000;  // elements of a list

  static void Walk(const Message& good, const std::string& path, int depth,
                   const Visit& visit) {
    const auto* const descriptor = good.GetDescriptor();
    for (int i = 0; i < descriptor->field_count(); ++i) {
      const Field* const field = descriptor->field(i);
      const std::string name =
          path.empty() ? field->name() : path + "." + field->name();
      const auto changed = [&](const std::string& what, const auto& change) {
        const std::unique_ptr<Message> copy(good.New());
        copy->CopyFrom(good);
        change(copy.get(), copy->GetReflection());
        visit(*copy, name + " " + what);
      };
      changed("unset",
              [&](Message* m, const auto* r) { r->ClearField(m, field); });
      if (field->cpp_type() == Field::CPPTYPE_MESSAGE) {
        WalkInner(good, field, name, depth, visit, changed);
        continue;
      }
      for (int value = 0; value < kValues; ++value) {
        const std::string what = "value " + std::to_string(value);
        if (!field->is_repeated()) {
          changed(what, [&](Message* m, const auto* r) {
            Set(m, r, field, value, /*add=*/false);
          });
          continue;
        }
        changed("and " + what, [&](Message* m, const auto* r) {
          Set(m, r, field, value, /*add=*/true);
        });
      }
      if (field->is_repeated()) {
        changed("many", [&](Message* m, const auto* r) {
          for (int n = 0; n < kMany; ++n) Set(m, r, field, 1, /*add=*/true);
        });
      }
    }
  }

  template <typename Changed>
  static void WalkInner(const Message& good, const Field* field,
                        const std::string& name, int depth, const Visit& visit,
                        const Changed& changed) {
    const auto* const reflection = good.GetReflection();
    if (field->is_repeated()) {
      changed("many", [&](Message* m, const auto* r) {
        for (int n = 0; n < kMany; ++n) r->AddMessage(m, field);
      });
    } else {
      changed("empty", [&](Message* m, const auto* r) {
        r->MutableMessage(m, field)->Clear();
      });
    }
    if (depth == kDepth) return;
    // What it has, or an empty one.
    const bool has = field->is_repeated()
                         ? reflection->FieldSize(good, field) > 0
                         : reflection->HasField(good, field);
    const std::unique_ptr<Message> inner(
        field->is_repeated()
            ? google::protobuf::MessageFactory::generated_factory()
                  ->GetPrototype(field->message_type())
                  ->New()
            : reflection->GetMessage(good, field).New());
    if (has) {
      inner->CopyFrom(field->is_repeated()
                          ? reflection->GetRepeatedMessage(good, field, 0)
                          : reflection->GetMessage(good, field));
    }
    // Types that hold themselves end somewhere.
    const int next = has ? depth + 1 : kDepth - 1 > depth ? kDepth - 1 : kDepth;
    Walk(*inner, name, next, [&](const Message& hostile, const std::string& w) {
      const std::unique_ptr<Message> copy(good.New());
      copy->CopyFrom(good);
      const auto* const r = copy->GetReflection();
      Message* const at =
          !field->is_repeated() ? r->MutableMessage(copy.get(), field)
          : has ? r->MutableRepeatedMessage(copy.get(), field, 0)
                : r->AddMessage(copy.get(), field);
      at->CopyFrom(hostile);
      visit(*copy, w);
    });
  }

  // The same number of values of every type; some twice.
  static constexpr int kValues = 6;
  template <typename T>
  static T Number(int value) {
    using Limits = std::numeric_limits<T>;
    if constexpr (std::is_floating_point_v<T>) {
      const T values[kValues] = {Limits::quiet_NaN(), Limits::infinity(),
                                 -Limits::infinity(), T{-1},
                                 Limits::max(),       T{0}};
      return values[value];
    } else {
      const T values[kValues] = {
          Limits::lowest(),   T{0},          T{1},
          static_cast<T>(-1), Limits::max(), Limits::max() / T{2}};
      return values[value];
    }
  }
  static std::string Text(int value) {
    const std::string values[kValues] = {"",
                                         "x",
                                         std::string(1 << 16, 'x'),
                                         std::string("\xff\xfe\0", 3),
                                         "../../etc/x\r\n",
                                         std::string(17, '\0')};
    return values[value];
  }

  template <typename Reflection>
  static void Set(Message* m, const Reflection* r, const Field* field,
                  int value, bool add) {
    switch (field->cpp_type()) {
      case Field::CPPTYPE_INT32:
        return add ? r->AddInt32(m, field, Number<int32_t>(value))
                   : r->SetInt32(m, field, Number<int32_t>(value));
      case Field::CPPTYPE_INT64:
        return add ? r->AddInt64(m, field, Number<int64_t>(value))
                   : r->SetInt64(m, field, Number<int64_t>(value));
      case Field::CPPTYPE_UINT32:
        return add ? r->AddUInt32(m, field, Number<uint32_t>(value))
                   : r->SetUInt32(m, field, Number<uint32_t>(value));
      case Field::CPPTYPE_UINT64:
        return add ? r->AddUInt64(m, field, Number<uint64_t>(value))
                   : r->SetUInt64(m, field, Number<uint64_t>(value));
      case Field::CPPTYPE_FLOAT:
        return add ? r->AddFloat(m, field, Number<float>(value))
                   : r->SetFloat(m, field, Number<float>(value));
      case Field::CPPTYPE_DOUBLE:
        return add ? r->AddDouble(m, field, Number<double>(value))
                   : r->SetDouble(m, field, Number<double>(value));
      case Field::CPPTYPE_BOOL:
        return add ? r->AddBool(m, field, value % 2 == 0)
                   : r->SetBool(m, field, value % 2 == 0);
      case Field::CPPTYPE_ENUM:
        return add ? r->AddEnumValue(m, field, Number<int32_t>(value))
                   : r->SetEnumValue(m, field, Number<int32_t>(value));
      case Field::CPPTYPE_STRING:
        return add ? r->AddString(m, field, Text(value))
                   : r->SetString(m, field, Text(value));
      case Field::CPPTYPE_MESSAGE:
        return;
    }
  }
};

}  // namespace tandem::testing

#endif  // TANDEM_TESTS_HOSTILE_MESSAGES_H_
