// Multi-head latent attention (MLA, arXiv:2405.04434) of a few tokens, in its absorbed form: the
// projection that would expand the cached latents to heads of keys and values is applied to the
// queries and to the results.
#pragma once

#include "cpu/block_attention.h"

namespace speq::cpu {

enum class RotaryColumns {
  halves,    // column i and i + rotary / 2 are rotated
  parted,    // neighbours are, and parted first
  neighbours // neighbours are, in float32, and stay neighbours
};

// Every array is of the span's word, and the span has one head of keys.
struct LatentAttentionProblem {
  AttentionSpan span;
  std::int64_t rank, rotary, key_width, value_width; // of latents, and of a head
  RotaryColumns columns;
  const void *queries;     // [rows, heads, key_width + rotary]
  const void *latents;     // [rows, rank + rotary]
  const void *norm_weight; // [rank]
  float eps;
  const void *expansion; // [heads, key_width + value_width, rank]
  const void *cos, *sin; // [rows, rotary]; neighbours: float32 [rows, rotary / 2]
  void *cached_latents;  // [capacity, rank]
  void *cached_rotary;   // [capacity, rotary]
  void *out;             // [rows, heads, value_width]
};

// Norms latents, rotates queries and keys, writes the rows' KV, and attends.
void latent_attention(const LatentAttentionProblem &problem);

} // namespace speq::cpu
