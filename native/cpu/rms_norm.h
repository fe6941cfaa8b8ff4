// The CPU's RMSNorm handlers. x is (outer, n, inner), normalised over n; see rms_norm.cc.
#pragma once

#include "xla/ffi/api/ffi.h"

XLA_FFI_DECLARE_HANDLER_SYMBOL(NormfuseRmsNormForward);
XLA_FFI_DECLARE_HANDLER_SYMBOL(NormfuseRmsNormRowSums);
XLA_FFI_DECLARE_HANDLER_SYMBOL(NormfuseRmsNormApply);
XLA_FFI_DECLARE_HANDLER_SYMBOL(NormfuseRmsNormBackward);
XLA_FFI_DECLARE_HANDLER_SYMBOL(NormfuseRmsNormRowDots);
XLA_FFI_DECLARE_HANDLER_SYMBOL(NormfuseRmsNormBackwardApply);
