// SPDX-License-Identifier: Apache-2.0
// Models whose weights are not matrices of numbers: codes, of which some no
// kernel takes as they are, and experts in one tensor.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "engine/model/model_work.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/checkpoint_maker.h"
#include "tests/engine/model/model_fixture.h"
#include "tests/engine/mxfp4_maker.h"
#include "tests/engine/rig.h"

namespace tandem::engine {
namespace {

using kernels::DType;
using nlohmann::json;
using testing::HasSubstr;
using testing::IsEmpty;

// As compressed-tensors packs it, of so many kinds of powers.
template <int kPowers>
CodedProduct PackedMxfp4(size_t rows, size_t cols, std::mt19937& random) {
  Mxfp4Stack made = DrawMxfp4(1, rows, cols, kPowers, random);
  made.blocks.shape = {made.blocks.shape[1], made.blocks.shape[2] * 16};
  made.scales.shape.erase(made.scales.shape.begin());
  CodedProduct product{.tensors = {{".weight_packed", made.blocks},
                                   {".weight_scale", made.scales}}};
  for (size_t i = 0; i < rows * cols; ++i) {
    product.numbers.push_back(double{made.numbers[i % cols * rows + i / cols]});
  }
  return product;
}

class DequantisedTest : public ModelTest {
 protected:
  // The case's checkpoint in the form, and beside it in its numbers.
  void WriteBoth(const char* name, const char* form) {
    spec_ = LoadCases()[name];
    WriteCoded(spec_, CodedForms().at(form), dir_, &plain_);
  }

  std::vector<float> Logits(const TempDir& dir, std::optional<DType> kept) {
    RigOptions options;
    options.load.weight_dtype = kept;
    Rig rig(dir.path(), backend_.get(), options);
    TestSequence sequence = rig.NewSequence(PromptIds(spec_, 20), 20);
    TestSequence* one = &sequence;
    return rig.Advance({&one, 1}, 20).logits[0];
  }

  // Inputs of integer products are rounded: no logit is further off than
  // `share` of the greatest.
  void ExpectNearlyThePlain(const char* form, double share = 0.05) {
    const std::vector<float> expected = Logits(plain_, {});
    const std::vector<float> logits = Logits(dir_, {});
    double error = 0, size = 0;
    for (size_t i = 0; i < logits.size(); ++i) {
      error = std::max<double>(error, std::abs(logits[i] - expected[i]));
      size = std::max<double>(size, std::abs(expected[i]));
    }
    EXPECT_GT(error, 0) << form;
    EXPECT_LT(error, share * size) << form;
  }

  TempDir plain_;
  json spec_;
};

TEST_F(DequantisedTest, ActOrderIsKeptInFourBits) {
  WriteBoth("llama2_mha_f32", "gptq_act_order");
  const auto model = Load();
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_THAT((*model)->dequantised(), IsEmpty());
  EXPECT_EQ((*model)->weight_format(), "f32+int4");
  EXPECT_EQ((*model)->layers()[0].qkv->dtype(), DType::kInt4);
  // Other drawn weights are off by 0.01 to 0.05; in a wrong order by about 1.
  ExpectNearlyThePlain("gptq_act_order", 0.2);
}

// Products that are one matrix take their inputs in one order.
TEST_F(DequantisedTest, OrdersApartAreTheNumbersInF32) {
  WriteBoth("llama2_mha_f32", "gptq_orders_apart");
  const auto model = Load();
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ((*model)->dequantised().size(), 2u * 3);
  EXPECT_EQ((*model)->dequantised()[0],
            "model.layers.0.self_attn.q_proj.weight (act-order)");
  EXPECT_EQ((*model)->layers()[0].qkv->dtype(), DType::kF32);
  EXPECT_EQ((*model)->layers()[0].output->dtype(), DType::kInt4);
  ExpectNearlyThePlain("gptq_orders_apart");
}

// Tokens are looked up in such a matrix where it is the embedding, too.
TEST_F(DequantisedTest, AHeadInActOrderIsItsNumbers) {
  const CodedForm& form = CodedForms().at("packed_int4");
  WriteBoth("llama2_mha_f32", "packed_int4");
  FileTensors tensors = TensorsOf(dir_);
  const auto head = tensors.extract("lm_head.weight");
  ASSERT_FALSE(head.empty());
  const std::vector<int64_t>& shape = head.mapped().shape;
  std::mt19937 random(3);
  for (const auto& [behind, part] :
       form.make(static_cast<size_t>(shape[0]), static_cast<size_t>(shape[1]),
                 random)
           .tensors) {
    tensors["lm_head" + behind] = part;
  }
  tensors.erase("lm_head.weight_zero_point");  // of outputs in eights
  for (const bool ordered : {false, true}) {
    if (ordered) {
      std::vector<int32_t> groups;
      for (int32_t i = 0; i < shape[1]; ++i) groups.push_back(i % 2);
      tensors["lm_head.weight_g_idx"] = {"I32", {shape[1]}, BytesOf(groups)};
    }
    dir_.Write("model.safetensors", SafetensorsFile(tensors));
    const auto model = Load();
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_EQ((*model)->dequantised(),
              ordered ? std::vector<std::string>{"lm_head.weight (act-order)"}
                      : std::vector<std::string>());
    EXPECT_EQ((*model)->head().dtype(), ordered ? DType::kF32 : DType::kInt4);
  }
}

// Where a part of a head turns, rows stand in another order than in the file.
TEST_F(DequantisedTest, CodesOfRowsThatMoveAreThoseRows) {
  for (const char* form : {"gptq_act_order", "packed_int4", "int8", "w8a8"}) {
    WriteBoth("phi4_mini_f32", form);
    ExpectNearlyThePlain(form);
  }
}

TEST_F(DequantisedTest, W8A8IsKeptAsItIs) {
  WriteBoth("llama2_mha_f32", "w8a8");
  const auto model = Load();
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_THAT((*model)->dequantised(), testing::IsEmpty());
  EXPECT_EQ((*model)->weight_format(), "f32+w8a8");
  EXPECT_EQ((*model)->embedding().dtype(), DType::kF32) << "as it was left";
  for (const Model::Layer& layer : (*model)->layers()) {
    for (const auto* matrix :
         {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) {
      EXPECT_EQ((*matrix)->dtype(), DType::kW8A8);
    }
  }
  ExpectNearlyThePlain("w8a8");
}

// Quantisers to GPTQ write them for every product.
TEST_F(DequantisedTest, BiasesOfZerosSayNothingBesideGptqAlone) {
  const struct {
    const char* form;
    const char* name;
    char last;
    bool placed;
  } cases[] = {{"gptq_act_order", "self_attn.q_proj.bias", 0, true},
               {"gptq_act_order", "self_attn.q_proj.bias", 1, false},
               {"gptq_act_order", "input_layernorm.bias", 0, false},
               {"packed_int4", "self_attn.q_proj.bias", 0, false}};
  for (const auto& c : cases) {
    WriteBoth("llama2_mha_f32", c.form);
    FileTensors tensors = TensorsOf(dir_);
    const std::string name = std::string("model.layers.0.") + c.name;
    tensors[name] = {"F16", {64}, Zeros(128)};
    tensors[name].bytes.back() = c.last;
    dir_.Write("model.safetensors", SafetensorsFile(tensors));
    const absl::Status status = Load().status();
    EXPECT_EQ(status.ok(), c.placed) << name << ": " << status;
    if (c.placed) continue;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(name + "\" has no place in the model"));
  }
}

TEST_F(DequantisedTest, Mxfp4IsKeptInFourBits) {
  spec_ = LoadCases()["gpt_oss_f32"];
  WriteMxfp4(spec_, 3, dir_, &plain_);
  const auto model = Load();
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ((*model)->weight_format(), "f32+int4");
  EXPECT_THAT((*model)->dequantised(), testing::IsEmpty());
  EXPECT_EQ(MakeWorkShape(**model, DType::kF32, /*gpu=*/false).expert_bytes,
            MatrixBytes(DType::kInt4, 2 * 32, 64) +
                MatrixBytes(DType::kInt4, 64, 32));
  ExpectNearlyThePlain("mxfp4");
}

TEST_F(DequantisedTest, Mxfp4OfScalesFarApartIsDequantised) {
  spec_ = LoadCases()["gpt_oss_f32"];
  WriteMxfp4(spec_, 40, dir_, &plain_);
  const auto model = Load();
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ((*model)->weight_format(), "bf16+f32+int4");
  ASSERT_FALSE((*model)->dequantised().empty());
  EXPECT_THAT((*model)->dequantised()[0],
              "model.layers.0.mlp.experts.gate_up_proj of expert 0 (scales far "
              "apart)");
  EXPECT_THAT((*model)->dequantised()[1],
              "model.layers.0.mlp.experts.gate_up_proj of expert 1 (scales far "
              "apart)");
  ExpectNearlyThePlain("mxfp4");
}

TEST_F(DequantisedTest, PackedMxfp4IsKeptWhereItsScalesAreNear) {
  const json config = {
      {"quant_method", "compressed-tensors"},
      {"format", "mxfp4-pack-quantized"},
      {"ignore", {"lm_head"}},
      {"config_groups",
       {{"group_0",
         {{"weights",
           {{"num_bits", 4}, {"type", "float"}, {"group_size", 32}}}}}}}};
  spec_ = LoadCases()["llama_linear_f32"];
  for (const bool near : {true, false}) {
    const CodedForm form{config, near ? PackedMxfp4<3> : PackedMxfp4<40>};
    WriteCoded(spec_, form, dir_, &plain_);
    const auto model = Load();
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_EQ((*model)->layers()[0].qkv->dtype(),
              near ? DType::kInt4 : DType::kBF16);
    ASSERT_EQ((*model)->dequantised().size(), near ? 0u : 4u * 2);
    if (near) {
      ExpectNearlyThePlain("packed mxfp4");
      continue;
    }
    EXPECT_THAT((*model)->dequantised()[0],
                "model.layers.0.self_attn.q_proj.weight (scales far apart)");
    EXPECT_EQ(Logits(dir_, DType::kF32), Logits(plain_, DType::kF32));
  }
}

// Published files have inputs first, those of transformers 5 outputs.
TEST_F(DequantisedTest, ExpertsInOneTensorMayLieEitherWay) {
  spec_ = LoadCases()["qwen3_vl_moe_f32"];
  WriteCheckpoint(spec_, plain_);
  dir_.Write("config.json", spec_["config"].dump());
  FileTensors tensors;
  const auto file = Checkpoint::Open(plain_.path());
  ASSERT_TRUE(file.ok()) << file.status();
  int stacks = 0;
  for (const TensorInfo& tensor : file->tensors()) {
    const auto bytes = file->bytes(tensor);
    FileTensor copy{
        std::string(tensor.dtype),
        tensor.shape,
        {reinterpret_cast<const char*>(bytes.data()), bytes.size()}};
    if (tensor.shape.size() == 3) {
      ++stacks;
      const auto rows = static_cast<size_t>(tensor.shape[1]);
      const auto cols = static_cast<size_t>(tensor.shape[2]);
      std::swap(copy.shape[1], copy.shape[2]);
      for (size_t i = 0; i < bytes.size() / 4; ++i) {
        const size_t to =
            i / (rows * cols) * rows * cols + i % cols * rows + i / cols % rows;
        memcpy(&copy.bytes[to * 4], &bytes[i * 4], 4);
      }
    }
    tensors[tensor.name] = copy;
  }
  EXPECT_EQ(stacks, 4);
  dir_.Write("model.safetensors", SafetensorsFile(tensors));
  EXPECT_EQ(Logits(dir_, {}), Logits(plain_, {}));
}

// Where a matrix is as wide as it is high, shapes do not tell which way it
// lies: as transformers has it then. The same model with each expert by itself.
TEST_F(DequantisedTest, SquareExpertsInOneTensorHaveOutputsFirst) {
  constexpr size_t kWide = 32, kHidden = 64;
  spec_ = LoadCases()["qwen3_vl_moe_f32"];
  json& text = spec_["config"]["text_config"];
  text["moe_intermediate_size"] = kWide;
  for (json& tensor : spec_["tensors"]) {
    const std::string name = tensor[0];
    if (name.ends_with("experts.gate_up_proj")) tensor[1][1] = 2 * kWide;
    if (name.ends_with("experts.down_proj")) tensor[1][2] = kWide;
  }
  WriteCheckpoint(spec_, dir_);
  json config = text;
  config.erase("rope_scaling");
  config["architectures"] = {"Qwen3MoeForCausalLM"};
  config["model_type"] = "qwen3_moe";
  config["tie_word_embeddings"] = false;
  plain_.Write("config.json", config.dump());
  const auto file = Checkpoint::Open(dir_.path());
  ASSERT_TRUE(file.ok()) << file.status();
  FileTensors tensors;
  for (const TensorInfo& tensor : file->tensors()) {
    const auto bytes = file->bytes(tensor);
    const std::string all(reinterpret_cast<const char*>(bytes.data()),
                          bytes.size());
    if (tensor.shape.size() != 3) {
      tensors[tensor.name] = {std::string(tensor.dtype), tensor.shape, all};
      continue;
    }
    const size_t each = all.size() / static_cast<size_t>(tensor.shape[0]);
    const bool down = tensor.name.ends_with("down_proj");
    const size_t half = each / (down ? 1 : 2);
    const std::string layer = tensor.name.substr(0, tensor.name.rfind('.') + 1);
    for (size_t e = 0; e * each < all.size(); ++e) {
      const auto put = [&](const char* part, size_t at) {
        FileTensor& one = tensors[layer + std::to_string(e) + part + ".weight"];
        one = {"F32", {kWide, kHidden}, all.substr(e * each + at, half)};
        if (down) one.shape = {kHidden, kWide};
      };
      put(down ? ".down_proj" : ".gate_proj", 0);
      if (!down) put(".up_proj", half);
    }
  }
  plain_.Write("model.safetensors", SafetensorsFile(tensors));
  EXPECT_EQ(Logits(dir_, {}), Logits(plain_, {}));
}

TEST_F(DequantisedTest, Fp8BlocksAreTheNumbersInTheTypeAskedFor) {
  for (const char* name : {"llama2_mha_f32", "qwen3_moe_f32"}) {
    WriteBoth(name, "fp8_blocks");
    const auto model = Load();
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_EQ((*model)->layers()[0].qkv->dtype(), DType::kBF16) << name;
    EXPECT_THAT((*model)->dequantised()[0],
                "model.layers.0.self_attn.q_proj.weight (fp8 in groups)");
    for (const DType kept : {DType::kBF16, DType::kF32}) {
      EXPECT_EQ(Logits(dir_, kept), Logits(plain_, kept)) << name;
    }
  }
}

// As DeepSeek V3 is published; what is reshaped has no codes of its own.
TEST_F(DequantisedTest, LatentAttentionOfFp8BlocksIsTheirNumbers) {
  for (const char* name : {"deepseek_v2_f32", "deepseek_v3_f32"}) {
    WriteBoth(name, "fp8_blocks");
    const auto model = Load();
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_THAT((*model)->dequantised(),
                testing::Contains("model.layers.0.self_attn.kv_b_proj.weight "
                                  "(latent attention)"));
    EXPECT_EQ((*model)->layers()[0].latent.kv->dtype(), DType::kBF16);
    for (const DType kept : {DType::kBF16, DType::kF32}) {
      EXPECT_EQ(Logits(dir_, kept), Logits(plain_, kept)) << name;
    }
  }
  for (const char* form : {"int8", "w8a8"}) {
    WriteBoth("deepseek_v3_f32", form);
    ExpectNearlyThePlain(form);
  }
}

TEST_F(DequantisedTest, Fp8BlocksWithoutScalesAreRefused) {
  WriteBoth("llama2_mha_f32", "fp8_blocks");
  std::ifstream stream(dir_.path() + "/model.safetensors", std::ios::binary);
  std::string file{std::istreambuf_iterator<char>(stream), {}};
  const size_t at = file.find("q_proj.weight_scale_inv");
  ASSERT_NE(at, file.npos);
  file.replace(at, 23, "q_proj.weight_scale_two");
  dir_.Write("model.safetensors", file);
  EXPECT_THAT(std::string(Load().status().message()),
              HasSubstr("'model.layers.0.self_attn.q_proj.weight_scale': is "
                        "missing"));
}

}  // namespace
}  // namespace tandem::engine
