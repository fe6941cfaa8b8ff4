"""As benchmarks.rms_norm, with a residual that is added first: y and h = x + residual."""

from benchmarks.rms_norm import main

if __name__ == "__main__":
    main(residual=True)
