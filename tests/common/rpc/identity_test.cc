// SPDX-License-Identifier: Apache-2.0
// What certificates say of a process, and which role may call what.
#include "common/rpc/identity.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "common/error.h"
#include "common/rpc/authorization.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tandem::rpc {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using enum PeerRole;

Identity Of(PeerRole role, const std::string& worker_id = "") {
  return {.role = role, .worker_id = worker_id};
}

std::string Text(const absl::Status& status) {
  return std::string(status.message());
}

TEST(IdentityTest, EveryRoleIsReadAndWrittenAlike) {
  struct Case {
    const char* uri;
    Identity identity;
    const char* text;
  };
  for (const Case& c : {
           Case{"spiffe://tandem/router", Of(kRouter), "router"},
           Case{"spiffe://tandem/prefill", Of(kPrefill), "prefill"},
           Case{"spiffe://tandem/decode", Of(kDecode), "decode"},
           Case{"spiffe://tandem/operator", Of(kOperator), "operator"},
           Case{"spiffe://tandem/client", Of(kClient), "client"},
           Case{"spiffe://tandem/prefill/p0", Of(kPrefill, "p0"), "prefill/p0"},
           Case{"spiffe://tandem/decode/a.B-c_9", Of(kDecode, "a.B-c_9"),
                "decode/a.B-c_9"},
       }) {
    const auto identity = ParseIdentity(c.uri);
    ASSERT_TRUE(identity.ok()) << identity.status();
    EXPECT_EQ(*identity, c.identity) << c.uri;
    EXPECT_EQ(identity->ToString(), c.text);
  }
}

TEST(IdentityTest, AnythingElseIsRefused) {
  for (const std::string& uri :
       {std::string(""),
        std::string("spiffe://tandem"),
        std::string("spiffe://tandem/"),
        std::string("spiffe://tandem//router"),
        std::string("spiffe://tandem/router/"),
        std::string("spiffe://tandem/router/r0"),
        std::string("spiffe://tandem/operator/x"),
        std::string("spiffe://tandem/prefill/"),
        std::string("spiffe://tandem/prefill//p0"),
        std::string("spiffe://tandem/prefill/p0/"),
        std::string("spiffe://tandem/prefill/p0/x"),
        std::string("spiffe://tandem/prefill/."),
        std::string("spiffe://tandem/prefill/.."),
        std::string("spiffe://tandem/prefill/p 0"),
        std::string("spiffe://tandem/prefill/p%30"),
        std::string("spiffe://tandem/prefill/p0?x"),
        std::string("spiffe://tandem/prefill/p0#x"),
        std::string("spiffe://tandem/prefill/p\0", 26) + "0",
        std::string("spiffe://tandem/prefill/p\xc3\xa9"),
        "spiffe://tandem/prefill/" + std::string(257, 'p'),
        std::string("spiffe://tandem/Router"),
        std::string("spiffe://tandem/routers"),
        std::string("spiffe://tandem/router "),
        std::string(" spiffe://tandem/router"),
        std::string("spiffe://Tandem/router"),
        std::string("SPIFFE://tandem/router"),
        std::string("spiffe://tandem.example/router"),
        std::string("spiffe://tandem:1/router"),
        std::string("https://tandem/router"),
        std::string("router")}) {
    const auto identity = ParseIdentity(uri);
    EXPECT_EQ(identity.status().code(), absl::StatusCode::kUnauthenticated)
        << uri;
    EXPECT_EQ(ErrorReason(identity.status()), "CERTIFICATE_ROLE");
    // What a stranger wrote into a certificate cannot make a line of a log.
    EXPECT_TRUE(std::all_of(
        identity.status().message().begin(), identity.status().message().end(),
        [](unsigned char c) { return c >= 0x20 && c < 0x7f; }));
  }
  EXPECT_TRUE(
      ParseIdentity("spiffe://tandem/prefill/" + std::string(256, 'p')).ok());
}

TEST(IdentityTest, ACertificateHasAllTheRolesThatItNamesOrNone) {
  const auto several =
      ParseIdentities({"spiffe://tandem/router", "spiffe://mesh.local/ns/x",
                       "spiffe://tandem/decode/d0"});
  ASSERT_TRUE(several.ok()) << several.status();
  EXPECT_THAT(*several, ElementsAre(Of(kRouter), Of(kDecode, "d0")));
  for (const std::vector<std::string>& nobodys :
       {std::vector<std::string>{}, {"spiffe://mesh.local/ns/x"}}) {
    const auto none = ParseIdentities(nobodys);
    EXPECT_EQ(none.status().code(), absl::StatusCode::kUnauthenticated);
    EXPECT_THAT(
        Text(none.status()),
        AllOf(HasSubstr("names no role"), HasSubstr("URI:spiffe://tandem/ROLE"),
              HasSubstr("dev-ca.sh")));
  }
  // One that cannot be read spoils the others: it may have meant less.
  EXPECT_FALSE(
      ParseIdentities({"spiffe://tandem/router", "spiffe://tandem/decode/d0/x"})
          .ok());
}

TEST(IdentityTest, AClaimMustBeTheCertificatesOwn) {
  const auto peer = [](std::vector<Identity> identities) {
    return PeerIdentity{.authenticated = true,
                        .identities = std::move(identities)};
  };
  struct Case {
    PeerIdentity peer;
    PeerRole role;
    const char* id;
    bool holds;
  };
  for (const Case& c : {
           Case{{}, kPrefill, "p0", true},  // plain text
           Case{peer({}), kPrefill, "p0", false},
           Case{peer({Of(kPrefill)}), kPrefill, "p0", true},
           Case{peer({Of(kPrefill, "p0")}), kPrefill, "p0", true},
           Case{peer({Of(kPrefill, "p0")}), kPrefill, "p1", false},
           Case{peer({Of(kPrefill, "p0")}), kPrefill, "p", false},
           Case{peer({Of(kPrefill, "p0")}), kPrefill, "p00", false},
           Case{peer({Of(kPrefill, "p0")}), kPrefill, "P0", false},
           Case{peer({Of(kPrefill, "p0")}), kPrefill, "", false},
           Case{peer({Of(kPrefill, "p0")}), kDecode, "p0", false},
           Case{peer({Of(kRouter)}), kPrefill, "p0", false},
           Case{peer({Of(kOperator)}), kDecode, "d0", false},
           Case{peer({Of(kRouter), Of(kDecode, "d0")}), kDecode, "d0", true},
           Case{peer({Of(kPrefill), Of(kDecode, "d0")}), kDecode, "d1", false},
       }) {
    const absl::Status status = CheckClaim(c.peer, c.role, c.id);
    EXPECT_EQ(status.ok(), c.holds) << status << c.id;
    if (c.holds) continue;
    EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied);
    EXPECT_EQ(ErrorReason(status), "IDENTITY_MISMATCH");
  }
  EXPECT_THAT(Text(CheckClaim(peer({Of(kPrefill, "p0")}), kPrefill, "p1")),
              AllOf(HasSubstr("of prefill/p0"), HasSubstr("is prefill/p1"),
                    HasSubstr("--worker-id")));
}

// "/package.Service/Method" of all that proto/ has, but for what collectors
// serve to us.
std::set<std::string> AllMethods() {
  const std::regex package(R"(^package ([\w.]+);)");
  const std::regex service(R"(^service (\w+) \{)");
  const std::regex method(R"(^  rpc (\w+)\()");
  std::set<std::string> methods;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(
           std::string(TANDEM_SOURCE_DIR) + "/proto")) {
    if (entry.path().extension() != ".proto" ||
        entry.path().parent_path().filename() == "opentelemetry") {
      continue;
    }
    std::ifstream file(entry.path());
    std::string line, in_package, in_service;
    std::smatch match;
    while (std::getline(file, line)) {
      if (std::regex_search(line, match, package)) in_package = match[1];
      if (std::regex_search(line, match, service)) in_service = match[1];
      if (std::regex_search(line, match, method)) {
        methods.insert("/" + in_package + "." + in_service + "/" +
                       match[1].str());
      }
    }
  }
  return methods;
}

TEST(AuthorizationTest, EveryMethodHasARuleAndEveryRuleAMethod) {
  std::set<std::string> methods = AllMethods();
  EXPECT_GT(methods.size(), 20u);
  methods.insert(
      "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo");
  std::set<std::string> ruled;
  for (const MethodRule& rule : ClusterRules()) {
    EXPECT_TRUE(ruled.insert(std::string(rule.method)).second) << rule.method;
    EXPECT_NE(rule.roles.empty(), !rule.anybody) << rule.method;
  }
  EXPECT_EQ(ruled, methods);
}

TEST(AuthorizationTest, EachServiceTakesItsRolesAndNoOther) {
  const std::map<std::string, std::set<PeerRole>> expected = {
      {"tandem.v1.RegistryService", {kPrefill, kDecode}},
      {"tandem.v1.DecodeService", {kRouter}},
      {"tandem.v1.PrefillService", {kRouter}},
      {"tandem.v1.HandoffService", {kPrefill}},
      {"tandem.v1.AdminService", {kOperator, kRouter}},
      {"tandem.v1.InferenceService", {kClient, kOperator}},
      {"openengine.v1.Inference", {kClient, kOperator}},
      {"openengine.v1.Control", {kClient, kOperator}},
      {"grpc.health.v1.Health",
       {kRouter, kPrefill, kDecode, kOperator, kClient}},
  };
  for (const std::string& method : AllMethods()) {
    const std::string service = method.substr(1, method.rfind('/') - 1);
    ASSERT_TRUE(expected.contains(service)) << method;
    for (const PeerRole role :
         {kRouter, kPrefill, kDecode, kOperator, kClient}) {
      const absl::Status status =
          Authorize(ClusterRules(), method, {Of(role, "w")});
      EXPECT_EQ(status.ok(), expected.at(service).contains(role))
          << method << " " << RoleName(role);
      if (!status.ok()) {
        EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied);
        EXPECT_EQ(ErrorReason(status), "ROLE_NOT_ALLOWED");
      }
    }
    EXPECT_EQ(Authorize(ClusterRules(), method, {}).ok(),
              service == "grpc.health.v1.Health");
  }
  EXPECT_THAT(Text(Authorize(ClusterRules(), "/tandem.v1.DecodeService/Decode",
                             {Of(kPrefill, "p0")})),
              AllOf(HasSubstr("of prefill/p0"),
                    HasSubstr("tandem.v1.DecodeService/Decode takes"),
                    HasSubstr("router")));
}

TEST(AuthorizationTest, AMethodWithoutARuleIsNobodys) {
  for (const char* const method :
       {"", "/", "/tandem.v1.DecodeService/", "tandem.v1.DecodeService/Decode",
        "/tandem.v1.DecodeService/Decode/", "/tandem.v1.DecodeService/decode",
        "/tandem.v1.DecodeService/Drain"}) {
    EXPECT_EQ(Authorize(ClusterRules(), method,
                        {Of(kRouter), Of(kPrefill), Of(kDecode), Of(kOperator),
                         Of(kClient)})
                  .code(),
              absl::StatusCode::kPermissionDenied)
        << method;
  }
}

}  // namespace
}  // namespace tandem::rpc
