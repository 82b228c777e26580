// SPDX-License-Identifier: Apache-2.0

#include "kernels/cpu/attention_plan.h"

#include <algorithm>

namespace tandem::kernels::cpu {
namespace {

// One tile of queries: rows of one span, query heads of one KV head.
struct Task {
  int32_t span;
  int32_t row;  // within the span
  int32_t rows;
  int32_t kv_head;
  int32_t group_begin;
  int32_t group;
  int32_t first_segment;
  int32_t segments;  // from the first
  int32_t partial;   // index of its first partial, counted in queries
};

// Tasks are planned and run in batches of at most this many; their list and
// the partials share the team's scratch.
inline constexpr int kBatch = 16384;
inline constexpr size_t kListBytes = kBatch * sizeof(Task);

inline constexpr int kNoWindow = 1 << 30;

// How many tasks per thread make splitting by segments pointless.
inline constexpr int kTasksPerThread = 4;

// Rows per thread whose heads go one by one.
inline constexpr int kRowsByHead = 2;

class Planner {
 public:
  Planner(const KernelTable& table, ThreadPool::Team& team,
          const AttentionStep& step)
      : table_(table),
        team_(team),
        step_(step),
        layout_(step.cache->layout()),
        attend_(layout_.type == DType::kInt8 ? table.attention_int8
                                             : table.attention),
        window_(step.options.window > 0 ? step.options.window : kNoWindow),
        tasks_(reinterpret_cast<Task*>(team.team_scratch())) {}

  void Run() {
    const int group = step_.heads / layout_.kv_heads;
    const int group_tile = std::min(group, kMaxQueries);
    const int row_tile = std::max(1, kMaxQueries / group);
    for (int i = 0; i < step_.rows.num_spans; ++i) {
      const RowSpan& span = step_.rows.host_spans[i];
      for (int row = 0; row < span.num_rows; row += row_tile) {
        const int rows = std::min(row_tile, span.num_rows - row);
        const int first = span.first_position + row;
        const int first_segment = FirstKey(first, window_) / kAttentionSegment;
        const int end_segment = (first + rows - 1) / kAttentionSegment + 1;
        for (int head = 0; head < layout_.kv_heads; ++head) {
          for (int begin = 0; begin < group; begin += group_tile) {
            if (count_ == kBatch) Flush();
            tasks_[count_++] = {i,
                                row,
                                rows,
                                head,
                                begin,
                                std::min(group_tile, group - begin),
                                first_segment,
                                end_segment - first_segment,
                                0};
          }
        }
      }
    }
    Flush();
  }

 private:
  AttentionPiece Piece(const Task& task, int member) const {
    const RowSpan& span = step_.rows.host_spans[task.span];
    const int64_t row = span.first_row + task.row;
    const int64_t head =
        int64_t{task.kv_head} * (step_.heads / layout_.kv_heads) +
        task.group_begin;
    const int64_t out_stride = int64_t{step_.heads} * layout_.head_dim;
    AttentionPiece piece{};
    piece.q = step_.q + row * step_.q_stride + head * layout_.head_dim;
    piece.q_stride = step_.q_stride;
    piece.rows = task.rows;
    piece.group = task.group;
    piece.first_position = span.first_position + task.row;
    piece.kv_head = task.kv_head;
    piece.scale = step_.options.scale;
    piece.soft_cap = step_.options.soft_cap;
    piece.window = window_;
    const float* const sinks = step_.options.sinks;
    piece.sinks = sinks == nullptr ? nullptr : sinks + head;
    piece.layout = &layout_;
    piece.layer = step_.cache->Layer(step_.layer);
    piece.block_table = step_.rows.block_tables + span.block_table;
    piece.segment_begin = task.first_segment;
    piece.segment_end = task.first_segment + task.segments;
    piece.out = step_.out + row * out_stride + head * layout_.head_dim;
    piece.out_stride = out_stride;
    piece.far = table_.fetching.far;
    piece.scratch = team_.member_scratch(member);
    return piece;
  }

  // Gives every task room for its partials; false if there is too little of
  // it, or if splitting would not help.
  bool PlanSegments() {
    if (team_.threads() == 1 || count_ >= kTasksPerThread * team_.threads()) {
      return false;
    }
    int64_t partials = 0;
    num_items_ = 0;
    for (int i = 0; i < count_; ++i) {
      tasks_[i].partial = static_cast<int32_t>(partials);
      partials +=
          int64_t{tasks_[i].segments} * tasks_[i].rows * tasks_[i].group;
      num_items_ += tasks_[i].segments;
    }
    const int64_t bytes =
        partials * static_cast<int64_t>(sizeof(SoftmaxState) +
                                        static_cast<size_t>(layout_.width) *
                                            sizeof(float));
    if (num_items_ == count_ ||
        bytes >
            static_cast<int64_t>(ThreadPool::kTeamScratchBytes - kListBytes)) {
      return false;
    }
    states_ =
        reinterpret_cast<SoftmaxState*>(team_.team_scratch() + kListBytes);
    sums_ = reinterpret_cast<float*>(states_ + partials);
    return true;
  }

  void Flush() {
    if (count_ == 0) return;
    if (PlanSegments()) {
      RunSegments();
    } else {
      RunTasks();
    }
    count_ = 0;
  }

  // The longest contexts come last in a prefill: starts with them. A block's
  // heads lie side by side, and what the hardware fetches behind one's keys is
  // of use to the thread that takes the next head; so one takes them all, but
  // of the last rows, which each thread takes head by head not to end late.
  void RunTasks() {
    const int heads = layout_.kv_heads;
    const int rows = count_ / heads - kRowsByHead * team_.threads();
    const int together = count_ % heads == 0 ? std::max(0, rows) : 0;
    const int alone = count_ - together * heads;
    team_.ForEach(together + alone, [&](int item, int member) {
      const bool all = item < together;
      const int begin =
          all ? count_ - (item + 1) * heads : alone - 1 - (item - together);
      for (int i = 0; i < (all ? heads : 1); ++i) {
        attend_(Piece(tasks_[begin + i], member));
      }
    });
  }

  void RunSegments() {
    team_.ForEach(num_items_, [&](int item, int member) {
      int task = 0;
      while (item >= tasks_[task].segments) item -= tasks_[task++].segments;
      const int queries = tasks_[task].rows * tasks_[task].group;
      const int64_t partial = tasks_[task].partial + int64_t{item} * queries;
      AttentionPiece piece = Piece(tasks_[task], member);
      piece.segment_begin += item;
      piece.segment_end = piece.segment_begin + 1;
      piece.partial_states = states_ + partial;
      piece.partial_sums = sums_ + partial * layout_.width;
      attend_(piece);
    });
    team_.ForEach(count_, [&](int index, int member) {
      const Task& task = tasks_[index];
      const AttentionPiece piece = Piece(task, member);
      for (int i = 0; i < task.rows * task.group; ++i) {
        const int position = piece.first_position + i / task.group;
        const int first = FirstKey(position, window_) / kAttentionSegment;
        MergePiece merge{};
        merge.stride = task.rows * task.group;
        const int64_t partial =
            task.partial + int64_t{first - task.first_segment} * merge.stride +
            i;
        merge.states = states_ + partial;
        merge.sums = sums_ + partial * layout_.width;
        merge.segments = position / kAttentionSegment + 1 - first;
        merge.head_dim = layout_.head_dim;
        merge.width = layout_.width;
        merge.sink =
            piece.sinks == nullptr ? nullptr : piece.sinks + i % task.group;
        merge.out = piece.out + i / task.group * piece.out_stride +
                    i % task.group * int64_t{layout_.head_dim};
        table_.merge_segments(merge);
      }
    });
  }

  const KernelTable& table_;
  ThreadPool::Team& team_;
  const AttentionStep& step_;
  const KvLayout& layout_;
  void (*const attend_)(const AttentionPiece& piece);
  const int window_;
  Task* const tasks_;
  int count_ = 0;
  int num_items_ = 0;
  SoftmaxState* states_ = nullptr;
  float* sums_ = nullptr;
};

}  // namespace

void RunAttention(const KernelTable& table, ThreadPool::Team& team,
                  const AttentionStep& step) {
  Planner(table, team, step).Run();
}

}  // namespace tandem::kernels::cpu
