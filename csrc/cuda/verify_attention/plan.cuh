// SPDX-License-Identifier: Apache-2.0
//
// The plan: who computes what. Every CTA derives it from the lengths on the device; nothing is
// written, and nobody waits for it.
//
// A *tile* is some query rows of one request and one KV head (a row = a token and a head of the
// group), together with the keys that any of them sees. Its keys are cut into *units* at multiples
// of the unit's size; a tile counts `overhead` units more for what it costs besides. The units of
// all tiles in order (request, rows, KV head) are a line of `total`; CTA c has units [c share, (c +
// 1) share), so all CTAs read the same number of bytes and a tile that crosses a boundary is
// shared by neighbours.
//
// With few tiles (config.h) a cluster has one tile: its number is that of the tile, whether the
// request has such rows or not, and its CTAs take runs of equal length of the tile's units. That
// needs the lengths of one request, and no look at the others.
//
// In the batch-invariant mode 256 keys at a multiple of 256, a split, have a softmax of their own.
// Splits are folded in ascending order to runs of 1024 keys, and runs to rows (results.cuh),
// whoever has computed them. Where there are few, a unit is a split, so that many CTAs have some;
// otherwise a run, of which a CTA hands over one part instead of four. If there are more units than
// slots to hand them over, a tile is not shared: it belongs to the CTA in which it begins.
//
// What a CTA waits for before it knows its share: the lengths of the requests, read once by one
// thread each, and two barriers. The scheduler's list of work (core/work_plan.h) would not shorten
// that: it names a request whose kv_len would have to be read behind it.
#ifndef DSPARK_CUDA_VERIFY_ATTENTION_PLAN_CUH_
#define DSPARK_CUDA_VERIFY_ATTENTION_PLAN_CUH_

#include "cuda/prim/platform.h"
#include "cuda/verify_attention/args.h"

namespace dspark::cuda::attention {

__device__ __forceinline__ int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
__device__ __forceinline__ int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

/// A request as the device has it.
struct Request {
  int32_t first;   // its first row of q
  int32_t q_len;   // query tokens, 0 if the bounds are wrong
  int32_t kv_len;  // keys
  int32_t status;  // bits that follow from the lengths

  __device__ bool works() const { return status == 0 && q_len > 0; }

  /// Keys [low, high) that token i sees.
  __device__ int32_t low(const Params& p, int32_t i) const {
    const int64_t position = int64_t{kv_len} - q_len + i;
    return p.window > 0 ? static_cast<int32_t>(max64(0, position - p.window + 1)) : 0;
  }
  __device__ int32_t high(const Params& p, int32_t i) const {
    return p.causal != 0 ? max(0, kv_len - q_len + i + 1) : kv_len;
  }
};

/// What the device knows of a request, as it was read.
struct Lengths {
  int32_t begin, end, kv_len;
};
__device__ __forceinline__ Lengths read_lengths(const Params& p, int64_t r) {
  return {p.cu_seqlens[r], p.cu_seqlens[r + 1], p.kv_len[r]};
}

// `usable`: the scales of the cache are (results.cuh).
__device__ __forceinline__ Request request_of(const Params& p, const Lengths& read, bool usable) {
  const int32_t begin = read.begin, end = read.end;
  const bool bounded = begin >= 0 && begin <= end && end <= p.num_tokens;
  Request q{begin, bounded ? end - begin : 0, read.kv_len, 0};
  if (!bounded || q.q_len > p.max_q_len || q.kv_len < 0) {
    q.status = DSPARK_BAD_PARAM;
  } else if (q.q_len > 0 && !usable) {
    q.status = DSPARK_BAD_PARAM;
  } else if (q.q_len > 0 && q.kv_len > static_cast<int64_t>(p.max_pages) * p.page_size) {
    q.status = DSPARK_KV_OVERFLOW;
  }
  return q;
}
__device__ __forceinline__ Request read_request(const Params& p, int64_t r, bool usable) {
  return request_of(p, read_lengths(p, r), usable);
}

/// Without padding: it is copied as a whole. Rows [row, row + rows) of a request (row = token *
/// group + head of the group) and one KV head.
struct alignas(16) Tile {
  Request q;
  int32_t request, head;
  int32_t row, rows;
  int32_t low, high;          // keys that any of the rows sees
  int32_t first_unit, units;  // where they lie; at least one unit
  int32_t owner, sharers;  // the CTA that has the first unit (0 in a cluster), how many have some
  int64_t begin;           // number of the first unit on the line of all units

  __device__ bool last_rows(int32_t group) const { return row + rows == q.q_len * group; }
};

static_assert(sizeof(Tile) == 16 + 10 * sizeof(int32_t) + sizeof(int64_t), "no padding");

/// What all threads of a CTA know of the plan; it lies in shared memory.
struct PlanState {
  int64_t share, begin, end;  // units of a CTA, and this CTA's range
  int32_t participants;       // CTAs that have a share
  int32_t group;              // query heads of a KV head
  int32_t shift;              // a unit is 1 << shift keys
  bool whole;                 // no tile belongs to two CTAs
  bool works;                 // this CTA, or its cluster, has something to do
  Tile tile;                  // the one at hand
  int32_t from, to;           // its units that are this CTA's; none if to <= from
  int64_t sums[32];           // scratch of the search
};

class Plan {
 public:
  /// The state is this CTA's alone.
  __device__ Plan(const Args& args, PlanState& state) : args_(args), p_(args.p), s_(state) {}

  /// The first request that this thread counts; in a launch of clusters the one that all CTAs of
  /// the cluster work for.
  __device__ int64_t first_request() const {
    const Config& c = args_.config;
    if (c.cluster > 0) {
      return static_cast<int32_t>(blockIdx.x) / (c.cluster * tiles_of_request());
    }
    return int64_t{threadIdx.x} * requests_of_thread();
  }

  /// Asks for the lengths that this thread needs first, and waits for nothing.
  __device__ void read() {
    const int64_t r = first_request();
    if (r < p_.num_requests) lengths_ = read_lengths(p_, r);
  }

  /// Whole CTA, before all below. `usable`: scales are. Ends with a barrier.
  __device__ void form(bool usable) {
    usable_ = usable;
    shift_ = args_.config.unit_shift;
    if (args_.config.cluster > 0) {
      if (threadIdx.x == 0) take_cluster();
    } else {
      take_share();
    }
    __syncthreads();
  }

  /// CTAs that have a share.
  __device__ int32_t participants() const { return s_.participants; }
  __device__ bool takes_part() const { return s_.works; }
  __device__ bool whole() const { return s_.whole; }
  /// Tiles of a request in a launch of clusters.
  __device__ int32_t tiles_of_request() const { return args_.config.row_blocks * p_.num_kv_heads; }

  __device__ const Tile& tile() const { return s_.tile; }
  /// The tile may have units of this CTA. Tiles that begin behind have none.
  __device__ bool more() const {
    return s_.tile.request < p_.num_requests && s_.tile.begin - args_.config.overhead < s_.end;
  }

  /// A unit is a split, of the batch-invariant mode.
  __device__ bool splits() const { return s_.shift == kSplitShift; }
  /// The units [from, to) of the tile that are this CTA's, from 0.
  __device__ int32_t from() const { return s_.from; }
  __device__ int32_t to() const { return s_.to; }
  /// The first key of unit `unit` of the tile, or the end of its keys.
  __device__ int32_t key(int32_t unit) const {
    const int64_t key = static_cast<int64_t>(s_.tile.first_unit + unit) << s_.shift;
    return static_cast<int32_t>(max64(s_.tile.low, min64(s_.tile.high, key)));
  }
  /// Other CTAs have units of the tile as well.
  __device__ bool shared() const { return s_.to - s_.from < s_.tile.units; }

  /// The tile behind this one. Whole CTA.
  __device__ void next() {
    __syncthreads();
    if (threadIdx.x == 0 && args_.config.cluster > 0) {
      s_.end = s_.tile.begin - args_.config.overhead;  // there is none
    } else if (threadIdx.x == 0) {
      Tile& t = s_.tile;
      const int64_t line = t.begin + t.units;
      if (t.head + 1 < p_.num_kv_heads) {
        t.head += 1;
      } else if (t.head = 0; !t.last_rows(s_.group)) {
        set_rows(t, t.row + args_.config.rows);
      } else {
        set_request(t.request + 1);
      }
      place(line + args_.config.overhead);
    }
    __syncthreads();
  }

 private:
  // Requests that a thread counts, neighbours.
  __device__ int32_t requests_of_thread() const {
    return (p_.num_requests - 1) / static_cast<int32_t>(blockDim.x) + 1;
  }

  // The tile that has this cluster's number, and this CTA's run of its units. One thread.
  __device__ void take_cluster() {
    const int32_t size = args_.config.cluster;
    const int32_t rank = static_cast<int32_t>(blockIdx.x) % size;
    const int32_t number = static_cast<int32_t>(blockIdx.x) / size % tiles_of_request();
    Tile& t = s_.tile;
    s_.group = p_.num_q_heads / p_.num_kv_heads;
    s_.shift = shift_;
    s_.whole = false;
    s_.participants = 0;
    t.request = static_cast<int32_t>(first_request());
    t.head = number % p_.num_kv_heads;
    t.q = request_of(p_, lengths_, usable_);
    const int32_t row = number / p_.num_kv_heads * args_.config.rows;
    s_.works = t.q.works() && row < t.q.q_len * s_.group;
    if (!s_.works) return;
    set_rows(t, row);
    const int32_t run = (t.units - 1) / size + 1;
    t.owner = 0;
    t.sharers = (t.units - 1) / run + 1;
    t.begin = 0;
    s_.from = min(t.units, rank * run);
    s_.to = min(t.units, s_.from + run);
    s_.end = t.units;
  }

  // This CTA's share of the line, and the first tile of it. Whole CTA.
  __device__ void take_share() {
    const int32_t first = static_cast<int32_t>(first_request());
    const Config& c = args_.config;
    int64_t total = 0, line = 0, mine = 0;
    if (c.invariant) {
      shift_ = kSplitShift;
      total = count(first, &line, &mine);
      __syncthreads();
    }
    if (!c.invariant || total > min64(c.slots, int64_t{kFineUnits} * c.grid)) {
      shift_ = c.unit_shift;
      total = count(first, &line, &mine);
    }
    const Share share = share_of(total);
    const bool works = share.begin < share.end;
    // The thread whose requests have the share's first unit, or thread 0 if there is none.
    if (works ? line <= share.begin && share.begin < line + mine : threadIdx.x == 0) {
      s_.share = share.units;
      s_.begin = share.begin;
      s_.end = share.end;
      s_.participants = share.participants;
      s_.shift = shift_;
      s_.whole = args_.config.invariant && total > args_.config.slots;
      s_.group = p_.num_q_heads / p_.num_kv_heads;
      s_.works = works;
      if (works) find(first, line);
    }
  }

  // Units of all requests; those of this thread's, and where they start. Whole CTA; one barrier.
  __device__ int64_t count(int32_t first, int64_t* line, int64_t* mine) {
    const int32_t requests = requests_of_thread();
    *mine = 0;
    for (int32_t i = 0; i < requests && first + i < p_.num_requests; ++i) {
      if (requests > 1) lengths_ = read_lengths(p_, first + i);
      *mine += units_of(request_of(p_, lengths_, usable_));
    }
    const int64_t scan = inclusive_scan(*mine);
    if (threadIdx.x % 32 == 31) s_.sums[threadIdx.x / 32] = scan;
    __syncthreads();
    int64_t total = 0;
    *line = scan - *mine;
    for (uint32_t w = 0; w < blockDim.x / 32; ++w) {
      if (w < threadIdx.x / 32) *line += s_.sums[w];
      total += s_.sums[w];
    }
    return total;
  }

  struct Share {
    int64_t units;       // of each CTA
    int64_t begin, end;  // this one's
    int32_t participants;
  };

  // Equal shares of the line. No division of 64 bits: those are calls.
  __device__ Share share_of(int64_t total) const {
    const int64_t grid = args_.config.grid;
    Share s{args_.config.min_share, 0, 0, 0};
    if (total > grid * s.units) {
      int64_t even = __umul64hi(total - 1, args_.config.grid_inverse);  // or one too few
      if (total - 1 - even * grid >= grid) ++even;
      s.units = even + 1;
    }
    // Shares that begin before the end: all but those that lie in the rest of the last ones.
    const int64_t rest = grid * s.units - total;
    const int64_t idle =
        s.units > rest ? 0 : static_cast<int32_t>(rest) / static_cast<int32_t>(s.units);
    if (total > 0) s.participants = static_cast<int32_t>(grid - idle);
    s.begin = min64(total, blockIdx.x * s.units);
    s.end = min64(total, s.begin + s.units);
    return s;
  }

  // The tile that has unit s_.begin (or the overhead before it), which is among those of the
  // requests from r on, whose units start at `line`. One thread.
  __device__ void find(int32_t r, int64_t line) {
    for (; r + 1 < p_.num_requests; ++r) {
      const int64_t units = units_of(read_request(p_, r, usable_));
      if (s_.begin < line + units) break;
      line += units;
    }
    set_request(r);
    skip_rows(line);
  }

  // Where the tile's units lie, and which are this CTA's. One thread.
  __device__ void place(int64_t begin) {
    Tile& t = s_.tile;
    t.begin = begin;
    // Distances inside of a tile fit in 32 bits, and a share beyond that is more than a tile.
    const int32_t share = static_cast<int32_t>(min64(s_.share, INT32_MAX));
    t.owner = static_cast<int32_t>(blockIdx.x);
    if (begin < s_.begin) t.owner -= (static_cast<int32_t>(s_.begin - begin) - 1) / share + 1;
    const int64_t behind = begin + t.units - (t.owner + 1) * s_.share;  // the owner
    t.sharers = behind <= 0 ? 1 : (static_cast<int32_t>(behind) - 1) / share + 2;
    if (s_.whole) {
      s_.from = 0;
      s_.to = begin >= s_.begin && begin < s_.end ? t.units : 0;
    } else {
      s_.from = static_cast<int32_t>(max64(0, s_.begin - begin));
      s_.to = static_cast<int32_t>(max64(0, min64(s_.end - begin, t.units)));
    }
  }

  // The first tile of the first request from r on that has rows. One thread.
  __device__ void set_request(int32_t r) {
    Tile& t = s_.tile;
    for (; r < p_.num_requests; ++r) {
      t.q = read_request(p_, r, usable_);
      if (t.q.works()) break;
    }
    t.request = r;
    t.head = 0;
    if (r < p_.num_requests) set_rows(t, 0);
  }

  __device__ void set_rows(Tile& t, int32_t row) const {
    const int32_t group = p_.num_q_heads / p_.num_kv_heads;
    t.row = row;
    t.rows = min(args_.config.rows, t.q.q_len * group - row);
    t.low = t.q.low(p_, row / group);
    t.high = t.q.high(p_, (row + t.rows - 1) / group);
    t.first_unit = t.low >> shift_;
    t.units = 1;
    if (t.low < t.high) t.units = ((t.high - 1) >> shift_) - t.first_unit + 1;
  }

  // Units of a request, overhead included.
  __device__ int64_t units_of(const Request& q) const {
    if (!q.works()) return 0;
    Tile t;
    t.q = q;
    int64_t units = 0;
    const int32_t rows = q.q_len * (p_.num_q_heads / p_.num_kv_heads);
    for (int32_t row = 0; row < rows; row += args_.config.rows) {
      set_rows(t, row);
      units += args_.config.overhead + t.units;
    }
    return units * p_.num_kv_heads;
  }

  static __device__ int64_t inclusive_scan(int64_t x) {
    const int lane = threadIdx.x % 32;
    for (int d = 1; d < 32; d *= 2) {
      const int64_t other = __shfl_up_sync(0xffffffffu, x, d);
      if (lane >= d) x += other;
    }
    return x;
  }

  // From the first tile of the request, whose units start at `line`, to the one with unit
  // s_.begin. One thread.
  __device__ void skip_rows(int64_t line) {
    Tile& t = s_.tile;
    for (;;) {
      const int64_t each = args_.config.overhead + t.units;
      if (s_.begin - line < each * p_.num_kv_heads) {
        for (; s_.begin - line >= each; line += each) ++t.head;
        place(line + args_.config.overhead);
        return;
      }
      line += each * p_.num_kv_heads;
      set_rows(t, t.row + args_.config.rows);
    }
  }

  const Args& args_;
  const Params& p_;
  PlanState& s_;
  Lengths lengths_ = {0, 0, 0};  // of first_request()
  int32_t shift_ = 0;
  bool usable_ = false;
};

}  // namespace dspark::cuda::attention

#endif  // DSPARK_CUDA_VERIFY_ATTENTION_PLAN_CUH_
