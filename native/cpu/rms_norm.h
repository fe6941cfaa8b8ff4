// The CPU's RMSNorm handlers. x is (outer, n, inner), normalised over n; see rms_norm.cc.
#ifndef NORMFUSE_CPU_RMS_NORM_H_
#define NORMFUSE_CPU_RMS_NORM_H_

#include "xla/ffi/api/c_api.h"

extern "C" {
XLA_FFI_Error* NormfuseRmsNormForward(XLA_FFI_CallFrame*);
XLA_FFI_Error* NormfuseRmsNormRowSums(XLA_FFI_CallFrame*);
XLA_FFI_Error* NormfuseRmsNormApply(XLA_FFI_CallFrame*);
XLA_FFI_Error* NormfuseRmsNormBackward(XLA_FFI_CallFrame*);
XLA_FFI_Error* NormfuseRmsNormRowDots(XLA_FFI_CallFrame*);
XLA_FFI_Error* NormfuseRmsNormBackwardApply(XLA_FFI_CallFrame*);
}

#endif  // NORMFUSE_CPU_RMS_NORM_H_
