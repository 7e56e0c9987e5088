// The plan of one layer: keep, repair or build anew.
#pragma once
#include "cover.h"
#include "layer.h"
#include "placement.h"
#include "repair.h"

namespace ep::placement {

class Planner {
 public:
  explicit Planner(const ep_placement_problem& problem);

  // Plans layer `index` into tables [ranks][slots].
  void run(int index, int32_t* slot_expert, uint32_t* slot_weight, ep_placement_layer& report);

  const Cluster& cluster() const { return cluster_; }

 private:
  void warm(int moves);
  void fresh();
  void fresh_cell(int cell);
  void build_weighted(const std::vector<int>& experts, int cell, int64_t mean);
  void build_even(const std::vector<int>& experts, int cell, int64_t mean);
  int64_t highest(int cell) const;
  void keep_even(int moves);
  bool misses_target() const;
  int64_t cell_load(int cell) const;
  int64_t target_of(int cell, int64_t ppm) const;
  int64_t slots_of(int cell) const;
  int holders_of(int cell) const;
  int64_t bound() const;
  int64_t crowding() const;
  double measure(const int32_t* slot_expert, const uint32_t* slot_weight) const;
  void describe(ep_placement_layer& report) const;
  int cell_of(int expert) const;

  const ep_placement_problem& problem_;
  Cluster cluster_;
  bool grouped_ = false;
  Layer layer_;
  Repair repair_;
  Cover cover_;
};

// Checks everything that can be checked before planning; returns an ep_placement_status.
int32_t check_problem(const ep_placement_problem& problem);

}  // namespace ep::placement
