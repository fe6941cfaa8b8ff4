"""What a device can compute at most, for MFU (model FLOP/s utilisation)."""

# Dense matrix products, TFLOP/s, from the vendors' data sheets: bfloat16, and what float32 operands
# run at by XLA's default (TF32 on NVIDIA GPUs, several bfloat16 passes' first on TPUs).
# The first key that begins a device's `device_kind` counts.
_TFLOPS: dict[str, dict[str, float]] = {
    "NVIDIA GB200": {"bfloat16": 2500, "float32": 1250},
    "NVIDIA B200": {"bfloat16": 2250, "float32": 1100},
    "NVIDIA GH200": {"bfloat16": 989.5, "float32": 494.7},
    "NVIDIA H200": {"bfloat16": 989.5, "float32": 494.7},
    "NVIDIA H100 PCIe": {"bfloat16": 756, "float32": 378},
    "NVIDIA H100 NVL": {"bfloat16": 835, "float32": 417.5},
    "NVIDIA H100": {"bfloat16": 989.5, "float32": 494.7},
    "NVIDIA H20": {"bfloat16": 148, "float32": 74},
    "NVIDIA A100": {"bfloat16": 312, "float32": 156},
    "NVIDIA A10G": {"bfloat16": 70, "float32": 35},
    "NVIDIA A10": {"bfloat16": 125, "float32": 62.5},
    "NVIDIA L40S": {"bfloat16": 362, "float32": 183},
    "NVIDIA L4": {"bfloat16": 121, "float32": 60},
    "TPU v4": {"bfloat16": 275, "float32": 275},
    "TPU v5 lite": {"bfloat16": 197, "float32": 197},
    "TPU v5p": {"bfloat16": 459, "float32": 459},
    "TPU v5": {"bfloat16": 459, "float32": 459},
    "TPU v6 lite": {"bfloat16": 918, "float32": 918},
}


def peak_flops(device_kind: str, precision: str) -> float | None:
    """Gives a device's peak FLOP/s for matrix products, or None for one that is not in the table.

    Args:
      device_kind: `jax.Device.device_kind`.
      precision: "float32" or "bfloat16".
    """
    for name, peaks in _TFLOPS.items():
        if device_kind.startswith(name):
            return peaks[precision] * 1e12
    return None
