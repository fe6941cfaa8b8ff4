// A norm's backward kernel sums over rows, each (FEATURES,): dscale if WITH_DSCALE, then dbias if
// WITH_DBIAS.
#pragma once

#define SUMS (WITH_DSCALE + WITH_DBIAS)
#if WITH_DSCALE || WITH_DBIAS
#define HAS_PARTIAL 1
#else
#define HAS_PARTIAL 0
#endif
