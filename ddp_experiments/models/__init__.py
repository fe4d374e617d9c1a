"""Plain modules with explicit constructor arguments."""
