// Thrown by a command that waits for another rank, when a rank is lost.

#pragma once

namespace windlass {

struct LostRank {};

}  // namespace windlass
