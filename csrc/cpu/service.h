// Service launch: the worker's loop on the doorbells of a rank.
#pragma once
#include "runner.h"

namespace ep {

// Answers the commands of one channel until *stop.
void serve_channel(Runner& runner, u32 channel, const std::atomic<bool>& stop);

// Stages a view on the daemon's word and answers it; the link's handler of worker and inline session alike.
struct Received;
class Link;
void handle_stage(Runner& runner, Link& link, Received& message);

}  // namespace ep
