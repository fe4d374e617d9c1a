"""Measured ratios, interleaved in one run: python -m benchmarks.loop, .data, .startup."""
