// Rows sorted by expert, so that each expert's weights are read once per call (MoE-SpeQ 3.4.4).
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace speq::cpu {

// The places t * top_k + j of a route that chose an expert, and the slot it lies in.
struct ExpertRows {
  std::int64_t expert;
  std::int64_t slot;
  std::vector<std::int64_t> places;
};

// Groups in the order in which a route names their experts.
//   topk_ids  [places]; slots [E]: the slot of each expert, of num_slots; one that is negative
//             leaves its rows out where `absent_allowed`
// Throws std::out_of_range, naming ids_name or slots_name, for ids or slots that do not exist.
inline std::vector<ExpertRows> group_by_expert(std::span<const std::int64_t> topk_ids,
                                               std::span<const std::int64_t> slots,
                                               std::int64_t num_slots, bool absent_allowed,
                                               const char *slots_name) {
  std::vector<ExpertRows> groups;
  std::vector<int> group_of(slots.size(), -1);
  for (std::size_t place = 0; place < topk_ids.size(); ++place) {
    const std::int64_t expert = topk_ids[place];
    if (expert < 0 || expert >= std::int64_t(slots.size())) {
      throw std::out_of_range("topk_ids holds " + std::to_string(expert) + "; there are " +
                              std::to_string(slots.size()) + " experts of " + slots_name);
    }
    const std::int64_t slot = slots[expert];
    if (slot < 0 && absent_allowed) {
      continue;
    }
    if (slot < 0 || slot >= num_slots) {
      throw std::out_of_range(std::string(slots_name) + " holds " + std::to_string(slot) +
                              "; there are " + std::to_string(num_slots) + " slots");
    }
    if (group_of[expert] < 0) {
      group_of[expert] = int(groups.size());
      groups.push_back({expert, slot, {}});
    }
    groups[group_of[expert]].places.push_back(std::int64_t(place));
  }
  return groups;
}

} // namespace speq::cpu
