// What this project fills and reads of AITER's attention interface.
//
// The structs mirror AITER's `mha_fwd_args` and `mha_bwd_args` field by field, in order and with the
// same types (csrc/include/mha_fwd.h and mha_bwd.h, AITER commit e4048607a5). The handlers in ffi/
// know these types only; behind the two functions stands either AITER on ROCm or aiter/host on a CPU.
//
// Conventions, all AITER's own:
//   * strides are in elements; the last dimension is contiguous.
//   * batch mode: q [batch, seqlen_q, nhead_q, hdim_q]; lse [batch, nhead_q, seqlen_q].
//   * group mode (varlen): q [total_q, nhead_q, hdim_q]; lse [nhead_q, total_q]; `seqlen_q` and
//     `seqlen_k` are totals, `max_seqlen_*` the longest sequence; `seqstart_*` are cumulative physical
//     offsets [batch + 1]; where sequences are padded, either `cu_seqlen_*` (cumulative logical,
//     [batch + 1]) or `seqlen_*_ptr` (logical, [batch]) says how long each one really is.
//   * windows are inclusive: `window_size_left` keys before the aligned one, itself, and
//     `window_size_right` after it; -1 is unbounded; causal is window_size_right = 0.
//   * a return value of -1 means "unsupported", anything else success.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <variant>

namespace aiter_contract {

enum MaskType : int { kMaskNone = 0, kMaskTopLeft = 1, kMaskBottomRight = 2, kMaskWindowGeneric = 3 };
enum BiasType : int { kBiasNone = 0, kBiasElementwise = 1, kBiasAlibi = 2 };

// ck_tile::stream_config. On a CPU `stream_id_` points to an aiter_host::Executor.
struct stream_config {
  void* stream_id_ = nullptr;
  bool time_kernel_ = false;
  int log_level_ = 0;
  int cold_niters_ = 3;
  int nrepeat_ = 10;
  bool is_gpu_timer_ = true;
  bool flush_cache_ = false;
  int rotating_count_ = 1;
};

using DropSeedOffset = std::variant<std::pair<uint64_t, uint64_t>, std::pair<const void*, const void*>>;

struct mha_fwd_args {
  bool use_asm_v3;
  bool v3_api_check;
  int how_v3_bf16_cvt;

  std::string data_type;  // "fp16", "bf16"; the host implementation also takes "fp32"
  bool is_group_mode;
  int bias_type;
  bool has_lse;
  int qscale_type;
  bool has_sink = false;

  const void* q_ptr;
  const void* k_ptr;
  const void* v_ptr;
  const void* bias_ptr;
  const void* q_descale_ptr;
  const void* k_descale_ptr;
  const void* v_descale_ptr;
  void* rand_val_ptr;
  void* lse_ptr;
  void* o_ptr;

  const void* seqstart_q_ptr = nullptr;
  const void* seqstart_k_ptr = nullptr;
  const void* seqlen_q_ptr = nullptr;
  const void* seqlen_k_ptr = nullptr;
  const void* cu_seqlen_q_ptr = nullptr;
  const void* cu_seqlen_k_ptr = nullptr;

  const void* block_scale_seqstart_q_ptr;
  const void* block_scale_seqstart_k_ptr;
  const void* sink_ptr;

  int32_t seqlen_q;
  int32_t seqlen_k;
  int32_t batch;
  int32_t max_seqlen_q;
  int32_t hdim_q;
  int32_t hdim_v;
  int32_t nhead_q;
  int32_t nhead_k;

  float scale_s;
  float logits_soft_cap;

  int32_t stride_q;
  int32_t stride_k;
  int32_t stride_v;
  int32_t stride_bias;
  int32_t stride_randval;
  int32_t stride_o;
  int32_t nhead_stride_q;
  int32_t nhead_stride_k;
  int32_t nhead_stride_v;
  int32_t nhead_stride_bias;
  int32_t nhead_stride_randval;
  int32_t nhead_stride_lse;
  int32_t nhead_stride_o;
  int32_t nhead_stride_q_descale;
  int32_t nhead_stride_k_descale;
  int32_t nhead_stride_v_descale;
  int32_t batch_stride_q;
  int32_t batch_stride_k;
  int32_t batch_stride_v;
  int32_t batch_stride_bias;
  int32_t batch_stride_randval;
  int32_t batch_stride_lse;
  int32_t batch_stride_o;
  int32_t batch_stride_q_descale;
  int32_t batch_stride_k_descale;
  int32_t batch_stride_v_descale;

  int32_t window_size_left;
  int32_t window_size_right;
  int32_t sink_size;
  int32_t mask_type;
  int32_t min_seqlen_q;

  float p_drop;
  bool s_randval;
  DropSeedOffset drop_seed_offset;

  int32_t block_scale_size_q;
  int32_t block_scale_size_kv;
};

struct mha_bwd_args {
  bool use_asm_v3;
  bool v3_atomic_fp32;
  int v3_bf16_cvt;
  bool v3_api_check;

  int hdim_q;
  int hdim_v;
  std::string data_type;
  bool is_group_mode;
  int mask_type;
  int bias_type;
  bool has_dbias;
  bool has_dropout;
  bool is_store_randval;
  bool is_deterministic;

  const void* q_ptr;
  const void* k_ptr;
  const void* v_ptr;
  const void* bias_ptr;
  const void* o_ptr;
  const void* lse_ptr;
  const void* do_ptr;
  void* d_ptr;  // rowsum(dO * O), fp32, strides of lse: written by the kernel
  void* rand_val_ptr;
  void* dq_ptr;
  void* dk_ptr;  // [batch, seqlen_k, nhead_q, hdim_q]: expanded, the caller sums over the group
  void* dv_ptr;  // [batch, seqlen_k, nhead_q, hdim_v]
  void* dbias_ptr;
  const void* sink_ptr = nullptr;
  void* d_sink_ptr = nullptr;

  const void* seqstart_q_ptr = nullptr;
  const void* seqstart_k_ptr = nullptr;
  const void* seqlen_q_ptr = nullptr;
  const void* seqlen_k_ptr = nullptr;
  const void* cu_seqlen_q_ptr = nullptr;
  const void* cu_seqlen_k_ptr = nullptr;

  int seqlen_q;
  int seqlen_k;
  int batch;
  int max_seqlen_q;
  int max_seqlen_k;
  int nhead_q;
  int nhead_k;
  float scale;

  int stride_q;
  int stride_k;
  int stride_v;
  int stride_bias;
  int stride_o;
  int stride_randval;
  int stride_do;
  int stride_dq;
  int stride_dk;
  int stride_dv;
  int stride_dbias;
  int nhead_stride_q;
  int nhead_stride_k;
  int nhead_stride_v;
  int nhead_stride_bias;
  int nhead_stride_o;
  int nhead_stride_randval;
  int nhead_stride_do;
  int nhead_stride_lsed;
  int nhead_stride_dq;
  int nhead_stride_dk;
  int nhead_stride_dv;
  int nhead_stride_dbias;
  int batch_stride_q;
  int batch_stride_k;
  int batch_stride_v;
  int batch_stride_bias;
  int batch_stride_o;
  int batch_stride_randval;
  int batch_stride_do;
  int batch_stride_lsed;
  int batch_stride_dq;
  int batch_stride_dk;
  int batch_stride_dv;
  int batch_stride_dbias;

  int window_size_left;
  int window_size_right;
  float p_drop;
  float p_undrop;
  DropSeedOffset drop_seed_offset;

  // Called at most once: the kernel's workspace, zeroed when asked.
  std::function<void*(size_t bytes, bool zero_init)> workspace_alloc;
  std::function<std::shared_ptr<void>(size_t bytes)> pinned_host_alloc;
};

float mha_fwd(const mha_fwd_args& args, const stream_config& stream);
float mha_bwd(const mha_bwd_args& args, const stream_config& stream);

}  // namespace aiter_contract
