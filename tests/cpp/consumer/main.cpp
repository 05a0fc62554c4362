// SPDX-License-Identifier: Apache-2.0
//
// What an engine builder writes: CPU results, the errors' texts, and what a device call answers.
#include <dspark/dspark.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

namespace {

int failures = 0;

void expect(bool condition, const char* what) {
  if (condition) return;
  std::printf("FAILED: %s\n", what);
  ++failures;
}

void check_confidence() {
  const float logit[] = {-2.0f, 1.25f};  // [1, 2]
  float conditional[2] = {}, survival[2] = {};
  int32_t status = -1;
  dspark_confidence_params p{};
  p.struct_size = sizeof p;
  p.num_requests = 1;
  p.gamma = 2;
  p.logit = logit;
  p.logit_stride = 2;
  p.conditional = conditional;
  p.survival = survival;
  p.status = &status;
  size_t bytes = 1;
  dspark_status answer = dspark_confidence_workspace(DSPARK_CPU, &p, &bytes);
  expect(answer.code == DSPARK_OK, answer.message);
  std::vector<unsigned char> scratch(bytes + 256);
  answer = dspark_confidence(DSPARK_CPU, &p, {scratch.data(), bytes}, nullptr);
  expect(answer.code == DSPARK_OK, answer.message);
  expect(status == 0, "status is 0");
  expect(std::fabs(survival[1] - 0.119203f * 0.777300f) < 1e-6f, "survival of two slots");

  p.gamma = 99;
  p.status = nullptr;
  answer = dspark_confidence(DSPARK_CPU, &p, {}, nullptr);
  expect(answer.code == DSPARK_INVALID_ARGUMENT, "two wrong arguments are refused");
  expect(std::strstr(answer.message, "gamma") != nullptr, "the message names gamma");
  expect(std::strstr(answer.message, "status") != nullptr, "the message names status");

  p.gamma = 2;
  p.status = &status;
  answer = dspark_confidence(DSPARK_CUDA, &p, {}, nullptr);
  dspark_cuda_info cuda{};
  cuda.struct_size = sizeof cuda;
  dspark_cuda_query(&cuda);
  if (cuda.usable == 0) {
    const int32_t code = cuda.compiled != 0 ? DSPARK_CUDA_ERROR : DSPARK_UNSUPPORTED;
    expect(answer.code == code, "a kernel without a device answers with a status");
  }
}

// Two ranks hold two ids each of a request with one draft; the exchange is a copy.
struct Ranks {
  const float rows[2][4] = {{0.0f, 1.0f, 2.0f, 3.0f}, {5.0f, 1.0f, 0.0f, 2.0f}};
  float part[2][2][2];  // [rank, row, its ids]
  const int32_t sizes[2] = {2, 2}, draft[1] = {3}, length[1] = {1}, first[2] = {0, 2};
  const uint64_t seed[1] = {7};
  const int64_t position[1] = {40};
  const float temperature[1] = {1.0f};
  int32_t accepted, emitted, tokens[2], anchor, finish, status;
  float logprob[2], raw[2];
  int8_t flags[1];
  dspark_shard_scan scans[2][2];
  dspark_shard_draw draws[2][1];

  dspark_rejection_sampler_params call(const float* logits, int32_t ids) {
    dspark_rejection_sampler_params p{};
    p.struct_size = sizeof p;
    p.num_requests = p.gamma = 1;
    p.num_rows = 2;
    p.vocab_size = p.draft_vocab_size = ids;
    p.target_logits = logits;
    p.target_stride = ids;
    p.draft_tokens = draft;
    p.draft_tokens_stride = 1;
    p.draft_len = length;
    p.cu_seqlens = first;
    p.seed = seed;
    p.position = position;
    p.temperature = temperature;
    p.num_accepted = &accepted;
    p.num_emitted = &emitted;
    p.tokens = tokens;
    p.next_anchor = &anchor;
    p.logprob = logprob;
    p.logprob_raw = raw;
    p.accepted = flags;
    p.finish = &finish;
    p.status = &status;
    return p;
  }
  dspark_vocab_parallel_params rank(int32_t k) {
    dspark_vocab_parallel_params p{};
    p.struct_size = sizeof p;
    p.num_ranks = 2;
    p.rank = k;
    p.shard_sizes = sizes;
    p.scans = scans[0];
    p.draws = draws[0];
    p.scan = scans[k];
    p.draw = draws[k];
    for (int row = 0; row < 2; ++row) {
      for (int i = 0; i < 2; ++i) part[k][row][i] = rows[row][2 * k + i];
    }
    p.call = call(part[k][0], 2);
    return p;
  }
};

void check_vocab_parallel() {
  Ranks ranks{};
  const dspark_rejection_sampler_params whole = ranks.call(ranks.rows[0], 4);
  const dspark_vocab_parallel_params p[2] = {ranks.rank(0), ranks.rank(1)};
  size_t bytes[2] = {};
  dspark_rejection_sampler_workspace(DSPARK_CPU, &whole, &bytes[0]);
  dspark_vocab_parallel_workspace(DSPARK_CPU, &p[0], &bytes[1]);
  std::vector<unsigned char> scratch((bytes[0] > bytes[1] ? bytes[0] : bytes[1]) + 256);
  void* data = &scratch[255 - (reinterpret_cast<uintptr_t>(scratch.data()) + 255) % 256];
  expect(dspark_rejection_sampler(DSPARK_CPU, &whole, {data, bytes[0]}, nullptr).code == DSPARK_OK,
         "the call on all ids");
  const int32_t emitted = ranks.emitted;
  const int32_t first = ranks.tokens[0];
  using Function = dspark_status (*)(dspark_device, const dspark_vocab_parallel_params*,
                                     dspark_workspace, void*);
  for (Function f :
       {&dspark_vocab_parallel_scan, &dspark_vocab_parallel_draw, &dspark_vocab_parallel_finish}) {
    for (int k = 0; k < 2; ++k) {
      ranks.emitted = ranks.tokens[0] = -9;
      const dspark_status answer = f(DSPARK_CPU, &p[k], {data, bytes[1]}, nullptr);
      expect(answer.code == DSPARK_OK, answer.message);
      if (f != &dspark_vocab_parallel_finish) continue;
      expect(ranks.emitted >= 1 && ranks.tokens[0] >= 0 && ranks.status == 0, "tokens of a rank");
      // p(3) = .64 and the coin is the position's: accepted or not, all agree.
      expect((ranks.tokens[0] == 3) == (first == 3), "the same coin as on all ids");
      expect(ranks.emitted == emitted, "as many tokens as on all ids");
    }
  }
}

void check_device(bool with_cuda) {
  dspark_cuda_info info{};
  expect(dspark_cuda_query(&info).code == DSPARK_INVALID_ARGUMENT, "a zero struct_size is refused");
  expect(dspark_cuda_query(nullptr).code == DSPARK_INVALID_ARGUMENT, "NULL is refused");
  info.struct_size = sizeof info;
  expect(dspark_cuda_query(&info).code == DSPARK_OK, "the query never fails");
  expect((info.compiled != 0) == with_cuda, "built as find_package says");
  expect((info.usable == 0) == (info.reason[0] != '\0'), "a reason exactly when it is not usable");
  std::printf("cuda: %s\n", info.usable != 0 ? "usable" : info.reason);

  const dspark_status probe = dspark_cuda_probe(0);
  const int expected = !with_cuda         ? DSPARK_UNSUPPORTED
                       : info.usable != 0 ? DSPARK_OK
                                          : DSPARK_CUDA_ERROR;
  expect(probe.code == expected, probe.message);
  expect((probe.code == DSPARK_OK) == (probe.message[0] == '\0'), "a text for every failure");
}

}  // namespace

int main(int argc, char** argv) {
  check_confidence();
  check_vocab_parallel();
  check_device(argc > 1 && std::strcmp(argv[1], "cuda") == 0);
  expect(std::strcmp(dspark_status_name(DSPARK_BAD_PAGE), "BAD_PAGE") == 0, "names of bits");
  std::printf("dspark %s, %s: %d failures\n", dspark_version(), dspark_cpu_level(), failures);
  return failures == 0 ? 0 : 1;
}
