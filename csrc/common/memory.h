// Memory files, their mappings, and what a daemon does to headers.
#pragma once
#include "header.h"

struct ep_header_map;

namespace ep {

struct Mapping {
  u8* base = nullptr;
  u64 bytes = 0;

  Mapping() = default;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();
  // `more`: the file may go on behind what is mapped.
  int map(int fd, u64 expected, const char* what, bool more = false);
};

// Memory of the host that processes can have without pushing others out; 0: not known.
u64 available_bytes();
int check_header(const Header& header, u64 digest);
Header* header_of(ep_header_map* map);
// What a header says now; holders that the kernel marked dead count as none.
void snapshot(const Header& h, ep_status* out);
void fence(Header& header, u32 inc, u64 epoch, const char* text);
// Whether a daemon refused to have this incarnation back. One that is over is fenced, so that its engine hears why: the daemon
// may know only an earlier one, if its disk was full when the seat was granted anew.
bool refused(const ep_message& answer, Header& header, u32 inc);

}  // namespace ep
