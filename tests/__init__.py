"""Tests. A package, so that its probes can be `_target_`s: it lies in the project."""
