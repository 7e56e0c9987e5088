// C ABI of the placement planner. Pure functions: no clock, no I/O, no threads, no state between calls.
//
// Ranks are named by their index 0..ranks-1 here; the caller maps seats to indices. Tables are row-major
// [layers][ranks][slots]; an expert id of -1 is an empty slot; a weight of 65536 is all of an expert's tokens.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
#define EP_PLACEMENT_API extern "C" __attribute__((visibility("default")))
#else
#define EP_PLACEMENT_API __attribute__((visibility("default")))
#endif

enum ep_placement_status {
  EP_PLACEMENT_OK = 0,
  EP_PLACEMENT_ARGUMENT = -1,  // a size or pointer that cannot be used
  EP_PLACEMENT_SLOTS = -2,     // open ranks have fewer slots than there are experts
  EP_PLACEMENT_PREVIOUS = -3,  // the previous table names an expert twice on a rank, or an unknown id
};

enum ep_placement_method {
  EP_PLACEMENT_KEPT = 0,      // nothing moved, only weights
  EP_PLACEMENT_REPAIRED = 1,  // fewest moves from the previous placement
  EP_PLACEMENT_FRESH = 2,     // built anew
};

struct ep_placement_problem {
  int32_t layers, experts, ranks, slots;  // slots: row length of the tables
  int32_t groups;                         // expert groups that stay inside a node; 1 = no such limit
  int32_t weighted;                       // 1: replicas share by weight; 0: evenly, as engines without weights do
  int32_t cover;                          // 1: second copies elsewhere, where slots allow
  int32_t fill;                           // 1: leave no slot empty
  int32_t moves_allowed;                  // 0: only split again
  int32_t target_ppm;                     // a previous placement at or below mean * (1 + ppm / 1e6) is good enough
  int32_t gain_ppm;                       // built anew only if that lowers the maximum by this much more
  int32_t reserved;
  const int64_t* loads;              // [layers][experts] tokens, >= 0
  const int32_t* rank_slots;         // [ranks] slots that exist, <= slots
  const int32_t* rank_node;          // [ranks] node index, 0-based, dense
  const int32_t* rank_domain;        // [ranks] domain index
  const uint8_t* rank_closed;        // [ranks] 1: draining: may be copied from, gets no copies and, where possible, no tokens
  const int32_t* previous_expert;    // [layers][ranks][slots], or null
  const uint32_t* previous_weight;   // the same shape, or null with previous_expert
  const int32_t* layer_moves;        // [layers] most moves in each layer, or null
};

struct ep_placement_layer {
  double before;      // highest rank load / mean with the previous placement split as it was; 0 without one
  double after;       // the same with the returned tables
  double bound;       // no placement on these slots can be below this
  int32_t moves;      // slots that get other weights than they hold
  int32_t restored;   // of these, experts that no rank held
  int32_t lost;       // experts that still have no copy
  int32_t single;     // experts with one copy on open ranks
  int32_t same_node;  // experts whose copies are all in one node
  int32_t method;     // enum ep_placement_method
  int32_t spilled;    // experts that a missing copy forces out of their group's node
  int32_t global;     // 1: groups were asked for but do not fit into nodes
};

// Fills slot_expert and slot_weight [layers][ranks][slots] and report [layers].
EP_PLACEMENT_API int32_t ep_placement_plan(const struct ep_placement_problem* problem, int32_t* slot_expert,
                                           uint32_t* slot_weight, struct ep_placement_layer* report);
EP_PLACEMENT_API int32_t ep_placement_problem_size(void);
EP_PLACEMENT_API int32_t ep_placement_layer_size(void);
