// SHA-256 (FIPS 180-4), to check an image against its digest before it is loaded.
#pragma once

#include <cstddef>
#include <string>

namespace normfuse {

// The digest in hexadecimal.
std::string Sha256(const void* data, size_t size);

}  // namespace normfuse
